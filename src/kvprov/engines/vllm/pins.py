"""Worker side: adapters are loaded from private copies, so that the identity is that of the bytes that were loaded.

vLLM reads an adapter's folder when the adapter is first used, and again after it was evicted. In between, a tenant may
have put other bytes there. So each adapter that a worker is asked for is copied to a folder that only this process
writes, identified from that copy, and loaded from that copy, also after an eviction while requests that carry the
identity are under way. The engine asks for the identity before it hashes a request (`ensure`).
"""

from __future__ import annotations

import fcntl
import math
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvprov.contract.errors import KvprovError
from kvprov.engines.vllm.log import logger
from kvprov.identity.adapter import Pinned, pin_adapter, sources_unchanged, unpin_adapter
from kvprov.identity.files import SETTLE_NS

_PREFIX = "kvprov-adapters-"
_YOUNG_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class PinnedAdapter:
    """One adapter as a worker holds it.

    Attributes:
        name: The name under which it was asked for.
        path: The path under which it was asked for.
        pinned: The private copy, or None when the adapter cannot be identified.
        reason: Why it cannot.
        look_again_at: When to look again at an original that was too young when it was copied for a later change to
            show in its stamps; seconds of the monotonic clock.
    """

    name: str
    path: str
    pinned: Pinned | None
    reason: str = ""
    look_again_at: float = field(default=math.inf, compare=False)

    @property
    def identity(self) -> str | None:
        """The adapter's identity, or None."""
        return None if self.pinned is None else self.pinned.identity

    def still_at_path(self, lora_request: Any) -> bool:
        """Whether the path of `lora_request` still holds what was copied from it, as far as a stat can tell."""
        return self.pinned is not None and lora_request.lora_path == self.path and sources_unchanged(self.pinned)


