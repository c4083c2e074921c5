"""The example of the documents, as it stands there, in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvprov.check import Case, Checker
from kvprov.check.testing import assert_no_omission
from kvprov.check.verdicts import Fault, Verdict
from tests.check.support import COMPUTATIONAL, differs_by_process, never_shares, sound

DOCUMENT = Path(__file__).parents[2] / "docs" / "checking.md"


def examples() -> dict[str, str]:
    """Return the modules that the document shows, by the name in their first line."""
    text = DOCUMENT.read_text()
    return dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", text, re.DOTALL))


def test_the_documents_example(tmp_path: Path) -> None:
    modules = examples()
    assert set(modules) == {"acme_kv.py", "test_acme_kv.py"}
    assert len([line for line in modules["test_acme_kv.py"].splitlines() if line]) <= 10
    for name, code in modules.items():
        (tmp_path / name).write_text(code)
    # As the document says: the same test of a connector that is given the salt alone.
    worse = modules["test_acme_kv.py"].replace("case.bound", 'case.salt or ""')
    assert worse != modules["test_acme_kv.py"]
    (tmp_path / "test_worse.py").write_text(worse)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run([*command, str(tmp_path)], cwd=tmp_path, text=True, capture_output=True)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "FAILED test_worse.py::test_the_key_omits_nothing" in done.stdout
    # What the document says that it says.
    [shown] = re.findall(r"```\n(The key omits .*?)\n(.*?) \.\.\.\n```", DOCUMENT.read_text(), re.DOTALL)
    for line in shown:
        assert line in done.stdout


def test_what_is_asserted(checker: Checker) -> None:
    report = assert_no_omission(sound, checker=checker, allow_over_separation=False)
    assert report.exit_code == 0
    # Over-separation is allowed unless it is forbidden; what never shares is not, since nothing can be told.
    assert assert_no_omission(differs_by_process, checker=checker).having(Verdict.OVER_SEPARATED) == ("adapter",)
    with pytest.raises(AssertionError, match=f"adapter: {Fault.PROCESS}"):
        assert_no_omission(differs_by_process, checker=checker, allow_over_separation=False)
    with pytest.raises(AssertionError, match="Cannot judge: one configuration has another key each time"):
        assert_no_omission(never_shares, checker=checker)


def test_what_is_ignored(checker: Checker) -> None:
    def tenants(case: Case) -> str:
        return repr((case.tokens, case.salt, case.namespace))

    with pytest.raises(AssertionError) as caught:
        assert_no_omission(tenants, checker=checker, ignore=["weights"])
    lines = str(caught.value).splitlines()[1:]
    assert {line.partition(":")[0] for line in lines} == COMPUTATIONAL - {"weights"}
    assert_no_omission(tenants, checker=checker, ignore=sorted(COMPUTATIONAL))
