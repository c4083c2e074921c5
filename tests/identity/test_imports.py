from __future__ import annotations

import subprocess
import sys

import kvprov.identity

SCRIPT = """
import sys
before = set(sys.modules)
import kvprov.identity
new = {name.partition('.')[0] for name in set(sys.modules) - before}
print(*sorted(new - sys.stdlib_module_names))
print(*sorted(new & {'ctypes', 'tempfile', 'shutil', 'multiprocessing', 'subprocess'}))
"""


def test_importing_identity_imports_nothing_heavy() -> None:
    # In a process of its own: pytest has imported most of it already.
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}\n{SCRIPT}"],
        capture_output=True,
        text=True,
        check=True,
    )
    foreign, heavy = run.stdout.split("\n")[:2]
    assert foreign.split() == ["kvprov"]
    assert heavy.split() == []


def test_the_facade_has_what_it_names() -> None:
    assert sorted(set(kvprov.identity.__all__)) == sorted(kvprov.identity.__all__)
    for name in kvprov.identity.__all__:
        assert getattr(kvprov.identity, name).__doc__
