"""Media in keys of SGLang: by content, at full width, whatever a client calls them. Keys are compared."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvprov.contract.descriptor import Known
from kvprov.contract.dimensions import BUILT_IN
from kvprov.engines.sglang import binding as bindings
from kvprov.engines.sglang import current, media, requests
from kvprov.engines.sglang.binding import SchedulerBinding
from kvprov.engines.sglang.stamp import stamp_of
from kvprov.engines.sglang.storage import is_private
from tests.support.sglang.engine import RELEASE

pytestmark = pytest.mark.engine

PLACEHOLDER = 5
PROMPT = [1, 2, *[PLACEHOLDER] * 6, 3]


@pytest.fixture
def binding(monkeypatch: pytest.MonkeyPatch) -> SchedulerBinding:
    """The binding of a scheduler that has no model."""
    values = {name: Known(f"test:{name}") for name in BUILT_IN.worker}
    monkeypatch.setattr(SchedulerBinding, "_worker_values", lambda _: values)
    monkeypatch.setattr(bindings, "SEAMS", SimpleNamespace(undone=list, all=tuple))
    runner = SimpleNamespace(lora_manager=None)
    made = SchedulerBinding(
        SimpleNamespace(
            server_args=SimpleNamespace(enable_metrics=False),
            tp_worker=SimpleNamespace(model_runner=runner),
            waiting_queue=[],
        )
    )
    monkeypatch.setattr(current, "_running", [(made, None)])
    return made


@pytest.fixture(autouse=True)
def wrapped(binding: SchedulerBinding, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang's own classes be bound as the seams bind them."""
    del binding
    from sglang.srt.managers.schedule_batch import MultimodalInputs, Req

    for owner, name, wrap in (
        (Req, "__init__", requests.wrap_init),
        (Req, "extend_image_inputs", media.wrap_extend_image_inputs),
        (MultimodalInputs, "from_processor_output", media.wrap_from_processor_output),
    ):
        replacement = wrap(getattr(owner, name))
        static = isinstance(vars(owner)[name], staticmethod)
        monkeypatch.setattr(owner, name, staticmethod(replacement) if static else replacement)


