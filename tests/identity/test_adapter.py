from __future__ import annotations

import json
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

import kvprov.identity.adapter as module
from kvprov.errors import ChangedContentError, KvprovError, UnidentifiableError, UnreadableContentError
from kvprov.identity import identify_adapter, pin_adapter, sources_unchanged, unpin_adapter
from tests.identity import reference
from tests.identity.conftest import wait_until_settled
from tests.identity.support import (
    LORA,
    LORA_CONFIG,
    Tensors,
    flipped,
    open_descriptors,
    overwrite,
    packed,
    replace_file,
    with_header,
    write_adapter,
)

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def expected(
    tensors: Tensors = LORA,
    config: dict[str, Any] = LORA_CONFIG,
    extra: dict[str, Any] | None = None,
    files: dict[str, str] | None = None,
) -> str:
    listed = [{"name": n, "dtype": d, "shape": s, "data_hex": raw.hex()} for n, (d, s, raw) in tensors.items()]
    return reference.adapter_identity(listed, config, extra or {}, files or {})


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "adapter")


@pytest.fixture
def into(tmp_path: Path) -> Path:
    (tmp_path / "pins").mkdir(mode=0o700)
    return tmp_path / "pins"


def test_identifies(adapter: Path) -> None:
    found = identify_adapter(adapter)
    assert found.identity == expected()
    assert (found.tensors, found.files, found.cached) == (2, (CONFIG, TENSORS), False)
    assert found.bytes == sum(path.stat().st_size for path in adapter.iterdir())


def test_the_same_for_any_name_path_time_and_metadata(adapter: Path, tmp_path: Path) -> None:
    (adapter / "README.md").write_text("another")
    (adapter / "adapter_model.bin").write_bytes(b"never read")
    copy = Path(shutil.copytree(adapter, tmp_path / "another-name"))
    (copy / TENSORS).write_bytes(packed(dict(reversed(LORA.items())), {"format": "pt"}))
    (copy / CONFIG).write_text(json.dumps(dict(reversed(LORA_CONFIG.items())), indent=8))
    os.utime(copy / CONFIG, (0, 0))
    assert identify_adapter(copy).identity == identify_adapter(adapter).identity


def test_another_for_every_difference(tmp_path: Path) -> None:
    name = "base_model.model.q_proj.lora_B.weight"
    folders = {
        "base": write_adapter(tmp_path / "base"),
        "bit": write_adapter(tmp_path / "bit", flipped(LORA, name, 100)),
        "renamed": write_adapter(tmp_path / "renamed", {k.replace("q_proj", "k_proj"): v for k, v in LORA.items()}),
        "alpha": write_adapter(tmp_path / "alpha", config=LORA_CONFIG | {"lora_alpha": 8}),
    }
    assert len({identify_adapter(folder).identity for folder in folders.values()}) == len(folders)


HOSTILE: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no config": (lambda f: (f / CONFIG).unlink(), "does not exist", CONFIG),
    "config a folder": (lambda f: ((f / CONFIG).unlink(), (f / CONFIG).mkdir()), "it is a folder", CONFIG),
    "config a fifo": (lambda f: ((f / CONFIG).unlink(), os.mkfifo(f / CONFIG)), "not a regular file", CONFIG),
    "config loops": (lambda f: ((f / CONFIG).unlink(), (f / CONFIG).symlink_to(CONFIG)), "form a loop", CONFIG),
    "config empty": (lambda f: (f / CONFIG).write_bytes(b""), "not valid JSON", CONFIG),
    "config not utf-8": (lambda f: (f / CONFIG).write_bytes(b'{"a":"\xff"}'), "not UTF-8", CONFIG),
    "config a list": (lambda f: (f / CONFIG).write_bytes(b"[]"), "not an object", CONFIG),
    "config deep": (lambda f: (f / CONFIG).write_bytes(b'{"a":' + b"[" * 200_000), "nested too deeply", CONFIG),
    "config deep and whole": (
        lambda f: (f / CONFIG).write_bytes(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"),
        "nested too deeply",
        CONFIG,
    ),
    "config doubled": (lambda f: (f / CONFIG).write_bytes(b'{"r":1,"r":2}'), "'r' occurs twice", CONFIG),
    "config doubled below": (
        lambda f: (f / CONFIG).write_bytes(b'{"rank_pattern":{"a":1,"a":2}}'),
        "'a' occurs twice",
        CONFIG,
    ),
    "config a long number": (lambda f: (f / CONFIG).write_bytes(b'{"r":' + b"9" * 10_000 + b"}"), "not valid", CONFIG),
    "config large": (lambda f: os.truncate(f / CONFIG, 1 << 40), "more than 8388608", CONFIG),
    "config reserved": (lambda f: (f / CONFIG).write_bytes(b'{"kvprov:x":1}'), "for itself", CONFIG),
    "config half a pair": (lambda f: (f / CONFIG).write_bytes(b'{"a":"\\ud800"}'), "surrogate", CONFIG),
    "tensors cut": (lambda f: os.truncate(f / TENSORS, len(packed(LORA)) - 1), "outside the file", TENSORS),
    "tensors a pickle": (lambda f: (f / TENSORS).write_bytes(b"\x80\x04" + b"." * 90), "claims", TENSORS),
    "tensors a folder": (lambda f: ((f / TENSORS).unlink(), (f / TENSORS).mkdir()), "it is a folder", TENSORS),
    "tensors a fifo": (lambda f: ((f / TENSORS).unlink(), os.mkfifo(f / TENSORS)), "not a regular file", TENSORS),
    "header large": (
        lambda f: ((f / TENSORS).write_bytes(with_header({}, length=50_000_000)), os.truncate(f / TENSORS, 1 << 40)),
        "more than the limit",
        TENSORS,
    ),
}


