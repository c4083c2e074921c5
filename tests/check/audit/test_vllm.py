"""The audit of the installed vLLM, LMCache and Mooncake, and of a connector that is made up at test time."""

from __future__ import annotations

import random
import resource
from pathlib import Path

import pytest

from kvprov.check.audit import Report, Row
from kvprov.check.audit.run import ENGINES, run
from kvprov.check.audit.scenario import DIMENSIONS
from kvprov.engines.vllm.connectors import BOUND, TABLE, Treatment
from tests.check.audit.generated import Generated, random_connector
from tests.cli.support import ROOT, install

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not ENGINES["vllm"].installed, reason="vLLM is not installed in this environment"),
]

PLUGIN = """
from kvprov.check.audit import Budget, Subject
from tests.check.audit.generated import Generated, Mode

connector = Generated({modes}, {bits})
subject = Subject("Made up", "MadeUpConnector", connector.keys, budget=Budget(samples=96, seconds=5))

def register():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if "MadeUpConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("MadeUpConnector", "acme", "MadeUpConnector")
        KVConnectorFactory.register_connector("StrangeConnector", "acme", "StrangeConnector")
        SecondaryTierFactory.register_tier("strange", "acme", "StrangeTier")
"""

CHAIN = {
    "weights": "omitted",
    "precision": "omitted",
    "model_config": "omitted",
    "kv_representation": "omitted",
    "adapter": "by name and path only",
    "sharing_domain": "bound",
    "client_namespace": "not applicable",
}
TOKENS = {**dict.fromkeys(DIMENSIONS, "omitted"), "client_namespace": "not applicable"}
FILES = {**CHAIN, "weights": "by path only", "kv_representation": "omitted: layout"}

# What was found by hand, with real engines that read each other's entries.
STOCK = {
    "ExampleConnector": TOKENS,
    "HF3FSKVConnector": TOKENS,
    "OffloadingConnector (example)": CHAIN,
    "OffloadingConnector (fs)": FILES,
    "OffloadingConnector (obj)": FILES,
    # Peers compare 64 bits of a hash over the same facts.
    "OffloadingConnector (p2p)": {**FILES, "weights": "by path only (64 bits)"},
    # Of the path, keys hold the last part.
    "MooncakeStoreConnector": {**CHAIN, "weights": "by name only"},
    "SimpleCPUOffloadConnector": CHAIN,
    # They hold the cache's element type, and tags that a client may set.
    "LMCacheConnectorV1": {
        **TOKENS,
        "weights": "by path only",
        "kv_representation": "omitted: layout",
        "client_namespace": "bound",
    },
    # The server is sent the tags, and its keys do not hold them.
    "LMCacheMPConnector": {
        **TOKENS,
        "weights": "by path only",
        "sharing_domain": "bound",
        "client_namespace": "omitted",
    },
}


class Audited:
    """One run of the audit.

    Attributes:
        connector: The connector that was made up for it.
        report: The report.
        seconds: Processor time that it took.
    """

    def __init__(self, folder: Path) -> None:
        self.connector: Generated = random_connector(random.SystemRandom())
        modes = "{" + ", ".join(f"{name!r}: Mode.{mode.name}" for name, mode in self.connector.modes.items()) + "}"
        groups = {"kvprov.audit": ["acme = acme:subject"], "vllm.general_plugins": ["acme = acme:register"]}
        source = PLUGIN.format(modes=modes, bits=dict(self.connector.bits))
        site = install(folder / "site", "acme", groups, acme=source)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{site}:{ROOT}")
            self.report: Report = run(["vllm"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def row(self, name: str) -> Row:
        (engine,) = self.report.engines
        (row,) = [row for row in engine.rows if row.name == name]
        return row


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> Audited:
    return Audited(tmp_path_factory.mktemp("audit"))


def test_everything_could_be_judged_in_time(audited: Audited) -> None:
    assert audited.report.failures == []
    assert audited.report.missing == ()
    assert audited.seconds < 60


def test_what_nobody_knows_fails_the_audit(audited: Audited) -> None:
    (engine,) = audited.report.engines
    assert engine.unknown == ("StrangeConnector", "OffloadingConnector (strange)")
    assert audited.report.findings == [f"vllm: {name} is not known to the audit" for name in engine.unknown]


def test_a_made_up_connector_is_reported_as_it_was_made_up(audited: Audited) -> None:
    row = audited.row("Made up")
    assert row.native is not None
    assert {name: cell.text for name, cell in row.native.items()} == audited.connector.expected()
    assert row.bound is None
    assert row.unbound


def test_every_connector_of_vllm_is_audited_or_says_why_not(audited: Audited) -> None:
    (engine,) = audited.report.engines
    audited_ones = {row.connector for row in engine.rows} - {"MadeUpConnector"}
    assert audited_ones | set(engine.refused) == set(TABLE)
    bound = {name for name, entry in TABLE.items() if entry.treatment in BOUND - {Treatment.CHILDREN}}
    assert audited_ones == bound


@pytest.mark.parametrize("name", STOCK)
def test_stock_keys_leave_out_what_engines_showed(audited: Audited, name: str) -> None:
    native = audited.row(name).native
    assert native is not None
    assert {dimension: cell.text for dimension, cell in native.items()} == STOCK[name]


@pytest.mark.parametrize("name", STOCK)
def test_bound_keys_leave_nothing_out_and_hold_no_name_or_path(audited: Audited, name: str) -> None:
    bound = audited.row(name).bound
    assert bound is not None
    namespace = "bound" if name == "LMCacheConnectorV1" else "not applicable"
    expected = {**dict.fromkeys(DIMENSIONS, "bound"), "client_namespace": namespace}
    assert {dimension: cell.text for dimension, cell in bound.items()} == expected
    assert {cell.carriers for cell in bound.values()} == {()}


def test_how_much_of_a_fact_enters_is_measured(audited: Audited) -> None:
    files, chain = audited.row("OffloadingConnector (fs)"), audited.row("MooncakeStoreConnector")
    assert files.native is not None
    assert chain.native is not None
    # The folder's name cuts a hash to twelve digits; the element type is in nothing else.
    assert files.native["kv_representation"].facts["element"].bits == 48
    assert chain.native["sharing_domain"].facts["salt"].bits == 256
    assert chain.native["sharing_domain"].facts["salt"].samples > 30
