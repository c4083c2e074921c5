from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from kvprov.errors import KvprovError, UnidentifiableError, UnreadableContentError
from kvprov.identity import (
    combined_identity,
    identify_checkpoint,
    open_checkpoint,
    open_files,
    resolve_folder,
    select_files,
)
from kvprov.identity.checkpoint import INDEX, MISTRAL_INDEX
from tests.identity import reference
from tests.identity.support import WEIGHTS, Tensors, flipped, open_descriptors, packed, write_checkpoint


def expected(tensors: Tensors) -> str:
    listed = [{"name": n, "dtype": d, "shape": s, "data_hex": raw.hex()} for n, (d, s, raw) in tensors.items()]
    return f"tensors-v1-blake3:{reference.tensors_digest(listed).hex()}"


def test_identifies(tmp_path: Path) -> None:
    found = identify_checkpoint(write_checkpoint(tmp_path / "m"))
    assert found.identity == expected(WEIGHTS)
    assert found.bytes == (tmp_path / "m/model.safetensors").stat().st_size
    assert (found.tensors, found.files, found.cached) == (4, ("model.safetensors",), False)
    assert found.seconds > 0


def test_the_same_for_any_path_sharding_order_time_and_metadata(tmp_path: Path) -> None:
    one = identify_checkpoint(write_checkpoint(tmp_path / "one"))
    backwards = dict(reversed(WEIGHTS.items()))
    others = {
        "sharded": write_checkpoint(tmp_path / "sharded", shards=2),
        "more shards": write_checkpoint(tmp_path / "more", shards=4),
        "backwards": write_checkpoint(tmp_path / "backwards", backwards),
        "backwards in shards": write_checkpoint(tmp_path / "backwards shards", backwards, shards=3),
        "copied": Path(shutil.copytree(tmp_path / "one", tmp_path / "copied")),
        "touched": Path(shutil.copytree(tmp_path / "one", tmp_path / "touched")),
        "metadata": write_checkpoint(tmp_path / "metadata"),
        "another name": write_checkpoint(tmp_path / "name"),
        "linked": tmp_path / "linked",
    }
    os.utime(tmp_path / "touched/model.safetensors", (0, 0))
    (tmp_path / "touched/model.safetensors").chmod(0o400)
    (tmp_path / "metadata/model.safetensors").write_bytes(packed(WEIGHTS, {"format": "pt", "note": "another"}))
    (tmp_path / "name/model.safetensors").rename(tmp_path / "name/weights.safetensors")
    (tmp_path / "name/config.json").write_text("{}")
    others["linked"].mkdir()
    (others["linked"] / "model.safetensors").symlink_to(tmp_path / "one/model.safetensors")
    assert {name: identify_checkpoint(folder).identity for name, folder in others.items()} == dict.fromkeys(
        others, one.identity
    )


def test_another_for_every_difference_in_content(tmp_path: Path) -> None:
    name = "model.layer.0.weight"
    dtype, shape, raw = WEIGHTS[name]
    rest = {key: value for key, value in WEIGHTS.items() if key != name}
    others: dict[str, Tensors] = {
        "first bit": flipped(WEIGHTS, name, 0),
        "last bit": flipped(WEIGHTS, name, len(raw) * 8 - 1),
        "bit of another tensor": flipped(WEIGHTS, "model.norm.bias", 3),
        "renamed": rest | {"model.layer.2.weight": WEIGHTS[name]},
        "dtype": rest | {name: ("I32", shape, raw)},
        "shape": rest | {name: (dtype, [3, 2], raw)},
        "rank": rest | {name: (dtype, [6], raw)},
        "one fewer": rest,
        "one more": {**WEIGHTS, "new": ("F32", [0], b"")},
        "swapped": rest | {"model.layer.1.weight": WEIGHTS[name], name: WEIGHTS["model.layer.1.weight"]},
    }
    base = identify_checkpoint(write_checkpoint(tmp_path / "base")).identity
    assert identify_checkpoint(write_checkpoint(tmp_path / "again")).identity == base
    found = {what: identify_checkpoint(write_checkpoint(tmp_path / what, t)).identity for what, t in others.items()}
    assert len({base, *found.values()}) == len(others) + 1


def names(folder: Path) -> list[str]:
    return [path.name for path in select_files(folder)]


def touch(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).touch()
    return folder


def index(folder: Path, weight_map: object, name: str = INDEX) -> Path:
    (folder / name).write_text(json.dumps({"weight_map": weight_map}))
    return folder