@pytest.mark.parametrize("pin", [False, True], ids=["identify", "pin"])
@pytest.mark.parametrize("what", HOSTILE)
@pytest.mark.timeout(20)
def test_hostile_adapters_give_one_clear_error(adapter: Path, into: Path, what: str, pin: bool) -> None:
    damage, reason, name = HOSTILE[what]
    identify_adapter(adapter)
    damage(adapter)
    # Holes of a terabyte would be copied as zeros otherwise.
    use = partial(pin_adapter, into=into, max_bytes=1 << 20) if pin else identify_adapter
    with pytest.raises(UnreadableContentError) as caught:
        use(adapter)
    too_large = pin and (adapter / name).is_file() and (adapter / name).stat().st_size > 1 << 20
    assert caught.value.path == (adapter if too_large else adapter / name)
    assert ("more than 1048576" if too_large else reason) in caught.value.reason
    assert caught.value.advice
    assert list(into.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "shown"),
    [
        ((), "no adapter_model.safetensors."),
        (("adapter_model.bin",), "only adapter_model.bin"),
        (("adapter_model.pt",), "pt"),
    ],
)
def test_pickled_adapters_are_not_read(adapter: Path, into: Path, files: tuple[str, ...], shown: str) -> None:
    (adapter / TENSORS).unlink()
    for file in files:
        (adapter / file).write_bytes(b"cos\nsystem\n(S'exit'\ntR.")
    with pytest.raises(UnidentifiableError, match=shown) as caught:
        identify_adapter(adapter)
    assert "safe_serialization" in caught.value.advice
    with pytest.raises(UnidentifiableError):
        pin_adapter(adapter, into)


def test_no_folder(tmp_path: Path, into: Path) -> None:
    for call in (lambda: identify_adapter(tmp_path / "no"), lambda: pin_adapter(tmp_path / "no", into)):
        with pytest.raises(UnreadableContentError, match="does not exist"):
            call()


@pytest.mark.timeout(60)
def test_truncating_an_adapter_while_it_is_hashed_does_not_kill_the_process(adapter: Path) -> None:
    big = packed({"a": ("U8", [8 << 20], bytes(8 << 20))})
    stop = threading.Event()

    def truncate() -> None:
        while not stop.is_set():
            (adapter / TENSORS).write_bytes(big)
            os.truncate(adapter / TENSORS, 100_000)

    thread = threading.Thread(target=truncate)
    thread.start()
    try:
        for _ in range(30):
            with suppress(ChangedContentError, UnreadableContentError):
                identify_adapter(adapter)
    finally:
        stop.set()
        thread.join()


