"""What `kvprov doctor` says of a real SGLang, whole and broken."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cli.support import environment, process
from tests.support.sglang.engine import RELEASE

pytestmark = pytest.mark.engine

BREAK = """
import sglang.srt.lora.lora as lora
import sglang.srt.managers.cache_controller as controllers
from sglang.srt.mem_cache.storage import StorageBackendFactory

del lora.LoRAAdapter._process_weight
controllers.HiCacheController.attach_storage_backend = lambda self, other: None
StorageBackendFactory._registry["later"] = {}

from kvprov.engines.sglang.inspect import main

main()
"""


def test_the_real_sglang() -> None:
    done = process("doctor", "--json", env=environment(SGLANG_PLUGINS=""))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["safe"]
    assert found["engines"]["sglang"] == RELEASE
    sglang = found["sglang"]
    assert sglang["version"] == RELEASE
    assert len(sglang["seams"]) > 20
    assert not [seam for seam in sglang["seams"] if seam["error"]]
    paths = {path["name"]: path for path in sglang["paths"]}
    assert paths["HiCache storage: file"]["bound"]
    assert paths["HiCache storage: file"]["strength"].startswith("256 bits")
    assert not paths["HiCache storage: hf3fs"]["bound"]
    assert not paths["--disaggregation-mode decode"]["bound"]
    assert ("HiCache storage: seaweedfs" in paths) == (RELEASE != "0.5.20")


def test_what_is_missing_and_what_is_new_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", BREAK], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    seams = {seam["name"]: seam for seam in found["seams"]}
    broken = {name for name, seam in seams.items() if seam["error"]}
    assert broken == {"LoRAAdapter._process_weight", "HiCacheController.attach_storage_backend"}
    assert all(seams[name]["advice"] for name in broken)
    [later] = [path for path in found["paths"] if path["name"] == "HiCache storage: later"]
    assert not later["bound"]
    assert "does not know it" in later["reason"]


def test_a_setting_that_keeps_the_plugin_out() -> None:
    done = process("doctor", "--json", "--no-engine", env=environment(SGLANG_PLUGINS="other"))
    assert done.returncode == 1
    [finding] = [finding for finding in json.loads(done.stdout)["findings"] if finding["level"] == "unsafe"]
    assert finding["check"] == "SGLANG_PLUGINS"
