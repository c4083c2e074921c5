"""What a request is computed with beside its tokens: media, and embeddings that it brings along.

SGLang puts numbers in the place of media's placeholders, made of 64 bits of a hash (in 0.5.20, of 30). A client may
name the hash itself (`mm_hashes`), and the hash of a tensor on a GPU is made for speed. By the same hash SGLang keeps
what an encoder gave, whatever the weights were. Here, media are named by their content:

- the namespace of a request that has media holds a hash of all that its encoder reads, of 256 bits;
- the numbers are made of that hash, so that those of equal media are equal, and what a client sent is in none of them;
- what an encoder gave is kept under a name that no other process can find out, and that new weights do not have.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from blake3 import blake3

from kvprov.contract.encoding import lp, u64
from kvprov.contract.key import NONCE_BYTES, key_text
from kvprov.engines.content import UnknownContentError, encoded
from kvprov.engines.sglang import current
from kvprov.engines.sglang.stamp import stamp_of

MEDIA: Final = "kv-media/1"

_CONTENTS: Final = "_kvprov_media"
_HASH_BYTES: Final = 8
_PROCESS: Final = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Contents:
    """What is known of media.

    Attributes:
        items: The hash of each, 32 bytes, in the order of the prompt.
        reason: Why they are not known; empty when they are.
    """

    items: tuple[bytes, ...] = ()
    reason: str = ""

    def __add__(self, other: Contents) -> Contents:
        return Contents((*self.items, *other.items), self.reason or other.reason)


def _content(item: Any) -> bytes:
    """Return the hash of all that the encoder reads of one item.

    Raises:
        UnknownContentError: It cannot be read here.
    """
    hasher = blake3(lp(MEDIA) + lp(item.modality.name) + lp(str(item.format)))
    # Where it stands is said by the tokens; a session moves it.
    lengths = [end - start for start, end in item.offsets or ()]
    for part in (lengths, item.feature, item.precomputed_embeddings, item.model_specific_data):
        for piece in encoded(part):
            hasher.update(piece)
    return hasher.digest()


def _kept_as(content: bytes, epoch: int) -> int:
    """Return the name under which what the encoder gives is kept in this process, with the weights of one epoch."""
    return int.from_bytes(blake3(content + lp(str(epoch)), key=_PROCESS).digest(_HASH_BYTES))


def _name(item: Any, content: bytes) -> None:
    """Let the numbers in the place of an item's placeholders be made of its content."""
    if hasattr(type(item), "set_identity"):
        item.set_identity(content)
    else:
        # 0.5.20 keeps 30 bits of it. The namespace has them all.
        item.set_hash(int.from_bytes(content[:_HASH_BYTES]))


def _contents(inputs: Any) -> Contents:
    if inputs is None:
        return Contents()
    found: Contents | None = vars(inputs).get(_CONTENTS)
    return found if found is not None else Contents(reason="media: they went around kvprov")


def wrap_from_processor_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `MultimodalInputs.from_processor_output` that names media by their content."""

    def from_processor_output(obj: Any, **arguments: Any) -> Any:
        inputs = original(obj, **arguments)
        items, reason = [], ""
        for item in inputs.mm_items:
            try:
                content = _content(item)
                _name(item, content)
            except UnknownContentError as error:
                content, reason = secrets.token_bytes(32), f"media: {error}"
            items.append(content)
            item.hash = _kept_as(content, _epoch())
        vars(inputs)[_CONTENTS] = Contents(tuple(items), reason)
        if inputs.padded_input_ids is not None:
            # Made in another process, of other numbers. Without it, SGLang puts in the new ones itself.
            inputs.padded_input_ids = obj.build_padded_input_ids(obj.input_ids, inputs.mm_items)
        return inputs

    return from_processor_output


def _epoch() -> int:
    binding = current.binding()
    return -1 if binding is None else binding.worker.epoch


def wrap_extend_image_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Req.extend_image_inputs` that stamps the request anew: it is made before its media are known."""

    def extend_image_inputs(self: Any, image_inputs: Any) -> Any:
        contents = _contents(self.multimodal_inputs) + _contents(image_inputs)
        result = original(self, image_inputs)
        vars(self.multimodal_inputs)[_CONTENTS] = contents
        _stamp_anew(self)
        return result

    return extend_image_inputs


def wrap_create_req(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `Session.create_req` that also binds the media which a turn takes over from the one before."""

    def create_req(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, req, *args, **kwargs)
        if made.multimodal_inputs is not None:
            _stamp_anew(made)
        return made

    return create_req


def _stamp_anew(request: Any) -> None:
    binding, stamp = current.binding(), stamp_of(request)
    if binding is not None and stamp is not None:
        binding.stamp(request, stamp.namespace, stamp.salt)


def _beyond_tokens(request: Any) -> str:
    """Return why tokens do not say what a request is computed with; empty when they do."""
    if request.input_embeds is not None:
        return "inputs: it brings its embeddings along, and its tokens are made up"
    if request.positional_embed_overrides is not None:
        # 0.5.20 keeps its state under its tokens all the same.
        return "inputs: it puts embeddings in the place of tokens"
    if request.token_type_ids is not None:
        return "inputs: it has types of tokens, which are in no key"
    return ""


def bind(request: Any, epoch: int) -> tuple[str, str]:
    """Let encoder outputs of other weights not be used for `request`, and say what its namespace must hold.

    Args:
        request: One of SGLang's requests.
        epoch: Which of the worker's successive halves it is computed with.

    Returns:
        What to append to the digest's text, which is empty for tokens alone; and why nobody may share the request's
        state, empty when others may.
    """
    inputs = request.multimodal_inputs
    contents = _contents(inputs)
    if inputs is not None and len(inputs.mm_items) == len(contents.items):
        for item, content in zip(inputs.mm_items, contents.items, strict=True):
            item.hash = _kept_as(content, epoch)
    if reason := _beyond_tokens(request) or contents.reason:
        return f":{secrets.token_hex(NONCE_BYTES)}", reason
    if not contents.items:
        return "", ""
    digest = blake3(lp(MEDIA) + u64(len(contents.items)) + b"".join(contents.items)).digest()
    return f":{key_text(digest)}", ""
