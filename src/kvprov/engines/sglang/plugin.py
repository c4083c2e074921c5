"""The entry point `sglang.srt.plugins: kvprov`.

SGLang logs a plugin that raises and goes on without it. So a failure here ends the process, and what SGLang cannot
even import is found by the guard (see `guard`). This module imports next to nothing.
"""

from __future__ import annotations

import logging


def register() -> None:
    """Put binding into effect in this process. Called by SGLang in every process before it does anything else.

    Raises:
        SystemExit: A setting cannot be used, or this SGLang lacks a seam that binding needs.
    """
    from kvprov.errors import KvprovError
    from kvprov.settings import Mode, load_settings

    try:
        settings = load_settings()
        if settings.mode is Mode.OFF:
            logging.getLogger("sglang.srt.kvprov").warning("kvprov: mode=off: keys are not bound to provenance.")
            return
        from kvprov.fleet import fleet_secret

        # Here, so that a secret that cannot be used is found before the model is loaded.
        fleet_secret(settings)
        from kvprov.engines.sglang import requests
        from kvprov.engines.sglang.seams import SEAMS

        SEAMS.install()
        requests.install_bar()
    except KvprovError as error:
        # An Exception would be logged, and the engine would serve unprotected.
        raise SystemExit(f"kvprov: {error}") from error
    except Exception as error:
        raise SystemExit(f"kvprov could not be put into effect: {type(error).__name__}: {error}") from error
