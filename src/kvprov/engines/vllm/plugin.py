"""The entry point `vllm.general_plugins: kvprov`.

vLLM logs a plugin that fails to import and goes on without it, while an error raised by the plugin's function stops
the engine. So this module imports next to nothing, and everything that can fail happens inside `register`.
"""

from __future__ import annotations

import logging
import sys


def register() -> None:
    """Put binding into effect in this process. Called by vLLM in every process, sometimes more than once.

    Raises:
        KvprovError: A setting cannot be used, or this vLLM lacks a seam that binding needs.
    """
    from kvprov.settings import Mode, load_settings

    try:
        settings = load_settings()
        if settings.mode is Mode.OFF:
            logging.getLogger("vllm.kvprov").warning("kvprov: mode=off: keys are not bound to provenance.")
            return
        from kvprov.fleet import fleet_secret

        # Here, so that a secret that cannot be used is found before the model is loaded.
        fleet_secret(settings)
        from kvprov.engines.vllm.seams import SEAMS

        SEAMS.install()
    except BaseException:
        # vLLM notes that it has loaded its plugins before it does. Whoever tries again in this process, as in a
        # notebook, would get an engine without kvprov.
        plugins = sys.modules.get("vllm.plugins")
        if plugins is not None:
            plugins.plugins_loaded = False  # type: ignore[attr-defined]
        raise
