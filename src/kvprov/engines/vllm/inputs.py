"""What a request is computed with beside its tokens: media, and prompt embeddings.

vLLM names media by an identifier that a client may choose freely (`multi_modal_uuids`, `uuid`), that holds the model's
path, and that knows nothing of how a processor was configured. Connectors and the block-hash chain take it for the
content. Here each gives way to a hash of the very data that the model's encoder reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from typing import Any, Final

from blake3 import blake3

from kvprov.contract.encoding import lp, u64
from kvprov.engines.content import UnknownContentError, encoded

MEDIA: Final = "kv-media/1"
EMBEDDINGS: Final = "kv-prompt-embeddings/1"

_BOUND: Final = "_kvprov_inputs"
_IDENTITY: Final = "_kvprov_media"
_HANDLE: Final = frozenset({"address", "monotonic_id", "signature"})
"""The keys of an item that stands for one in shared memory, which only workers can read."""


def _media_identity(feature: Any, worker: bytes) -> str:
    """Return the identity of one item of media: of the encoder, what it reads, and where its outputs go.

    Raises:
        UnknownContentError: It has none.
    """
    item = feature.data
    if item is None:
        raise UnknownContentError("its data is not at hand")
    if (known := getattr(item, _IDENTITY, None)) is not None:
        content = known
    else:
        if set(item) == _HANDLE:
            raise UnknownContentError("its data is in shared memory, where only workers read it")
        hasher = blake3()
        for name in sorted(item):
            hasher.update(lp(name) + lp(type(item[name].field).__name__))
            for piece in encoded(item[name].data):
                hasher.update(piece)
        content = hasher.digest()
        # vLLM keeps items and hands out the same object for as long as it does.
        setattr(item, _IDENTITY, content)
    position = feature.mm_position
    hasher = blake3(lp(MEDIA) + lp(worker) + lp(feature.modality) + lp(content) + u64(position.length))
    for piece in encoded(position.is_embed):
        hasher.update(piece)
    return str(hasher.hexdigest())


def bind(request: Any, worker: bytes, *, adapter_shapes_media: bool) -> str:
    """Name the media of `request` by their content, and by what encodes them; doing it twice changes nothing.

    vLLM keeps encoder outputs by that name. So outputs of former weights are not taken for those of new ones.

    An item whose content is not known gets a name of its own, of 256 random bits, so that even a connector that cannot
    be told to keep away from a tier writes nothing that anybody would find.

    Args:
        request: One of vLLM's requests.
        worker: The digest of the worker that computes it.
        adapter_shapes_media: Whether adapters also apply to the encoder of media.

    Returns:
        Why the request must bypass the shared tier; empty when it need not.
    """
    before: tuple[bytes, str] | None = getattr(request, _BOUND, None)
    if before is not None and before[0] == worker:
        return before[1]
    if before is not None and request.mm_features and (request.num_computed_tokens or request.num_preemptions):
        # Its outputs are being used, under the names that they have.
        return "media: what encodes them was exchanged while the request was running"
    reason = ""
    features = []
    for feature in request.mm_features:
        try:
            if adapter_shapes_media and request.lora_request is not None:
                # The name would outlive an exchange of the adapter's bytes in vLLM's cache of encoder outputs.
                raise UnknownContentError("adapters apply to its encoder, whose outputs vLLM keeps by adapter name")
            identifier = _media_identity(feature, worker)
        except UnknownContentError as error:
            identifier = secrets.token_hex(32)
            reason = f"media: {error}"
        features.append(dataclasses.replace(feature, identifier=identifier))
    request.mm_features = features
    setattr(request, _BOUND, (worker, reason))
    return reason


def located(feature: Any) -> str:
    """Return what a connector shall hash of an item of media that hashes no positions: content and place."""
    return f"{feature.identifier}@{feature.mm_position.offset}"


def embeddings_key(native: bytes, request: Any, start: int, end: int) -> bytes:
    """Return the extra key of a block of prompt embeddings.

    vLLM hashes the bytes of the block's rows. What these bytes are depends on the element type; and where a prompt
    mixes tokens and embeddings, which of the two a position is computed with is said by a mask alone.

    Args:
        native: vLLM's own hash of the rows, SHA-256.
        request: One of vLLM's requests.
        start: The block's first token.
        end: The token after its last.
    """
    mask = request.prompt_is_token_ids
    if mask is not None:
        form = b"mixed" + bytes(mask[start:end])
    else:
        form = b"embeddings" if request.prompt_token_ids is None else b"tokens"
    element = str(request.prompt_embeds.dtype)
    return hashlib.sha256(lp(EMBEDDINGS) + lp(native) + lp(element) + lp(form)).digest()


def beyond_tokens(request: Any) -> str:
    """Return why a connector whose keys are made of token ids must not serve `request`; empty when it may.

    Media are not a reason: such connectors hash their identifiers, too.
    """
    if request.prompt_embeds is not None or not request.prompt_token_ids:
        return "prompt embeddings: the connector's keys are made of tokens"
    return ""