class TestSelection:
    def test_every_file_without_an_index(self, tmp_path: Path) -> None:
        touch(tmp_path, "b.safetensors", "a.safetensors", "pytorch_model.bin", ".hidden.safetensors", "config.json")
        assert names(tmp_path) == ["a.safetensors", "b.safetensors"]

    def test_exactly_the_files_of_the_index(self, tmp_path: Path) -> None:
        touch(tmp_path, "m-1.safetensors", "m-2.safetensors", "extra.safetensors")
        index(tmp_path, {"x": "m-2.safetensors", "y": "m-1.safetensors", "z": "m-2.safetensors"})
        assert names(tmp_path) == ["m-1.safetensors", "m-2.safetensors"]

    def test_mistral_files_first(self, tmp_path: Path) -> None:
        touch(tmp_path, "consolidated.00.safetensors", "consolidated.01.safetensors", "model.safetensors")
        index(tmp_path, {"x": "model.safetensors"})
        assert names(tmp_path) == ["consolidated.00.safetensors", "consolidated.01.safetensors"]
        index(tmp_path, {"x": "consolidated.01.safetensors"}, MISTRAL_INDEX)
        assert names(tmp_path) == ["consolidated.01.safetensors"]

    def test_the_index_of_the_other_format_says_nothing(self, tmp_path: Path) -> None:
        touch(tmp_path, "a.safetensors", "b.safetensors")
        index(tmp_path, {"x": "a.safetensors"}, MISTRAL_INDEX)
        assert names(tmp_path) == ["a.safetensors", "b.safetensors"]

    @pytest.mark.parametrize(
        "bad",
        ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "./a.safetensors", "..", ".", "", 7, None, ["a"]],
    )
    def test_an_index_that_leads_out_of_the_folder(self, tmp_path: Path, bad: object) -> None:
        folder = touch(tmp_path, "a.safetensors")
        index(folder, {"x": "a.safetensors"})
        assert names(folder) == ["a.safetensors"]
        index(folder, {"x": "a.safetensors", "y": bad})
        with pytest.raises(UnreadableContentError, match="no file of this folder") as caught:
            select_files(folder)
        assert caught.value.path == folder / INDEX

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "m", shards=3)
        select_files(folder)
        (folder / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(UnreadableContentError, match=r"'model-00002-of-00003\.safetensors', which is missing"):
            select_files(folder)

    @pytest.mark.parametrize(
        ("raw", "reason"),
        [
            (b"", "not valid JSON"),
            (b"[]", "not an object"),
            (b"{}", "no weight_map"),
            (b'{"weight_map":[]}', "no weight_map"),
            (b'{"weight_map":{}}', "no weight_map"),
            (b'{"weight_map":{"x":"a.safetensors","x":"b.safetensors"}}', "'x' occurs twice"),
            (b'{"weight_map":' + b"[" * 100_000, "nested too deeply"),
            (b"\xff", "not UTF-8"),
        ],
    )
    def test_a_broken_index(self, tmp_path: Path, raw: bytes, reason: str) -> None:
        touch(tmp_path, "a.safetensors")
        (tmp_path / INDEX).write_bytes(raw)
        with pytest.raises(UnreadableContentError, match=reason) as caught:
            select_files(tmp_path)
        assert caught.value.path == tmp_path / INDEX

    @pytest.mark.parametrize(
        ("files", "shown"),
        [
            ((), "no safetensors file."),
            (("pytorch_model.bin", "model.pt"), r"only \.bin, \.pt"),
            (("model.gguf",), r"only \.gguf"),
        ],
    )
    def test_formats_that_are_not_read(self, tmp_path: Path, files: tuple[str, ...], shown: str) -> None:
        touch(tmp_path, *files)
        with pytest.raises(UnidentifiableError, match=shown) as caught:
            select_files(tmp_path)
        assert "safetensors" in caught.value.advice

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(UnreadableContentError, match="does not exist"):
            select_files(tmp_path / "missing")
        with pytest.raises(UnreadableContentError, match="not a folder"):
            select_files(touch(tmp_path, "file") / "file")


class TestHubCache:
    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    @pytest.fixture
    def snapshot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.chdir(tmp_path)
        repository = tmp_path / ".cache/huggingface/hub/models--org--name"
        (repository / "refs/pr").mkdir(parents=True)
        (repository / "refs/main").write_text(self.COMMIT)
        (repository / "refs/pr/1").write_text(self.COMMIT)
        snapshot = repository / "snapshots" / self.COMMIT
        blob = repository / "blobs/model"
        blob.parent.mkdir()
        blob.write_bytes(packed(WEIGHTS))
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").symlink_to("../../blobs/model")
        return snapshot

    def test_resolves_without_network(self, snapshot: Path) -> None:
        for revision in (None, "main", "pr/1", self.COMMIT):
            assert resolve_folder("org/name", revision) == snapshot
        assert identify_checkpoint(resolve_folder("org/name")).identity == expected(WEIGHTS)

    @pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"])
    def test_the_cache_can_be_elsewhere(
        self, snapshot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
    ) -> None:
        below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
        (tmp_path / "else" / below).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / ".cache/huggingface/hub").rename(tmp_path / "else" / below)
        monkeypatch.setenv(variable, str(tmp_path / "else"))
        assert resolve_folder("org/name").name == self.COMMIT

    def test_a_folder_comes_first(self, snapshot: Path, tmp_path: Path) -> None:
        (tmp_path / "org/name").mkdir(parents=True)
        assert resolve_folder("org/name") == Path("org/name")
        assert resolve_folder(tmp_path) == tmp_path

    @pytest.mark.parametrize("hub_id", ["org/other", "../x", "org/../name", "/nowhere", "a/b/c", "", "a\0b", "x" * 300])
    def test_neither(self, snapshot: Path, hub_id: str) -> None:
        with pytest.raises(UnreadableContentError) as caught:
            resolve_folder(hub_id or "no-such")
        assert caught.value.advice

    @pytest.mark.parametrize("revision", ["other", "../main", "pr", "a//b", "a\0", "."])
    def test_no_such_revision(self, snapshot: Path, revision: str) -> None:
        with pytest.raises(UnreadableContentError) as caught:
            resolve_folder("org/name", revision)
        assert caught.value.advice

    def test_a_ref_that_leads_elsewhere(self, snapshot: Path) -> None:
        (snapshot.parents[1] / "refs/main").write_text("../../..")
        with pytest.raises(UnreadableContentError, match="neither"):
            resolve_folder("org/name")

    def test_a_file(self, snapshot: Path) -> None:
        with pytest.raises(UnreadableContentError, match="it is a file"):
            resolve_folder(snapshot / "model.safetensors")