class TestPin:
    def test_copies_exactly_what_the_identity_covers(self, adapter: Path, into: Path) -> None:
        for name in ("README.md", "adapter_model.bin", "new_embeddings.safetensors", "optimizer.pt", "tokenizer.json"):
            (adapter / name).write_bytes(b"more")
        pinned = pin_adapter(adapter, into)
        assert pinned.identity == expected() == identify_adapter(pinned.folder).identity
        assert sorted(path.name for path in pinned.folder.iterdir()) == [CONFIG, TENSORS]
        assert pinned.folder.parent == into
        assert pinned.folder.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in pinned.folder.iterdir()} == {0o600}
        for name in (CONFIG, TENSORS):
            assert (pinned.folder / name).read_bytes() == (adapter / name).read_bytes()
            assert not (pinned.folder / name).samefile(adapter / name)

    def test_every_pin_has_a_folder_of_its_own(self, adapter: Path, into: Path) -> None:
        one, two = pin_adapter(adapter, into), pin_adapter(adapter, into)
        assert one.folder != two.folder
        assert one.identity == two.identity
        unpin_adapter(one)
        unpin_adapter(one)
        assert not one.folder.exists()
        assert two.folder.exists()

    def test_links_are_copied_as_files(self, adapter: Path, into: Path, tmp_path: Path) -> None:
        (tmp_path / "blobs").mkdir()
        (adapter / TENSORS).rename(tmp_path / "blobs/t")
        (adapter / TENSORS).symlink_to(tmp_path / "blobs/t")
        (tmp_path / "current").symlink_to(adapter)
        pinned = pin_adapter(tmp_path / "current", into)
        assert not (pinned.folder / TENSORS).is_symlink()
        assert pinned.identity == expected()

    def test_facts_and_further_files_are_bound(self, adapter: Path, into: Path) -> None:
        more = {"emb": ("F32", [1], b"\0\0\0\1")}
        (adapter / "new_embeddings.safetensors").write_bytes(packed(more))
        (adapter / "added_tokens.json").write_bytes(b"{}")
        facts = {"is_3d_lora_weight": True}
        assert pin_adapter(adapter, into, facts).identity == expected(extra=facts)
        also = ("new_embeddings.safetensors", "added_tokens.json", "missing.json")
        pinned = pin_adapter(adapter, into, also=also)
        assert sorted(path.name for path in pinned.folder.iterdir()) == sorted({CONFIG, TENSORS, *also[:2]})
        from blake3 import blake3

        listed = [{"name": "emb", "dtype": "F32", "shape": [1], "data_hex": "00000001"}]
        files = {
            "new_embeddings.safetensors": f"tensors-v1-blake3:{reference.tensors_digest(listed).hex()}",
            "added_tokens.json": f"blake3:{blake3(b'{}').hexdigest()}",
        }
        assert pinned.identity == expected(files=files)

    @pytest.mark.parametrize("name", ["../x.json", "adapter_model.bin", "x.pt", "", "..", CONFIG, "a/b.json"])
    def test_further_files_are_plain_names(self, adapter: Path, into: Path, name: str) -> None:
        with pytest.raises(KvprovError, match="cannot be copied"):
            pin_adapter(adapter, into, also=[name])

    def test_what_happens_to_the_original_later_does_not_matter(self, adapter: Path, into: Path) -> None:
        pinned = pin_adapter(adapter, into)
        overwrite(adapter / TENSORS, packed(flipped(LORA, next(iter(LORA)))))
        (adapter / CONFIG).write_text(json.dumps(LORA_CONFIG | {"lora_alpha": 64}))
        assert identify_adapter(pinned.folder).identity == pinned.identity == expected()
        shutil.rmtree(adapter)
        assert identify_adapter(pinned.folder).identity == pinned.identity

    def test_a_write_through_a_map_during_the_copy_is_in_both_or_in_neither(
        self, adapter: Path, into: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A tenant's dirty memory map changes bytes without a trace: the identity is the copy's, whatever it is."""
        other = flipped(LORA, next(iter(LORA)), 5)
        with (adapter / TENSORS).open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 0)
        mapped[:] = packed(LORA)
        copy = module._copy

        for when in ("before", "after"):
            mapped[:] = packed(LORA)

            def swap(source: Any, target: Path, when: str = when) -> None:
                if when == "before" and target.name == TENSORS:
                    mapped[:] = packed(other)
                copy(source, target)
                if when == "after" and target.name == TENSORS:
                    mapped[:] = packed(other)

            monkeypatch.setattr(module, "_copy", swap)
            pinned = pin_adapter(adapter, into)
            assert pinned.identity == expected(other if when == "before" else LORA)
            assert (pinned.folder / TENSORS).read_bytes() == packed(other if when == "before" else LORA)

    SWAPS: ClassVar[dict[str, Callable[[Path], object]]] = {
        "config replaced": lambda f: replace_file(f / CONFIG, b'{"r":2}'),
        "config written": lambda f: overwrite(f / CONFIG, b'{"r":2}'),
        "tensors replaced": lambda f: replace_file(f / TENSORS, packed(flipped(LORA, next(iter(LORA))))),
        "tensors written": lambda f: overwrite(f / TENSORS, packed(flipped(LORA, next(iter(LORA))))),
        "folder moved": lambda f: (f.rename(f.with_name("aside")), write_adapter(f)),
        "folder linked": lambda f: (f.rename(f.with_name("aside")), write_adapter(f.with_name("b")), f.symlink_to("b")),
        "file added": lambda f: (f / "x").touch(),
        "file removed": lambda f: (f / CONFIG).unlink(),
    }

    @pytest.mark.parametrize("at", [CONFIG, TENSORS])
    @pytest.mark.parametrize("swap", SWAPS)
    def test_a_swap_during_the_copy_is_seen(
        self, adapter: Path, into: Path, monkeypatch: pytest.MonkeyPatch, swap: str, at: str
    ) -> None:
        wait_until_settled()
        pin_adapter(adapter, into)
        copy = module._copy

        def after(source: Any, target: Path) -> None:
            copy(source, target)
            if target.name == at:
                self.SWAPS[swap](adapter)

        before = list(into.iterdir())
        monkeypatch.setattr(module, "_copy", after)
        with pytest.raises((ChangedContentError, UnreadableContentError)):
            pin_adapter(adapter, into)
        assert list(into.iterdir()) == before

    @pytest.mark.parametrize("swap", SWAPS)
    def test_changes_to_the_original_show(self, adapter: Path, into: Path, swap: str) -> None:
        wait_until_settled()
        pinned = pin_adapter(adapter, into)
        assert sources_unchanged(pinned)
        identify_adapter(adapter)
        assert sources_unchanged(pinned)
        self.SWAPS[swap](adapter)
        assert not sources_unchanged(pinned)

    def test_a_young_original_asks_for_a_new_pin(self, adapter: Path, into: Path) -> None:
        (adapter / CONFIG).touch()
        young = pin_adapter(adapter, into)
        assert not young.settled
        assert not sources_unchanged(young)
        wait_until_settled()
        assert not sources_unchanged(young)
        assert sources_unchanged(pin_adapter(adapter, into))

    def test_a_removed_original_has_changed(self, adapter: Path, into: Path) -> None:
        wait_until_settled()
        pinned = pin_adapter(adapter, into)
        shutil.rmtree(adapter)
        assert not sources_unchanged(pinned)

    @pytest.mark.parametrize("mode", [0o770, 0o707, 0o720, 0o777])
    def test_into_must_be_private(self, adapter: Path, into: Path, mode: int) -> None:
        pin_adapter(adapter, into)
        into.chmod(mode)
        with pytest.raises(KvprovError, match="Other users may write") as caught:
            pin_adapter(adapter, into)
        assert "chmod" in caught.value.advice

    def test_into_must_be_a_folder_of_this_user(
        self, adapter: Path, into: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "link").symlink_to(into)
        (tmp_path / "file").touch()
        for bad, reason in (("link", "not a folder"), ("file", "not a folder"), ("missing", "does not exist")):
            with pytest.raises(KvprovError, match=reason):
                pin_adapter(adapter, tmp_path / bad)
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        with pytest.raises(KvprovError, match=f"belongs to user {user}"):
            pin_adapter(adapter, into)

    def test_a_full_disk(self, adapter: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open

        def full(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            if flags & os.O_CREAT:
                raise OSError(28, "No space left on device")
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", full)
        with pytest.raises(KvprovError, match="No space left") as caught:
            pin_adapter(adapter, into)
        assert caught.value.advice
        assert list(into.iterdir()) == []

    def test_no_descriptor_stays_open(self, adapter: Path, into: Path) -> None:
        before = open_descriptors()
        pin_adapter(adapter, into)
        (adapter / CONFIG).unlink()
        with pytest.raises(UnreadableContentError):
            pin_adapter(adapter, into)
        assert open_descriptors() == before
