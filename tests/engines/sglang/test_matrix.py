"""Every dimension with the smallest pages and with large ones.

Those between, and what withholding a dimension does, are in `test_six_cases.py`.
"""

from __future__ import annotations

import pytest

from tests.support.sglang import cases
from tests.support.sglang.case_runner import Measured, Runner
from tests.support.sglang.cases import DIMENSIONS, OWN, WAIT, Case
from tests.support.sglang.models import LongModels
from tests.support.sglang.processes import Processes
from tests.support.sglang.results import local, record, rows
from tests.support.steps import same

pytestmark = pytest.mark.engine

PAGES = (1, 64)
CASES = {
    "adapter": cases.ADAPTER,
    "weights": cases.WEIGHTS,
    "precision": cases.PRECISION,
    "model_config": cases.ROTARY_BASE,
    "kv_representation": cases.NARROW_KV[0],
    "sharing_domain": cases.OTHER_SALT,
    "client_namespace": cases.NAMESPACE,
}
SEPARATE = ("sharing_domain", "client_namespace")
"""Those that SGLang's own keys tell apart."""


@pytest.fixture(scope="module")
def matrix(processes: Processes, models: LongModels, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Measured]:
    reviews = models.prompts(1 + len(CASES))
    prompts = {
        case: models.random_prompt(256, seed) + reviews[seed] for seed, case in enumerate((OWN, *CASES.values()))
    }
    measured: dict[int, Measured] = {}
    references = Runner(processes, models, tmp_path_factory.mktemp("references"), PAGES[0]).refer(
        list(CASES.values()), prompts
    )
    for page in PAGES:
        runner = Runner(processes, models, tmp_path_factory.mktemp("matrix"), page)
        measured[page] = runner.run(list(CASES.values()), prompts, references=references)
        record(rows(measured[page], page))
    return measured


def test_every_dimension_is_there() -> None:
    assert set(CASES) == set(DIMENSIONS)
    assert all(case.dimensions == (name,) for name, case in CASES.items())


@pytest.mark.parametrize("page", PAGES)
def test_own_state_is_read_in_full(matrix: dict[int, Measured], page: int) -> None:
    measured = matrix[page]
    assert measured.loadable[OWN] >= 256
    for binding in ("unbound", "bound"):
        attempt = measured.control[binding, WAIT]
        assert [attempt.stored, local(attempt)] == [measured.loadable[OWN], 0]
        assert same([attempt.answer], [measured.references[OWN]])


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize(("name", "case"), CASES.items(), ids=CASES)
def test_stock(matrix: dict[int, Measured], page: int, name: str, case: Case) -> None:
    attempt, reference = matrix[page].foreign["unbound", case], matrix[page].references[case]
    assert attempt.stored == (0 if name in SEPARATE else matrix[page].loadable[case])
    assert same([attempt.answer], [reference]) == (name in SEPARATE)


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bound_reads_none_of_others_and_all_of_its_own(matrix: dict[int, Measured], page: int, case: Case) -> None:
    measured = matrix[page]
    attempt, again = measured.foreign["bound", case], measured.again["bound", case]
    assert [attempt.stored, local(attempt)] == [0, 0]
    assert [again.stored, local(again)] == [measured.loadable[case], 0]
    for answered in (attempt, again):
        assert same([answered.answer], [measured.references[case]])
