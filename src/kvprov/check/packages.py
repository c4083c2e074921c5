"""The packages that run a model."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Final

from kvprov.check.errors import MissingPackageError


def need_packages() -> None:
    """Import what the check runs models with.

    Raises:
        MissingPackageError: One of torch, transformers and safetensors is not installed.
    """
    try:
        import safetensors
        import torch
        import transformers  # noqa: F401 - only to see that it is there
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"The check runs a model, and there is no module {error.name}.",
            "Install what it needs: pip install 'kvprov[check]'.",
        ) from error
    # Of a module that is found as an empty folder, this is all that can be told.
    if not hasattr(torch, "Tensor") or not hasattr(safetensors, "safe_open"):
        raise MissingPackageError("torch or safetensors is not whole.", "Install: pip install 'kvprov[check]'.")


_SMALL_BYTES: Final = 32 << 20

ASYNC_LOAD: Final = "HF_DEACTIVATE_ASYNC_LOAD"
"""How transformers is told to load one tensor at a time. Its threads hold half a model more for a moment."""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Let transformers load a model in little memory, without bars and remarks of its own."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    bar = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    told = os.environ.get(ASYNC_LOAD)
    os.environ[ASYNC_LOAD] = "1"
    try:
        yield
    finally:
        os.environ.pop(ASYNC_LOAD)
        if told is not None:
            os.environ[ASYNC_LOAD] = told
        logging.set_verbosity(before)
        if bar:
            logging.enable_progress_bar()


def release_memory() -> None:
    """Give the system back what was freed. Where the C library has no such call, it does so in its own time."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


@contextlib.contextmanager
def threads(weight_bytes: int) -> Iterator[None]:
    """Compute a small model in one thread: others would wait for each other longer than they compute."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1 if weight_bytes < _SMALL_BYTES else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
