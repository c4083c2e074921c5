"""Sets up the environment that `make demo` and `make test` use. Standard library only.

The engine and all tools live in a cache folder named by the hash of the pinned requirements, so that every clone on a
machine shares it. A clone has its own `.venv` on top, with this checkout installed in place.

    python3 scripts/setup_env.py [--release VERSION] [--cache DIR]
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
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RELEASE = "0.32.0"
TORCH = ROOT / "requirements" / "torch.txt"
CPU_SUFFIX = "+cpu"
PROGRAMS = {"g++": "g++", "make": "make", "redis-server": "redis-server"}
"""Debian packages by the program that they bring: torch compiles small kernels with g++, tests run a Redis server."""
LIBRARIES = {
    "ibverbs": "libibverbs1",
    "rdmacm": "librdmacm1",
    "nl-3": "libnl-3-200",
    "nl-route-3": "libnl-route-3-200",
    "numa": "libnuma1",
}
"""Debian packages by the library that they bring: Mooncake's engine links to them even where it speaks TCP."""


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


def build_engine_environment(folder: Path, release: str, requirements: Path) -> None:
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    with step("Creating the environment"):
        # Made in place: scripts inside hold its path. A marker tells a finished one from one that was interrupted.
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", folder)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    with step("Installing torch (about 200 MB)"):
        install_torch(python, pip)
    with step(f"Installing vLLM {release} for CPU and the tools (600 to 800 MB; a few minutes)"):
        run(*pip, "install", "--no-deps", "-r", requirements)
    with step("Trying the import"):
        run(python, "-c", "import torch, vllm; print(vllm.__version__)")
    (folder / "complete").write_text("")


def build_checkout_environment(folder: Path, engine: Path) -> None:
    """A thin environment of this checkout: kvprov in place, everything else from `engine`."""
    stamp = folder / "complete"
    wanted = f"{engine}\n{hashlib.sha256((ROOT / 'pyproject.toml').read_bytes()).hexdigest()}\n"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    with step("Installing this checkout in place"):
        shutil.rmtree(folder, ignore_errors=True)
        run(sys.executable, "-m", "venv", "--without-pip", folder)
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        below = engine / "lib" / version / "site-packages"
        (folder / "lib" / version / "site-packages" / "engine.pth").write_text(f"{below}\n")
        run(
            folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check",
            "install", "--no-deps", "--no-build-isolation", "--editable", ROOT,
        )  # fmt: skip
        stamp.write_text(wanted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parser.add_argument("--cache", type=Path, default=home / "kvprov-envs", help="where engine environments are kept")
    parser.add_argument("--release", default=RELEASE, help=f"vLLM's release; by default {RELEASE}, in .venv")
    arguments = parser.parse_args()
    cache, release = arguments.cache, arguments.release
    requirements = ROOT / "requirements" / f"vllm-{release}.txt"
    if not requirements.exists():
        raise SystemExit(f"[setup] there are no pins for vLLM {release}: no {requirements.relative_to(ROOT)}")
    if sys.version_info < (3, 11):  # noqa: UP036 - nothing else checks it before this script runs
        raise SystemExit(f"[setup] Python 3.11 or newer is needed; this is {platform.python_version()}")
    need_debian_packages()
    pins = requirements.read_bytes() + TORCH.read_bytes() + sys.version.encode()
    engine = cache / f"vllm-{release}-{hashlib.sha256(pins).hexdigest()[:12]}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{engine.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (engine / "complete").exists():
            say(f"Using the environment {engine}")
        else:
            say(f"Building the environment {engine} (once for each set of pins)")
            build_engine_environment(engine, release, requirements)
    build_checkout_environment(ROOT / (".venv" if release == RELEASE else f".venv-{release}"), engine)


if __name__ == "__main__":
    main()
