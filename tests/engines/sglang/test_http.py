"""A real server, processes and all, asked by a plain client over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.sglang.engine import RELEASE, Launch
from tests.support.sglang.models import LongModels, loadable
from tests.support.sglang.servers import serve

pytestmark = pytest.mark.engine


@pytest.mark.skipif(RELEASE == "0.5.20", reason="two servers of one release are enough: the rest goes without HTTP")
def test_salt_namespace_and_adapter_over_http(models: LongModels, store: Path, tmp_path: Path) -> None:
    prompt = models.random_prompt(200, seed=12)
    full = loadable(len(prompt))
    adapters = {"standard": models.adapter("standard").path, "inverted": models.adapter("inverted").path}
    bodies: list[dict[str, str]] = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"extra_key": "a"},
        {"cache_salt": "a", "extra_key": "a"},
        {"lora_path": "standard"},
        {"lora_path": "inverted"},
        {"lora_path": "inverted", "cache_salt": "a"},
    ]
    launch = Launch(models.base, store, adapters=adapters)
    with serve(tmp_path, launch) as writer:
        cold = [writer.generate(prompt, **body) for body in bodies]
        own = []
        for body in bodies:
            writer.flush()
            own.append(writer.generate(prompt, **body))
        log = writer.log.read_text(errors="replace")
    assert [answer.cached for answer in cold] == [0] * len(bodies)
    assert [answer.storage for answer in own] == [full] * len(bodies)
    assert "kvprov: mode=enforce path=hicache:file" in log
    # Another server, under another name, in which adapters have other names.
    renamed = {"first": adapters["inverted"], "second": adapters["standard"]}
    other = {"standard": "second", "inverted": "first"}
    with serve(tmp_path, Launch(models.base, store, adapters=renamed), served="org/other") as reader:
        for body, reference in zip(bodies, cold, strict=True):
            asked = body | ({"lora_path": other[body["lora_path"]]} if "lora_path" in body else {})
            answer = reader.generate(prompt, **asked)
            assert answer.storage == full, body
            assert answer.tokens == reference.tokens, body
            assert answer.logprobs == pytest.approx(reference.logprobs, abs=1e-4), body
        stranger = reader.generate(prompt, cache_salt="nobody")
        assert stranger.cached == 0