def image(seed: int, *, size: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(size, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def item(feature: Any, *, offset: int = 2, length: int = 6, **fields: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem

    fields = {"modality": Modality.IMAGE, "feature": feature, "offsets": [(offset, offset + length - 1)]} | fields
    return MultimodalDataItem(**fields)


def request(**fields: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req("r", None, array("q", PROMPT), SamplingParams(max_new_tokens=1), vocab_size=1000, **fields)


def prepared(*items: Any, padded: bool = False) -> Any:
    """Return media as a scheduler makes them of what a processor gave."""
    from sglang.srt.managers.schedule_batch import MultimodalInputs, MultimodalProcessorOutput

    output = MultimodalProcessorOutput(mm_items=list(items), input_ids=PROMPT)
    if padded:
        # As a processor does that knows the numbers already.
        for one in items:
            one.set_pad_value()
        output.padded_input_ids = output.build_padded_input_ids(PROMPT, list(items))
    return MultimodalInputs.from_processor_output(output)


def ask(*items: Any, padded: bool = False, **fields: Any) -> Any:
    """Return a request with media, as a scheduler makes it."""
    made, inputs = request(**fields), prepared(*items, padded=padded)
    ids = inputs.padded_input_ids or inputs_ids(inputs)
    made.origin_input_ids = array("q", ids)
    made.extend_image_inputs(inputs)
    return made


def inputs_ids(inputs: Any) -> list[int]:
    from sglang.srt.managers.schedule_batch import MultimodalProcessorOutput

    found: list[int] = MultimodalProcessorOutput.build_padded_input_ids(PROMPT, inputs.mm_items)
    return found


def key(made: Any, *, tokens: bool = True) -> Any:
    """Return what every page hash of a request is made of: where its chain begins, and its tokens."""
    from sglang.srt.mem_cache.utils import storage_namespace_seed

    seed = storage_namespace_seed(made.extra_key, made.cache_salt)
    return (seed, tuple(made.origin_input_ids)) if tokens else seed


def test_stock_lets_a_client_choose_what_an_image_is() -> None:
    first, second = item(image(1), hash=7), item(image(2), hash=7)
    for one in (first, second):
        one.set_pad_value()
    assert first.pad_value == second.pad_value
    if RELEASE == "0.5.20":
        # And 30 bits are all that is kept of a hash.
        other = item(image(3), hash=7 + (1 << 30))
        other.set_pad_value()
        assert other.pad_value == first.pad_value


def test_equal_images_meet_whatever_they_are_called() -> None:
    bound = key(ask(item(image(1))))
    assert bound == key(ask(item(image(1), hash=7)))
    assert bound == key(ask(item(image(1), hash=8), padded=True))
    assert bound == key(ask(item(image(1), pad_value=1_000_009)))


def test_different_images_do_not_meet_though_their_numbers_are_forced_equal() -> None:
    first, second = ask(item(image(1))), ask(item(image(2)))
    assert key(first) != key(second)
    second.origin_input_ids = first.origin_input_ids
    assert key(first) != key(second)


@pytest.mark.parametrize("padded", [False, True])
def test_a_hash_that_a_client_chose_makes_no_two_images_meet(padded: bool) -> None:
    first, second = (ask(item(image(seed), hash=7), padded=padded) for seed in (1, 2))
    assert first.origin_input_ids != second.origin_input_ids
    assert key(first, tokens=False) != key(second, tokens=False)
    # Nor are encoder outputs found under it.
    hashes = {made.multimodal_inputs.mm_items[0].hash for made in (first, second)}
    assert len(hashes) == 2
    assert 7 not in hashes


@pytest.mark.parametrize(
    "other",
    [
        {"feature": image(1, dtype=torch.float64)},
        {"feature": image(1).reshape(2, 8)},
        {"feature": [image(1)]},
        {"model_specific_data": {"image_grid_thw": torch.tensor([[1, 2, 3]])}},
        {"length": 5},
    ],
    ids=lambda other: next(iter(other)),
)
def test_all_that_an_encoder_reads_counts(other: dict[str, Any]) -> None:
    assert key(ask(item(image(1))), tokens=False) == key(ask(item(image(1))), tokens=False)
    assert key(ask(item(image(1))), tokens=False) != key(ask(item(**{"feature": image(1)} | other)), tokens=False)


def test_where_an_item_stands_is_said_by_tokens_alone() -> None:
    # A session moves it, without another content.
    assert key(ask(item(image(1), offset=1)), tokens=False) == key(ask(item(image(1))), tokens=False)


def test_the_order_of_images_counts() -> None:
    def both(*seeds: int) -> Any:
        return ask(*(item(image(seed), offset=2 + 3 * place, length=3) for place, seed in enumerate(seeds)))

    assert key(both(1, 2)) == key(both(1, 2))
    assert key(both(1, 2), tokens=False) != key(both(2, 1), tokens=False)
    assert key(both(1, 1), tokens=False) != key(ask(item(image(1), length=3)), tokens=False)


def test_media_that_come_later_are_added() -> None:
    made = ask(item(image(1), length=3))
    before = key(made, tokens=False)
    made.extend_image_inputs(prepared(item(image(2), offset=5, length=3)))
    assert key(made, tokens=False) != before
    at_once = ask(item(image(1), length=3), item(image(2), offset=5, length=3))
    assert key(made, tokens=False) == key(at_once, tokens=False)


def test_tokens_alone_have_the_digest_alone() -> None:
    text = request().extra_key
    assert ":" not in text
    assert ask(item(image(1))).extra_key.startswith(f"{text}:")
    assert ask(item(image(1)), cache_salt="tenant").extra_key.partition(":")[0] != text


def test_media_that_cannot_be_read_are_nobodys() -> None:
    first, second = (ask(item(image(1), model_specific_data={"proxy": object()})) for _ in range(2))
    assert key(first, tokens=False) != key(second, tokens=False)
    for made in (first, second):
        assert is_private(made.extra_key)
        assert "data of type object" in stamp_of(made).reason


def test_media_that_went_around_kvprov_are_nobodys() -> None:
    from sglang.srt.managers.schedule_batch import MultimodalInputs

    made = request()
    made.extend_image_inputs(MultimodalInputs(mm_items=[item(image(1), hash=7, pad_value=1_000_007)]))
    assert is_private(made.extra_key)


def overrides() -> Any:
    return SimpleNamespace(positions=[1], embeds=torch.zeros(1, 2))


@pytest.mark.parametrize(
    "fields",
    [{"input_embeds": [[0.0]] * len(PROMPT)}, {"positional_embed_overrides": overrides()}, {"token_type_ids": [0, 1]}],
    ids=lambda fields: next(iter(fields)),
)
def test_what_is_in_no_key_is_nobodys(fields: dict[str, Any]) -> None:
    first, second = request(**fields), request(**fields)
    assert is_private(first.extra_key)
    assert first.extra_key != second.extra_key


def test_encoder_outputs_of_former_weights_are_not_used(binding: SchedulerBinding) -> None:
    def hashed(made: Any) -> Any:
        return made.multimodal_inputs.mm_items[0].hash

    waiting, other = ask(item(image(1))), ask(item(image(1)))
    assert hashed(waiting) == hashed(other)
    binding._set_weights(Known("test:other"), changing=False)
    # One that is in the queue is stamped anew before it is computed.
    binding.scheduler.tree_cache = SimpleNamespace(release_aborted_request=lambda _: None)
    waiting.cache_request_handle = None
    binding.renew(waiting)
    assert hashed(waiting) != hashed(other)
    assert hashed(waiting) == hashed(ask(item(image(1))))
    assert key(waiting) == key(ask(item(image(1))))
    assert key(waiting) != key(other)


def test_a_session_takes_media_over() -> None:
    first = ask(item(image(1)))

    class Session:
        def create_req(self, req: Any) -> Any:
            made = request()
            made.multimodal_inputs = first.multimodal_inputs
            return made

    made = media.wrap_create_req(Session.create_req)(Session(), None)
    assert key(made, tokens=False) == key(first, tokens=False)
