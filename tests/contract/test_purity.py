from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
before = set(sys.modules)
import kvprov.contract, kvprov.contract.document, kvprov.contract.dimensions
new = set(sys.modules) - before
ours = {name for name in new if name.partition('.')[0] == 'kvprov'}
print(*sorted(ours))
print(*sorted({name.partition('.')[0] for name in new - ours} - sys.stdlib_module_names))
"""


def test_the_contract_imports_the_standard_library_alone() -> None:
    # In a process of its own, without site packages' startup files: pytest has imported everything already.
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{SCRIPT}"],
        capture_output=True,
        text=True,
        check=True,
    )
    ours, foreign = run.stdout.split("\n")[:2]
    assert "kvprov.contract.document" in ours.split()
    assert [name for name in ours.split() if name != "kvprov" and not name.startswith("kvprov.contract")] == []
    assert foreign.split() == []
