"""Sets up the environments that `make demo` and `make test` use. Standard library only.

The engine and all tools live in a cache folder named by the hash of the pinned requirements, so that every clone on a
machine shares it. A clone has its own `.venv` on top, with this checkout installed in place.

    python3 scripts/setup_env.py [--engine vllm|sglang] [--release VERSION ...] [--cache DIR]
"""

from __future__ import annotations

import argparse
import ctypes.util
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = ROOT / "requirements" / "torch.txt"
CPU_SUFFIX = "+cpu"
PROGRAMS = {"g++": "g++", "make": "make", "ninja": "ninja-build", "redis-server": "redis-server"}
"""Debian packages by the program that they bring: torch compiles with g++ and ninja, tests run a Redis server."""
LIBRARIES = {
    "ibverbs": "libibverbs1",
    "rdmacm": "librdmacm1",
    "nl-3": "libnl-3-200",
    "nl-route-3": "libnl-route-3-200",
    "numa": "libnuma1",
}
"""Debian packages by the library that they bring: Mooncake's engine links to them even where it speaks TCP."""
HEADERS = {"openssl/evp.h": "libssl-dev"}
"""Debian packages by the header that they bring: SGLang compiles the hash of its pages."""
SHIM = ROOT / "tests" / "support" / "sglang" / "torchvision_shim.py"


@dataclass(frozen=True)
class Engine:
    """What is set up for an engine.

    Attributes:
        title: Its name in messages.
        releases: The releases that are set up when none is named.
        venv: The checkout's environment of a release.
        size: How much is downloaded.
        trial: Python code that has to run in the finished environment.
        shims: Modules that every process of the checkout's environment imports at its start.
    """

    title: str
    releases: tuple[str, ...]
    venv: Callable[[str], str]
    size: str
    trial: str
    shims: tuple[Path, ...] = ()


# The hash of the pages is compiled here, once: 20 s.
SGLANG_TRIAL = f"""
import os, sys
os.environ["TORCH_EXTENSIONS_DIR"] = os.path.join(sys.prefix, "torch_extensions")
sys.path.insert(0, {str(SHIM.parent)!r})
import torchvision_shim
import sglang.srt.entrypoints.engine
from sglang.srt.mem_cache.utils import get_hash_str
get_hash_str([1], None, 1)
"""

ENGINES = {
    "vllm": Engine(
        title="vLLM",
        releases=("0.32.0",),
        venv=lambda release: ".venv" if release == "0.32.0" else f".venv-{release}",
        size="600 to 800 MB",
        trial="import torch, vllm",
    ),
    "sglang": Engine(
        title="SGLang",
        releases=("0.5.20", "0.5.23"),
        venv=lambda release: f".venv-sglang-{release}",
        size="about 500 MB",
        trial=SGLANG_TRIAL,
        shims=(SHIM,),
    ),
}


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


@contextmanager
def step(text: str):
    say(f"{text} ...")
    started = time.monotonic()
    yield
    say(f"{text}: done in {time.monotonic() - started:.0f} s")


def run(*command: object, quiet: bool = True) -> None:
    words = [str(word) for word in command]
    result = subprocess.run(words, text=True, stdout=subprocess.PIPE if quiet else None, stderr=subprocess.STDOUT)
    if result.returncode:
        sys.stdout.write(result.stdout or "")
        raise SystemExit(f"[setup] failed ({result.returncode}): {' '.join(words)}")


def succeeds(*command: object) -> bool:
    return subprocess.run([str(word) for word in command], capture_output=True).returncode == 0


