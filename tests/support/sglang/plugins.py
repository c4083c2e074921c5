"""The plugins of these tests, installed in a folder as an installer would lay them out."""

from __future__ import annotations

from pathlib import Path

from tests.support.packages import install

GROUP = "sglang.srt.plugins"


def install_plugins(folder: Path) -> str:
    """Install what a CPU needs and the coarse quantization, and return what to put on `sys.path`."""
    here = Path(__file__).parent
    for name in ("cpu", "coarse"):
        install(folder, f"sglang_{name}", (here / f"{name}.py").read_text(), {name: "register"}, group=GROUP)
    return str(folder)