def _remove_abandoned(parent: Path) -> None:
    """Remove folders of processes that ended without doing so: each live one holds a lock on its folder."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            status = folder.lstat()
            age = time.time() - status.st_mtime
            # A folder is locked right after it is made, so a young one may belong to a process that is starting.
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or age < _YOUNG_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            # Another process that is starting was faster.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)


class AdapterPins:
    """The private copies of one worker's adapters.

    Args:
        manager: vLLM's adapter manager of this worker.
        resolve: Turns an adapter's path, as requests name it, into a folder.
    """

    def __init__(self, manager: Any, resolve: Callable[[str], str]) -> None:
        self._manager = weakref.ref(manager)
        self._resolve = resolve
        self._folder: Path | None = None
        self._by_id: dict[int, PinnedAdapter] = {}
        self.stepping = False

    def __getitem__(self, adapter_id: int) -> PinnedAdapter | None:
        return self._by_id.get(adapter_id)

    def all(self) -> dict[int, PinnedAdapter]:
        """Return all adapters that are kept, by id."""
        return dict(self._by_id)

    def _private_folder(self) -> Path:
        if self._folder is None:
            parent = Path(tempfile.gettempdir())
            _remove_abandoned(parent)
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._folder = folder
        return self._folder

    def copy(self, lora_request: Any) -> PinnedAdapter:
        """Copy and identify what is at the path of `lora_request` now."""
        pinned, reason = None, ""
        try:
            pinned = pin_adapter(
                self._resolve(lora_request.lora_path), self._private_folder(), self._application(lora_request)
            )
        except KvprovError as error:
            reason = error.message
        except (OSError, ValueError) as error:
            # No room for a private folder, or a path that is none: nothing that may stop an engine.
            reason = f"it cannot be copied ({error})"
        look_again_at = math.inf
        if pinned is not None and not pinned.settled:
            look_again_at = time.monotonic() + SETTLE_NS / 1e9
        return PinnedAdapter(lora_request.lora_name, lora_request.lora_path, pinned, reason, look_again_at)

    def _application(self, lora_request: Any) -> dict[str, Any]:
        """Return what decides, beside an adapter's own files, how it is applied."""
        config = getattr(self._manager(), "lora_config", None)
        targets = getattr(config, "target_modules", None)
        facts = {
            "is_3d_lora_weight": bool(getattr(lora_request, "is_3d_lora_weight", False)),
            "moe_shared_loras": bool(getattr(config, "enable_moe_shared_loras", False)),
            "target_modules": None if targets is None else sorted(set(targets)),
        }
        return {name: fact for name, fact in facts.items() if fact}

    def discard(self, adapter: PinnedAdapter | None) -> None:
        """Remove a private copy."""
        if adapter is not None and adapter.pinned is not None:
            try:
                unpin_adapter(adapter.pinned)
            except KvprovError as error:
                logger.warning("kvprov: %s", error)

    def keep(self, adapter_id: int, adapter: PinnedAdapter) -> None:
        """Make `adapter` the one that `adapter_id` stands for."""
        held = self._by_id.get(adapter_id)
        if held is not adapter:
            self._by_id[adapter_id] = adapter
            self.discard(held)

    def ensure(self, lora_request: Any, in_flight: frozenset[int]) -> dict[int, PinnedAdapter]:
        """Settle which bytes `lora_request` will be computed with, before its key is made.

        An adapter that is loaded stays as it is, as vLLM has it. One that is not loaded, and that no request under way
        uses, is what its path holds now. One that vLLM is told to load in place is loaded now.

        Args:
            lora_request: vLLM's request for an adapter.
            in_flight: Ids of the adapters of unfinished requests.

        Returns:
            All adapters that are kept, by id.
        """
        adapter_id = lora_request.lora_int_id
        manager = self._manager()
        resident: set[int] = set() if manager is None else manager.list_adapters()
        for other in set(self._by_id) - resident - in_flight - {adapter_id}:
            self.discard(self._by_id.pop(other))
        if lora_request.load_inplace and manager is not None:
            # Loading at once keeps what is loaded and what is identified one thing, also for requests between now
            # and the step in which vLLM would load it.
            try:
                manager.add_adapter(lora_request)
            except Exception as error:  # noqa: BLE001 - vLLM raises many kinds; the adapter that was loaded stays
                logger.warning("kvprov: %s could not be loaded in place: %s.", lora_request.lora_path, error)
            else:
                return self.all()
        held = self._by_id.get(adapter_id)
        if held is None:
            self.keep(adapter_id, self.copy(lora_request))
        elif not held.still_at_path(lora_request):
            if adapter_id not in resident and adapter_id not in in_flight:
                self.keep(adapter_id, self.copy(lora_request))
            elif time.monotonic() >= held.look_again_at:
                # Else the engine would ask for as long as the adapter is loaded. The bytes must stay those loaded.
                again = self.copy(lora_request)
                if again.identity == held.identity:
                    self.keep(adapter_id, again)
                else:
                    self.discard(again)
                    self._by_id[adapter_id] = replace(held, look_again_at=math.inf)
        return self.all()

    def for_load(self, lora_request: Any) -> PinnedAdapter:
        """Return the copy from which `lora_request` shall be loaded now; a new one is kept once it is loaded."""
        held = self._by_id.get(lora_request.lora_int_id)
        if held is not None and (
            # Within a step the engine has settled the bytes; outside, somebody asks for what the path holds.
            self.stepping or (not lora_request.load_inplace and held.still_at_path(lora_request))
        ):
            return held
        return self.copy(lora_request)


_ATTRIBUTE = "_kvprov_pins"


def pins_of(manager: Any) -> AdapterPins:
    """Return the pins of a worker's adapter manager."""
    pins = getattr(manager, _ATTRIBUTE, None)
    if not isinstance(pins, AdapterPins):
        from vllm.lora.utils import get_adapter_absolute_path

        pins = AdapterPins(manager, get_adapter_absolute_path)
        setattr(manager, _ATTRIBUTE, pins)
    return pins


def wrap_load_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `WorkerLoRAManager._load_adapter` that loads from the private copy."""

    def load_adapter(self: Any, lora_request: Any) -> Any:
        import msgspec

        pins, adapter_id = pins_of(self), lora_request.lora_int_id
        adapter = pins.for_load(lora_request)
        source = lora_request
        if adapter.pinned is not None:
            source = msgspec.structs.replace(lora_request, lora_path=str(adapter.pinned.folder))
        try:
            loaded = original(self, source)
        except BaseException:
            # What was loaded before stays loaded, so it stays identified, too.
            if pins[adapter_id] is not adapter:
                pins.discard(adapter)
            raise
        pins.keep(adapter_id, adapter)
        return loaded

    return load_adapter


def wrap_apply_adapters(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `_apply_adapters`, which vLLM calls in each step, that marks its loads as part of a step."""

    def apply_adapters(self: Any, adapter_requests: Any) -> Any:
        pins = pins_of(self)
        pins.stepping = True
        try:
            return original(self, adapter_requests)
        finally:
            pins.stepping = False

    return apply_adapters
