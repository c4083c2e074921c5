from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvprov.identity import identify_adapter, identify_checkpoint
from tests.cli.support import MODEL, error_json, error_line, process, run
from tests.identity.support import LORA, LORA_CONFIG, WEIGHTS, packed, write_checkpoint


def identified(path: str | Path) -> dict[str, Any]:
    result = run("identify", path, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    found: dict[str, Any] = json.loads(result.stdout)
    assert list(found) == ["kind", "identity", "bytes", "tensors", "seconds", "files", "cached"]
    return found


def write_adapter(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(LORA_CONFIG))
    (folder / "adapter_model.safetensors").write_bytes(packed(LORA))
    return folder


def test_a_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", shards=2)
    found = identified(folder)
    assert found["kind"] == "checkpoint"
    assert found["identity"] == identify_checkpoint(folder).identity
    assert found["identity"].startswith("tensors-v1-blake3:")
    assert found["tensors"] == len(WEIGHTS)
    assert found["files"] == sorted(path.name for path in folder.glob("*.safetensors"))
    assert found["bytes"] == sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert found["seconds"] > 0
    # Another sharding of the same tensors is the same checkpoint; other tensors are another.
    assert identified(write_checkpoint(tmp_path / "whole"))["identity"] == found["identity"]
    other = {**WEIGHTS, "model.norm.bias": ("F16", [], b"\x01\x3c")}
    assert identified(write_checkpoint(tmp_path / "other", other))["identity"] != found["identity"]


def test_an_adapter(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter")
    found = identified(folder)
    assert found["kind"] == "adapter"
    assert found["identity"] == identify_adapter(folder).identity
    assert found["identity"].startswith("adapter-v1-blake3:")
    assert found["tensors"] == len(LORA)
    assert found["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert not found["cached"]


def test_the_bundled_model() -> None:
    base = identified(MODEL / "base")
    adapters = [identified(MODEL / "adapters" / name) for name in ("standard", "inverted")]
    assert [found["kind"] for found in (base, *adapters)] == ["checkpoint", "adapter", "adapter"]
    assert base["files"] == ["model.safetensors"]
    assert adapters[0]["identity"] != adapters[1]["identity"]


def test_for_people_the_identity_is_the_first_line(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint")
    result = run("identify", folder)
    assert (result.exit_code, result.stderr) == (0, "")
    first, *rest = result.stdout.splitlines()
    assert first == identify_checkpoint(folder).identity
    assert [line.split()[0] for line in rest] == ["kind", "bytes", "tensors", "files", "seconds"]
    assert "MB/s" in rest[-1] or "remembered" in rest[-1]


def test_a_hub_id_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    repository = tmp_path / "hub" / "models--org--name"
    write_checkpoint(repository / "snapshots" / "0123abcd")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abcd")
    assert identified("org/name")["identity"] == identified(repository / "snapshots" / "0123abcd")["identity"]


def write_pickle(folder: Path) -> None:
    (folder / "pytorch_model.bin").write_bytes(b"x")


def write_truncated(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(packed(WEIGHTS)[:-1])


def write_half_an_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def write_nothing(folder: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("write", "code"),
    [
        (write_nothing, "unidentifiable"),
        (write_pickle, "unidentifiable"),
        (write_truncated, "unreadable_content"),
        (write_half_an_adapter, "unidentifiable"),
    ],
)
def test_what_has_no_identity(write: Any, code: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write(folder)
    result = run("identify", folder, "--json")
    assert result.exit_code == 2
    assert error_json(result)["code"] == code
    assert str(folder) in error_line(result)
    assert run("identify", folder).stdout == ""


@pytest.mark.parametrize("path", ["/no/such/folder", "org/never-downloaded", "", "a\0b", "x" * 10_000])
def test_a_path_that_leads_nowhere(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    result = run("identify", path, "--json")
    assert result.exit_code == 2
    assert error_json(result)["code"] in {"unreadable_content", "unidentifiable"}
    error_line(result)


def test_a_file_is_no_checkpoint() -> None:
    result = run("identify", MODEL / "base" / "model.safetensors")
    assert result.exit_code == 2
    assert "folder" in error_line(result)


def test_in_a_process_of_its_own() -> None:
    done = process("identify", MODEL / "base", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["identity"] == identified(MODEL / "base")["identity"]