class TestBrokenCheckpoints:
    def test_a_tensor_in_two_files(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        (tmp_path / "z.safetensors").write_bytes(packed({"model.norm.bias": WEIGHTS["model.norm.bias"]}))
        with pytest.raises(
            UnreadableContentError, match=r"'model\.norm\.bias' is also in model\.safetensors"
        ) as caught:
            identify_checkpoint(tmp_path)
        assert caught.value.path.name == "z.safetensors"

    def test_the_error_names_the_broken_shard(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "m", shards=2)
        shard = folder / "model-00002-of-00002.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1])
        with pytest.raises(UnreadableContentError, match="outside the file") as caught:
            identify_checkpoint(folder)
        assert caught.value.path == shard

    def test_a_folder_in_place_of_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").mkdir()
        with pytest.raises(UnreadableContentError, match="it is a folder"):
            identify_checkpoint(tmp_path)

    def test_links_that_loop(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").symlink_to("model.safetensors")
        with pytest.raises(UnreadableContentError, match="form a loop"):
            identify_checkpoint(tmp_path)

    def test_files_opened_before_the_error_are_closed(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path / "m", shards=3)
        last = folder / "model-00003-of-00003.safetensors"
        last.unlink()
        last.symlink_to("nowhere")
        before = open_descriptors()
        with pytest.raises(UnreadableContentError, match="does not exist"):
            open_checkpoint(folder)
        assert open_descriptors() == before


class TestParts:
    def test_prefixes_are_part_of_the_names(self, tmp_path: Path) -> None:
        base = write_checkpoint(tmp_path / "base")
        draft = write_checkpoint(tmp_path / "draft", {"head": ("U8", [2], b"hi")})
        whole = write_checkpoint(tmp_path / "whole", {**WEIGHTS, "draft.head": ("U8", [2], b"hi")})
        with open_checkpoint(base) as one, open_files(select_files(draft), "draft.") as two:
            both = combined_identity([one, two])
            assert both.identity == combined_identity([two, one]).identity
            assert both.identity == identify_checkpoint(whole).identity
            assert both.identity != one.identify().identity
            assert both.tensors == 5
            assert both.files == ("model.safetensors", "model.safetensors")
            for part in (one, two):
                part.recheck()

    def test_parts_that_share_a_name(self, tmp_path: Path) -> None:
        base = write_checkpoint(tmp_path / "base")
        with (
            open_checkpoint(base) as one,
            open_checkpoint(base) as two,
            pytest.raises(KvprovError, match="occurs twice"),
        ):
            combined_identity([one, two])

    def test_open_files_takes_safetensors_only(self, tmp_path: Path) -> None:
        with pytest.raises(UnidentifiableError, match="no files"):
            open_files([])
        with pytest.raises(UnidentifiableError, match="no safetensors"):
            open_files([touch(tmp_path, "model.bin") / "model.bin"])

    def test_hashed_once(self, tmp_path: Path) -> None:
        with open_checkpoint(write_checkpoint(tmp_path / "m")) as checkpoint:
            assert checkpoint.tensors() is checkpoint.tensors()
