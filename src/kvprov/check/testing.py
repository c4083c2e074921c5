"""For the tests of a connector: one function that asserts that its key omits nothing."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache

from kvprov.check.keys import KeyFunction
from kvprov.check.report import headline
from kvprov.check.results import Report
from kvprov.check.run import Checker
from kvprov.check.verdicts import Verdict


@cache
def bundled_checker() -> Checker:
    """Return a checker on the model that comes with kvprov, 0.75 million parameters, with its two adapters.

    There is one in a process, so that state is computed once for all tests.

    Raises:
        MissingPackageError: torch or transformers is not installed.
        DemoError: The model is not there.
    """
    from kvprov.demo.model import find

    bundle = find()
    return Checker(bundle.base, adapters=[bundle.adapter("standard"), bundle.adapter("inverted")])


def assert_no_omission(
    key: str | KeyFunction,
    *,
    checker: Checker | None = None,
    ignore: Collection[str] = (),
    allow_over_separation: bool = True,
) -> Report:
    """Assert that `key` gives another key wherever the state or the permission to share is another.

    Args:
        key: The key function: gets a `Case`, returns the key as text or bytes. Or its name, to import.
        checker: What to check it on; by default, the model that comes with kvprov.
        ignore: Dimensions that may be omitted.
        allow_over_separation: Whether the key may differ where it need not.

    Returns:
        The report, for further assertions.

    Raises:
        AssertionError: A dimension is omitted, or the positive control fails.
        KvprovError: See `Checker.judge`.
    """
    __tracebackhide__ = True
    report = (checker or bundled_checker()).judge(key)
    wrong = {Verdict.OMISSION} if allow_over_separation else {Verdict.OMISSION, Verdict.OVER_SEPARATED}
    failed = [name for name, verdict in report.verdicts.items() if verdict in wrong and name not in ignore]
    if failed or not report.control.passed:
        lines = [f"{f.dimension}: {f.fault}: {f.message}" for f in report.all_findings if f.dimension not in ignore]
        raise AssertionError("\n".join([headline(report), *lines]))
    return report
