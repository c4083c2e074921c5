"""Proof, in each process and with its live code, that requests of other provenance have other keys."""

from __future__ import annotations

from array import array
from typing import Any

from kvprov.contract.dimensions import CLIENT_NAMESPACE, SHARING_DOMAIN
from kvprov.engines.sglang.requests import Barred
from kvprov.engines.sglang.stamp import stamp_of
from kvprov.errors import BindingError
from kvprov.settings import load_settings

_TOKENS = array("q", range(1, 65))


def _request(salt: str | None, namespace: str | None) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(
        rid="kvprov-probe",
        origin_input_text="",
        origin_input_ids=array("q", _TOKENS),
        sampling_params=SamplingParams(max_new_tokens=1),
        extra_key=namespace,
        cache_salt=salt,
    )


def _page_hash(request: Any) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    key = RadixKey(array("q", _TOKENS), extra_key=request.extra_key, cache_salt=request.cache_salt)
    return get_storage_hash_str(key, page_size=len(_TOKENS))


def _refuse(what: str) -> BindingError:
    from sglang.version import __version__

    return BindingError(
        f"kvprov's self-check failed in SGLang {__version__}: {what}.",
        "Remove other plugins that change SGLang's requests, or use a release that README names; KVPROV_MODE=off runs "
        "without any protection.",
    )


def check() -> None:
    """Make requests as SGLang does, and look at what its levels make keys of.

    Raises:
        BindingError: A key goes around what the request is bound to.
    """
    from sglang.srt.managers.schedule_batch import Req

    if not isinstance(vars(Req).get("skip_radix_cache_insert"), Barred):
        raise _refuse("requests that must not be kept are not barred from the prefix cache")
    one, same, other_salt, other_namespace = (
        _request("a", None),
        _request("a", None),
        _request("b", None),
        _request("a", "b"),
    )
    for request in (one, same, other_salt, other_namespace):
        stamp = stamp_of(request)
        if stamp is None or request.extra_key != stamp.text or request.cache_salt != stamp.text:
            raise _refuse("a request does not carry what it is bound to")
    if _page_hash(one) != _page_hash(same):
        raise _refuse("equal requests have different keys")
    withheld = load_settings().unsafe_withhold
    different = {SHARING_DOMAIN.name: other_salt, CLIENT_NAMESPACE.name: other_namespace}
    others = [request for name, request in different.items() if name not in withheld]
    if len({str(_page_hash(request)) for request in (one, *others)}) <= len(others):
        raise _refuse("requests of different provenance have one key")
