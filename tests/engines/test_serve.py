"""`vllm serve`, as an operator runs it, and the stock OpenAI client: two servers one after another on one store.

Tenants are told apart by `cache_salt`, adapters by the model's name. The second server may read what the first one
stored for the same tenant and adapter, and nothing else.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import tamper
from tests.support.models import Models, loadable
from tests.support.servers import Completion, Server, serve

pytestmark = pytest.mark.engine

ALICE, BOB, CAROL = (f"salt-of-{name}-{secrets.token_hex(8)}" for name in ("alice", "bob", "carol"))
Who = tuple[str, str | None]
SEEDED: tuple[Who, ...] = (("standard", ALICE), ("inverted", ALICE), ("standard", BOB))
"""Model and salt of the requests that the first server gets."""
OTHERS: tuple[Who, ...] = (("standard", CAROL), ("inverted", BOB), ("standard", None), ("base", ALICE))
HITS = "vllm:external_prefix_cache_hits_total"


@dataclass
class Seen:
    """What the client saw of one server.

    Attributes:
        answers: By model and salt.
        hits: Tokens that the server says it loaded from the store meanwhile.
        refusal: The status and text that an empty salt got.
        bypassed: Requests that the server says bypassed the tier, before and after one that does.
        metrics: All of its metrics, at the end.
        log: What it wrote.
    """

    answers: dict[Who, list[Completion]]
    hits: dict[Who, float]
    refusal: tuple[int, str]
    bypassed: tuple[float, float]
    metrics: str
    log: str


def _empty_salt(server: Server, prompt: list[int]) -> tuple[int, str]:
    from openai import BadRequestError

    with pytest.raises(BadRequestError) as refused:
        server.complete("standard", [prompt], cache_salt="")
    return refused.value.status_code, str(refused.value)


def _visit(server: Server, who: tuple[Who, ...], prompts: list[list[int]], long_prompt: list[int]) -> Seen:
    answers, hits = {}, {}
    for model, salt in who:
        before = server.metric(HITS) or 0
        answers[model, salt] = server.complete(model, prompts, **({} if salt is None else {"cache_salt": salt}))
        hits[model, salt] = (server.metric(HITS) or 0) - before
    refusal = _empty_salt(server, prompts[0])
    bypassed = "vllm:kvprov_bypassed_requests_total"
    none = server.metric(bypassed, reason="chunked prefill") or 0
    server.complete("standard", [long_prompt], cache_salt=ALICE)
    one = server.metric(bypassed, reason="chunked prefill") or 0
    return Seen(answers, hits, refusal, (none, one), server.get("/metrics"), "")


@pytest.fixture(scope="module")
def prompts(models: Models) -> list[list[int]]:
    return models.prompts(4)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def servers(
    models: Models, prompts: list[list[int]], store: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Seen, Seen]:
    folder = tmp_path_factory.mktemp("serve")
    secret = folder / "secret"
    secret.write_bytes(secrets.token_bytes(32))
    secret.chmod(0o600)
    env = {"KVPROV_SECRET_FILE": str(secret), "KVPROV_SECRET_KEY_ID": "fleet-7"}
    long_prompt = models.random_prompt(400)
    seen = []
    # Those who may not share come first, so that nothing of theirs is in a server's own prefix cache.
    for who in (SEEDED, (*OTHERS, *SEEDED)):
        with serve(folder, store, env=env) as server:
            seen.append(_visit(server, who, prompts, long_prompt))
        seen[-1].log = server.log.read_text(errors="replace")
    return seen[0], seen[1]


@pytest.fixture(scope="module")
def full(prompts: list[list[int]]) -> int:
    return sum(loadable(len(prompt)) for prompt in prompts)


def close(ours: list[Completion], theirs: list[Completion]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(
        a.text == b.text and all(abs(x - y) < 1e-4 for x, y in zip(a.logprobs, b.logprobs, strict=True))
        for a, b in pairs
    )


def test_the_first_server_finds_nothing(servers: tuple[Seen, Seen]) -> None:
    first = servers[0]
    assert first.hits == dict.fromkeys(SEEDED, 0)
    assert all(answer.cached == 0 for answers in first.answers.values() for answer in answers)
    # Adapters answer differently, salts do not.
    assert not close(first.answers["standard", ALICE], first.answers["inverted", ALICE])
    assert close(first.answers["standard", ALICE], first.answers["standard", BOB])


@pytest.mark.parametrize("who", SEEDED, ids=["alice", "alice's other adapter", "bob"])
def test_the_second_server_shares_within_tenant_and_adapter(servers: tuple[Seen, Seen], who: Who, full: int) -> None:
    first, second = servers
    assert second.hits[who] == full > 0
    assert sum(answer.cached for answer in second.answers[who]) == full
    assert close(second.answers[who], first.answers[who])


@pytest.mark.parametrize("who", OTHERS, ids=["another tenant", "another adapter", "no salt", "no adapter"])
def test_the_second_server_shares_with_nobody_else(servers: tuple[Seen, Seen], who: Who) -> None:
    first, second = servers
    assert second.hits[who] == 0
    assert [answer.cached for answer in second.answers[who]] == [0] * len(second.answers[who])
    model, _ = who
    if (model, ALICE) in first.answers:
        assert close(second.answers[who], first.answers[model, ALICE])
    else:
        assert not close(second.answers[who], first.answers["standard", ALICE])


def test_an_empty_salt_is_refused(servers: tuple[Seen, Seen]) -> None:
    for seen in servers:
        status, text = seen.refusal
        assert status == 400
        assert "cache_salt" in text


def test_nothing_reveals_a_salt(servers: tuple[Seen, Seen], store: Path) -> None:
    names = "\n".join(tamper.listing(store))
    assert names
    for seen in servers:
        line = re.findall(r"kvprov: mode=enforce connector=ExampleConnector .* secret=(\S+)", seen.log)
        assert line == ["fleet-7"]
        assert "there is no fleet secret" not in seen.log
        for salt in (ALICE, BOB, CAROL):
            for place in (names, seen.metrics, seen.log):
                assert salt not in place


def test_what_bypasses_is_counted_where_operators_look(servers: tuple[Seen, Seen]) -> None:
    """The engine core, which decides, is not the process that serves the metrics."""
    for seen in servers:
        assert "bypasses the shared tier: chunked prefill" in seen.log
        assert seen.bypassed == (0, 1)
