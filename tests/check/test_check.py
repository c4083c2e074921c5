"""The offline check on the bundled model: what it says of kvprov's own key, whole and in part."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kvprov.check import Candidate, Checker, Report, SpaceFile, Verdict, bound
from kvprov.check.report import headline, render
from kvprov.check.results import VALUES
from kvprov.contract import ContractError, Dimension, Half, Kind, Known
from kvprov.contract.dimensions import BUILT_IN
from kvprov.contract.key import DigestBits
from kvprov.errors import KvprovError
from kvprov.identity import FleetSecret, identify_adapter, identify_checkpoint
from tests.check.support import ADAPTERS, BASE, COMPUTATIONAL, PERMISSION

ALL = sorted(COMPUTATIONAL | PERMISSION)


def test_the_built_in_dimensions_are_all_tested(checker: Checker) -> None:
    assert [dimension.name for dimension in BUILT_IN] == ALL
    assert all(checker.space.is_tested(name) for name in ALL)


def test_a_key_of_content_alone_omits_every_dimension(checker: Checker) -> None:
    report = checker.judge("content-only")
    assert report.verdicts == dict.fromkeys(ALL, Verdict.OMISSION)
    assert report.exit_code == 1
    for judged in report.dimensions:
        for pair in judged.pairs:
            if pair.how != VALUES:
                continue
            assert pair.verdict is Verdict.OMISSION
            if judged.dimension.kind is Kind.PERMISSION:
                assert (pair.difference, pair.share_allowed) == (None, False)
            else:
                assert pair.difference is not None
                assert not pair.difference.equal
                assert 0 < pair.difference.tokens <= report.tokens


def test_the_bound_key_omits_nothing(checker: Checker) -> None:
    report = checker.judge("bound")
    assert report.verdicts == dict.fromkeys(ALL, Verdict.SOUND)
    assert report.all_findings == ()
    assert report.control.passed
    assert report.control.process is True
    assert report.exit_code == 0
    # It shares what it may: content at another path, under another name, and in another process.
    shared = {name: {p.how for p in report[name].pairs if p.verdict is Verdict.SHARED} for name in ALL}
    assert shared["adapter"] == shared["weights"]
    assert len(shared["adapter"]) == 3
    assert all("same request in another process" in hows for hows in shared.values())
    # Thousands of keys, of which none met another.
    trials = [trial for judged in report.dimensions for trial in judged.trials]
    assert sum(trial.keys for trial in trials) > 3000
    assert [trial for trial in trials if trial.equal] == []


def test_leaving_out_one_dimension_reopens_exactly_that_one(checker: Checker) -> None:
    left_out = checker.leave_one_out()
    assert list(left_out) == ALL
    for name, verdicts in left_out.items():
        assert verdicts == {other: Verdict.OMISSION if other == name else Verdict.SOUND for other in ALL}


def test_withheld_with_everything_tried(checker: Checker) -> None:
    report = checker.judge("bound", withhold=["model_config"])
    assert report.having(Verdict.OMISSION) == ("model_config",)
    assert report.withheld == ("model_config",)
    assert report["model_config"].withheld
    assert "rotary base" in report["model_config"].findings[0].message
    with pytest.raises(ContractError, match="not registered"):
        checker.judge("bound", withhold=["modelconfig"])


def test_where_the_state_differs(checker: Checker) -> None:
    report = checker.judge("bound", thorough=False)
    [rotary, window] = [p for p in report["model_config"].pairs if p.a == "as supplied"]
    assert rotary.difference is not None
    assert window.difference is not None
    # The first token is at no angle; tokens within the window see all that comes before them.
    assert rotary.difference.tokens == report.tokens - 1
    assert window.difference.tokens == report.tokens - 16
    assert window.difference.layers[0] == 0.0
    assert rotary.difference.layers[0] > 0
    # The bundled adapters change the values alone, from the first layer on.
    adapters = [p for p in report["adapter"].pairs if p.a == "none"]
    assert all(p.difference is not None and min(p.difference.layers) > 0 for p in adapters)
    place = adapters[0].difference.place if adapters[0].difference is not None else None
    assert place is not None
    assert 0 <= place.layer < report.layers
    # An element type of another size is not read at all, one of the same size is read as other numbers.
    forms = {(p.a, p.b): p.difference for p in report["kv_representation"].pairs}
    fp8 = forms["bfloat16, NHD", "fp8_e4m3, NHD"]
    fp16 = forms["bfloat16, NHD", "float16, NHD"]
    layout = forms["bfloat16, NHD", "bfloat16, HND"]
    assert fp8 is not None
    assert (fp8.readable, fp8.largest, fp8.tokens) == (False, None, report.tokens)
    assert fp16 is not None
    assert fp16.largest is not None
    assert fp16.largest > 1
    assert layout is not None
    assert layout.largest is not None
    assert 0 < layout.largest < 100


def test_identities_are_the_products_own() -> None:
    seen = []

    def key(case: object) -> str:
        seen.append(case)
        return bound(case)  # type: ignore[arg-type]

    secret = FleetSecret(b"0123456789abcdef", "test")
    with Checker(BASE, adapters=ADAPTERS, secret=secret, bits=DigestBits.SHORT) as checker:
        report = checker.judge(key, thorough=False)
    assert report.exit_code == 0
    request = {value for case in seen for value in case.descriptor.request.values()}
    worker = {value for case in seen for value in case.descriptor.worker.values()}
    assert {Known(identify_adapter(folder).identity) for folder in ADAPTERS} < request
    assert Known(identify_checkpoint(BASE).identity) in worker
    assert sum(isinstance(v, Known) and v.identity.startswith("hmac-sha256.test:") for v in request) == 4
    assert {len(case.bound) for case in seen} == {len("kvprov:") + 22}


OUTSIDE = Dimension("acme.rope_patch", Half.WORKER, Kind.COMPUTATIONAL, "a patched kernel")
TIER = Dimension("acme.tier", Half.REQUEST, Kind.PERMISSION, "tiers never share")


def judge(space: SpaceFile, *withhold: str) -> Report:
    registry = BUILT_IN.register(OUTSIDE, TIER)
    with Checker(BASE, adapters=ADAPTERS, space=space, registry=registry) as checker:
        return checker.judge(withhold=withhold, thorough=False)


def test_a_dimension_from_outside() -> None:
    # Registered, and not in the space: not tested, which is not sound.
    untested = judge(SpaceFile(defaults=False, tokens=8))
    assert set(untested.verdicts.values()) == {Verdict.NOT_TESTED}
    assert untested.exit_code == 0
    assert "Not tested: acme.rope_patch, acme.tier, adapter" in headline(untested)
    assert all(judged.note for judged in untested.dimensions)
    candidates = (
        Candidate(OUTSIDE.name, "patched", config={"rope_theta": 50000.0}, identity="acme.rope:2"),
        Candidate(TIER.name, "gold", identity="acme.tier:gold"),
        Candidate(TIER.name, "silver", identity="acme.tier:silver"),
    )
    space = SpaceFile(candidates, defaults=False, tokens=8)
    sound = judge(space)
    assert sound.having(Verdict.SOUND) == (OUTSIDE.name, TIER.name)
    withheld = judge(space, OUTSIDE.name, TIER.name)
    assert withheld.having(Verdict.OMISSION) == (OUTSIDE.name, TIER.name)


def test_tenants_that_may_share_are_separated_needlessly() -> None:
    names = frozenset({"gold", "silver"})
    space = SpaceFile(
        (
            Candidate(TIER.name, "gold", identity="acme.tier:gold"),
            Candidate(TIER.name, "silver", identity="acme.tier:silver"),
        ),
        may_share=frozenset({(TIER.name, names)}),
        defaults=False,
        tokens=8,
    )
    report = judge(space)
    assert report[TIER.name].verdict is Verdict.OVER_SEPARATED
    assert {pair.verdict for pair in report[TIER.name].pairs} == {Verdict.SOUND, Verdict.OVER_SEPARATED}
    # Left out of the key, they share as they may, and so do others that may not.
    pairs = judge(space, TIER.name)[TIER.name].pairs
    assert {pair.verdict for pair in pairs if {pair.a, pair.b} == names} == {Verdict.SHARED}
    assert {pair.verdict for pair in pairs if {pair.a, pair.b} != names} == {Verdict.OMISSION}


def test_a_model_that_does_not_repeat_itself_cannot_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from kvprov.check import prefill

    plain = prefill._prefill

    def noisy(*args: object) -> prefill.State:
        state = plain(*args)  # type: ignore[arg-type]
        return prefill.State(tuple((k + 0.1 * torch.rand(k.shape), v) for k, v in state.layers))

    monkeypatch.setattr(prefill, "_prefill", noisy)
    with Checker(BASE, adapters=ADAPTERS) as checker:
        report = checker.judge("content-only")
    assert not report.control.state
    assert report.exit_code == 4
    assert set(report.verdicts.values()) == {Verdict.NOT_TESTED}
    assert headline(report).startswith("Cannot judge: two runs")


def test_without_an_adapter_two_are_generated() -> None:
    with Checker(BASE, space=SpaceFile(tokens=8)) as checker:
        names = [candidate.name for candidate in checker.space.candidates["adapter"]]
        assert names == ["none", "generated A", "generated B"]
        report = checker.judge(thorough=False)
    assert report.verdicts["adapter"] is Verdict.SOUND


def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with Checker(BASE) as checker:
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
    # Nor when it fails half way.
    with pytest.raises(KvprovError, match="knows 768"):
        Checker(BASE, space=SpaceFile(tokens=(1, 5000)))
    assert list(tmp_path.iterdir()) == []
    checker.close()


def test_the_report_as_json_and_html(checker: Checker) -> None:
    report = checker.judge("content-only", thorough=False)
    loaded = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert loaded["verdicts"] == dict.fromkeys(ALL, "omission")
    assert loaded["exit_code"] == 1
    for dimension in loaded["dimensions"]:
        for pair in dimension["pairs"]:
            if pair["state"] is not None and pair["state"]["readable"]:
                state = pair["state"]
                assert len(state["largest_by_layer"]) == loaded["layers"]
                assert {state["layer"], state["head"], state["token"]} <= set(range(64))
                assert state["largest"] == "Infinity" or math.isfinite(state["largest"])
    html = render(report)
    assert html.count("<svg") == len(COMPUTATIONAL)
    assert "foreign state would be served" in html
    for pair in report["adapter"].pairs:
        assert f"{pair.difference.largest:.3g}" in html  # type: ignore[union-attr]


def test_names_are_no_markup(checker: Checker) -> None:
    candidate = Candidate("sharing_domain", "<script>alert(1)</script>", text="x")
    with Checker(BASE, space=SpaceFile((candidate,), defaults=False, tokens=8)) as other:
        html = render(other.judge("content-only", thorough=False))
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
