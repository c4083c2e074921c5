"""Packages that declare dimensions, made in a folder as an installer would lay them out."""

from __future__ import annotations

from pathlib import Path

ACME = '''"""Two dimensions of somebody else."""

import hashlib
import os

from kvprov.contract.descriptor import ABSENT, Known, Unknown
from kvprov.contract.dimension import Dimension, Half, Kind
from kvprov.extensions import Extension


def _patch(vllm_config):
    assert vllm_config.model_config.max_model_len == 512
    patch = os.environ.get("ACME_PATCH")
    if patch is None:
        return Unknown("nobody said which patch this engine runs")
    return Known(f"acme-patch:{patch}")


def _tone(request):
    tone = (request.sampling_params.extra_args or {}).get("tone")
    if tone is None:
        return ABSENT
    return Known("acme-tone:" + hashlib.sha256(tone.encode()).hexdigest())


patch = Extension(Dimension("acme.patch", Half.WORKER, Kind.COMPUTATIONAL, "Our patch changes attention."), _patch)
tone = Extension(Dimension("acme.tone", Half.REQUEST, Kind.PERMISSION, "Tones do not share."), _tone)
plain = Extension(Dimension("tone", Half.REQUEST, Kind.PERMISSION, "It lacks the prefix."), _tone)
broken = "not an extension"
'''


def install(
    folder: Path, module: str, source: str, entry_points: dict[str, str], group: str = "kvprov.dimensions"
) -> str:
    """Make a package with one module in `folder`, and return what to put on `sys.path`."""
    information = folder / f"{module}-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / f"{module}.py").write_text(source)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    points = "".join(f"{name} = {module}:{attribute}\n" for name, attribute in entry_points.items())
    (information / "entry_points.txt").write_text(f"[{group}]\n{points}")
    return str(folder)
