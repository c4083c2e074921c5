"""What a test does to vLLM or kvprov in an engine's process, before the engine is made."""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.engine import Engine
from tests.support.models import BUNDLED


def listing(store: Path) -> dict[str, str]:
    """Return the name of each file below `store`, with a hash of what it holds."""
    return {
        str(file.relative_to(store)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(store.rglob("*"))
        if file.is_file()
    }


def kvprov_modules(_engine: Engine | None = None) -> list[str]:
    """Return the modules of kvprov that this process has imported."""
    return sorted(n for n, m in sys.modules.items() if m is not None and n.split(".")[0] == "kvprov")


def uninstall_kvprov() -> None:
    """Make this process one in which kvprov is not installed: no entry point, no distribution, no module."""
    assert not kvprov_modules()
    real = importlib.metadata.entry_points

    def entry_points(**selection: Any) -> Any:
        return importlib.metadata.EntryPoints(p for p in real(**selection) if not p.value.startswith("kvprov."))

    importlib.metadata.entry_points = entry_points  # type: ignore[assignment]

    class Absent:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            del path, target
            if name.split(".")[0] == "kvprov":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Absent)  # type: ignore[arg-type]


def register() -> None:
    """Load the plugins now, as the engine would do when it is made."""
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def owner_of(module: str, name: str) -> tuple[Any, str]:
    """Return the object in whose namespace vLLM's `module.name` is, and the attribute's name there."""
    owner: Any = importlib.import_module(module)
    *classes, attribute = name.split(".")
    for part in classes:
        owner = getattr(owner, part)
    return owner, attribute


def rename(module: str, name: str) -> None:
    """Rename one function of vLLM, as a release may."""
    owner, attribute = owner_of(module, name)
    setattr(owner, attribute + "_renamed", vars(owner)[attribute])
    delattr(owner, attribute)


def reparametrise(module: str, name: str) -> None:
    """Give one function of vLLM another first parameter, as a release may."""
    owner, attribute = owner_of(module, name)
    found = vars(owner)[attribute]
    function = found.__func__ if isinstance(found, classmethod) else found

    def other(something_else: Any, *args: Any, **kwargs: Any) -> Any:
        return function(something_else, *args, **kwargs)

    setattr(owner, attribute, classmethod(other) if isinstance(found, classmethod) else other)


def wrapped_functions() -> list[str]:
    """Return which of vLLM's functions kvprov has replaced in this process."""
    from kvprov.engines.seams import MARK
    from kvprov.engines.vllm.seams import SEAMS

    found = []
    for seam in SEAMS.all():
        owner, attribute = owner_of_or_none(seam.module, seam.name)
        value = vars(owner).get(attribute) if owner is not None else None
        if hasattr(getattr(value, "__func__", value), MARK):
            found.append(seam.name)
    return found


def owner_of_or_none(module: str, name: str) -> tuple[Any, str]:
    try:
        return owner_of(module, name)
    except AttributeError:
        return None, name


def restore(module: str, name: str) -> None:
    """Undo kvprov's replacement of one function of vLLM once the plugin has made it."""
    register()
    from kvprov.engines.seams import MARK

    owner, attribute = owner_of(module, name)
    found = vars(owner)[attribute]
    if isinstance(found, classmethod):
        setattr(owner, attribute, classmethod(getattr(found.__func__, MARK)))
    else:
        setattr(owner, attribute, getattr(found, MARK))


def restore_each() -> tuple[dict[str, list[str]], list[str]]:
    """Undo each seam alone; return what kvprov then finds undone, and what it finds once all are back."""
    from kvprov.engines.vllm.seams import SEAMS

    found = {}
    for seam in SEAMS.all():
        owner, attribute = owner_of(seam.module, seam.name)
        bound = vars(owner)[attribute]
        restore(seam.module, seam.name)
        found[f"{seam.module}.{seam.name}"] = SEAMS.undone()
        setattr(owner, attribute, bound)
    return found, SEAMS.undone()


def go_around(module: str, name: str) -> None:
    """Like `restore`, by somebody who wraps the replacement with care, and then does not call it."""
    register()
    from kvprov.engines.seams import MARK

    owner, attribute = owner_of(module, name)
    found = vars(owner)[attribute]
    replaced = found.__func__ if isinstance(found, classmethod) else found
    original = getattr(replaced, MARK)

    @functools.wraps(replaced)
    def around(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    setattr(owner, attribute, classmethod(around) if isinstance(found, classmethod) else around)


def ignore_identifiers(role: str = "") -> None:
    """Make the connector name its entries by tokens alone, in one of its halves or in both."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    native = ExampleConnector._generate_foldername_debug

    def foldername(self: Any, token_ids: Any, mm_hashes: Any, create_folder: bool = False) -> str:
        kept = [] if not role or self.role.name == role else mm_hashes
        return str(native(self, token_ids, kept, create_folder))

    ExampleConnector._generate_foldername_debug = foldername


def look_up_elsewhere() -> None:
    """Make the connector look entries up under other names than it stores them."""
    from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

    native = ExampleConnector._found_match_for_prompt

    def found(self: Any, prompt_token_ids: Any, mm_hashes: Any) -> Any:
        return native(self, prompt_token_ids, [*mm_hashes, "elsewhere"])

    ExampleConnector._found_match_for_prompt = found


def filter_plugins_later() -> None:
    """Bind this process, and leave those that it starts without kvprov."""
    register()
    os.environ["VLLM_PLUGINS"] = ""


def misspell_a_setting_later() -> None:
    """Bind this process, and leave those that it starts with a setting that does not exist."""
    register()
    os.environ["KVPROV_DIGEST_BIT"] = "128"


def try_each(seams: list[tuple[str, str]], damage: Callable[[str, str], None]) -> list[tuple[str, str, list[str]]]:
    """Damage one function at a time, and return what the plugin says of it and what it leaves behind."""
    from kvprov.engines.vllm.plugin import register as plugin

    os.environ["KVPROV_MODE"] = "enforce"
    results = []
    for module, name in seams:
        owner, attribute = owner_of(module, name)
        whole = vars(owner)[attribute]
        damage(module, name)
        try:
            plugin()
            said = ""
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the result
            said = f"{type(error).__name__}: {error}"
        results.append((name, said, wrapped_functions()))
        setattr(owner, attribute, whole)
    return results


def install_and_list() -> list[str]:
    """Install the plugin, and return what it has replaced."""
    from kvprov.engines.vllm.plugin import register as plugin

    plugin()
    return wrapped_functions()


def attempt() -> None:
    """Start an engine that cannot start, and go on."""
    from vllm import LLM

    try:
        LLM(model=str(BUNDLED / "base"), skip_tokenizer_init=True)
    except Exception as error:  # noqa: BLE001 - whatever it is: it is only tried
        print(f"first attempt: {type(error).__name__}")
    else:
        raise AssertionError("the first attempt started")