def need_debian_packages() -> None:
    """Install what is missing where we may."""
    missing = [package for program, package in PROGRAMS.items() if shutil.which(program) is None]
    missing += [package for library, package in LIBRARIES.items() if ctypes.util.find_library(library) is None]
    missing += [package for header, package in HEADERS.items() if not (Path("/usr/include") / header).exists()]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SystemExit(f"[setup] missing programs or libraries; install the Debian packages: {' '.join(missing)}")
    with step(f"Installing Debian packages {' '.join(missing)}"):
        run("apt-get", "update", "-qq")
        run("env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "install", "-qq", "-y", *missing)


def install_torch(python: Path, pip: list[object]) -> None:
    """Install the CPU build; where no index has it, the plain build of the same version."""
    wanted = TORCH.read_text().strip()
    if succeeds(*pip, "install", "--no-deps", wanted):
        return
    plain = wanted.removesuffix(CPU_SUFFIX)
    say(f"No index offers {wanted}; installing plain {plain} instead (it may bring a CUDA build of several GB)")
    run(*pip, "install", plain)
    if not succeeds(python, "-c", "import torch"):
        raise SystemExit(f"[setup] {plain} does not import on this machine")


def build_engine_environment(engine: Engine, folder: Path, release: str, requirements: Path) -> None:
    with step(f"Creating the environment {folder.name}"):
        # Made in place: scripts inside hold its path. A marker tells a finished one from one that was interrupted.
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    with step("Installing torch (about 200 MB)"):
        install_torch(python, pip)
    with step(f"Installing {engine.title} {release} for CPU and the tools ({engine.size}; a few minutes)"):
        run(*pip, "install", "--no-deps", "-r", requirements)
    with step(f"Trying {engine.title} {release}"):
        run(python, "-c", engine.trial)
    (folder / "complete").write_text("")


def build_checkout_environment(engine: Engine, folder: Path, below: Path) -> None:
    """A thin environment of this checkout: kvprov in place, everything else from the environment `below`."""
    stamp = folder / "complete"
    parts = [ROOT / "pyproject.toml", *engine.shims]
    wanted = "\n".join([str(below), *(hashlib.sha256(part.read_bytes()).hexdigest() for part in parts), ""])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    with step(f"Installing this checkout in place in {folder.name}"):
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        packages = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
        (folder / packages / "engine.pth").write_text(f"{below / packages}\n")
        for shim in engine.shims:
            shutil.copy(shim, folder / packages)
            (folder / packages / f"{shim.stem}.pth").write_text(f"import {shim.stem}\n")
        run(
            folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check",
            "install", "--no-deps", "--no-build-isolation", "--editable", ROOT,
        )  # fmt: skip
        stamp.write_text(wanted)


def set_up(name: str, release: str, cache: Path) -> None:
    engine = ENGINES[name]
    requirements = ROOT / "requirements" / f"{name}-{release}.txt"
    if not requirements.exists():
        raise SystemExit(f"[setup] there are no pins for {engine.title} {release}: no {requirements.relative_to(ROOT)}")
    pins = requirements.read_bytes() + TORCH.read_bytes() + sys.version.encode()
    below = cache / f"{name}-{release}-{hashlib.sha256(pins).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{below.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (below / "complete").exists():
            say(f"Using the environment {below}")
        else:
            say(f"Building the environment {below} (once for each set of pins)")
            build_engine_environment(engine, below, release, requirements)
    build_checkout_environment(engine, ROOT / engine.venv(release), below)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--cache", type=Path, default=home / "kvprov-envs", help="where engine environments are kept")
    parser.add_argument("--engine", choices=sorted(ENGINES), default="vllm", help="by default vllm")
    parser.add_argument("--release", nargs="+", help="the engine's releases; by default those that `make test` runs")
    arguments = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 - nothing else checks it before this script runs
        raise SystemExit(f"[setup] Python 3.11 or newer is needed; this is {platform.python_version()}")
    need_debian_packages()
    releases = arguments.release or ENGINES[arguments.engine].releases
    # Side by side: most of the time goes to downloads and to writing files.
    with ThreadPoolExecutor(len(releases)) as pool:
        for outcome in [pool.submit(set_up, arguments.engine, release, arguments.cache) for release in releases]:
            outcome.result()


if __name__ == "__main__":
    main()
