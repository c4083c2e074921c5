"""Labels: what an operator or a trusted updater declares where content cannot be hashed."""

from __future__ import annotations

import re
from typing import Final

from kvprov.contract.descriptor import Known
from kvprov.errors import SettingsError

SCHEME: Final = "label"

_PART: Final = r"[A-Za-z0-9][A-Za-z0-9._+@=-]{0,254}"
_LABEL: Final = re.compile(rf"{_PART}/{_PART}")


def check_run(text: str) -> str:
    """Return `text`, the RUN of labels to come.

    Raises:
        SettingsError: No label can have such a run.
    """
    if re.fullmatch(_PART, text) is None:
        raise SettingsError(
            f"{text[:80]!r} cannot be the run of a label.",
            "Write a letter or digit, then at most 254 of letters, digits and ._+@=-, for instance grpo-2025-07.",
        )
    return text


def label(text: str) -> Known:
    """Return the declared identity `label:RUN/VERSION`.

    A label promises that every worker that declares it holds the same state. kvprov cannot check the promise, so
    labels come from the operator or a trusted updater only, never from a request.

    Args:
        text: `RUN/VERSION`: each a letter or digit, then at most 254 of letters, digits and `._+@=-`.

    Raises:
        SettingsError: `text` is not of this form.
    """
    if _LABEL.fullmatch(text) is None:
        raise SettingsError(
            f"{text[:80]!r} is not a label.",
            "Write RUN/VERSION, for instance grpo-2025-07/step-1200: letters, digits and ._+@=- on both sides of one "
            "slash, at most 255 characters a side.",
        )
    return Known(f"{SCHEME}:{text}")
