from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvprov
from kvprov.contract.dimensions import BUILT_IN
from kvprov.doctor import Level, diagnose, engines
from kvprov.settings import NAMES
from tests.cli.support import install, process, run

SECRET = "correct-horse-battery-staple"
SECTIONS = ["versions", "settings", "secret", "dimensions", "cache", "ledger", "engines", "plugins", "vllm", "sglang"]

EXTENSION = """
from kvprov.contract import Dimension, Half, Kind, Known
from kvprov.extensions import Extension
rope = Extension(Dimension("acme.rope", Half.WORKER, Kind.COMPUTATIONAL, "why"), lambda config: Known("acme:1"))
"""


def doctor(*args: str, exit_code: int = 0) -> dict[str, Any]:
    result = run("doctor", "--json", *(args or ["--no-engine"]))
    assert result.stderr == ""
    assert result.exit_code == exit_code, result.stdout
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["safe"] == (exit_code == 0)
    return found


def unsafe(found: dict[str, Any]) -> list[dict[str, str]]:
    return [finding for finding in found["findings"] if finding["level"] == "unsafe"]


def only_unsafe(check: str) -> dict[str, str]:
    """Run the doctor, and return the one unsafe finding that there must be."""
    [finding] = unsafe(doctor(exit_code=1))
    assert finding["check"] == check
    return finding


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on sys.path for packages that only this test has installed."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def test_the_form_of_the_json() -> None:
    found = doctor()
    assert list(found) == ["safe", "findings", *SECTIONS]
    assert found["versions"]["kvprov"] == kvprov.__version__
    assert list(found["settings"]) == list(NAMES)
    for setting in found["settings"].values():
        assert setting.keys() == {"value", "set", "refused"}
    assert found["settings"]["KVPROV_MODE"] == {"value": "enforce", "set": False, "refused": False}
    assert found["settings"]["KVPROV_DIGEST_BITS"] == {"value": 256, "set": False, "refused": False}
    assert found["settings"]["KVPROV_CACHE_DIR"]["set"]
    assert found["secret"] == {"source": None, "key_id": None, "file_mode": None}
    assert [d["name"] for d in found["dimensions"]["bound"]] == [d.name for d in BUILT_IN]
    assert found["dimensions"]["withheld"] == []
    assert found["cache"]["state"] == "not created yet"
    assert found["ledger"] == {"location": None, "state": "off"}
    assert (found["vllm"], found["sglang"]) == (None, None)
    for plugin in found["plugins"]:
        assert plugin.keys() == {"group", "name", "value", "kvprov", "allowed", "loads"}
    [ours] = [plugin for plugin in found["plugins"] if plugin["kvprov"] and plugin["group"] == "vllm.general_plugins"]
    assert (ours["name"], ours["allowed"], ours["loads"]) == ("kvprov", True, True)
    for finding in found["findings"]:
        assert finding.keys() == {"check", "level", "message", "advice"}
        assert finding["message"].endswith(".")


def test_no_secret_is_a_warning() -> None:
    [finding] = doctor()["findings"]
    assert (finding["check"], finding["level"]) == ("secret", "warning")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    doctor()
    assert not (tmp_path / "cache").exists()


def test_off_is_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_MODE", "off")
    monkeypatch.setenv("KVPROV_DIGEST_BITS", "128")
    only_unsafe("KVPROV_MODE")
    # Nothing that holds of bound keys only.
    [finding] = doctor(exit_code=1)["findings"]
    assert "without regard to provenance" in finding["message"]


def test_withheld_dimensions_are_unsafe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_UNSAFE_WITHHOLD", "adapter, weights")
    found = doctor(exit_code=1)
    assert [f["check"] for f in unsafe(found)] == ["KVPROV_UNSAFE_WITHHOLD"] * 2
    assert found["dimensions"]["withheld"] == ["adapter", "weights"]
    assert not {"adapter", "weights"} & {d["name"] for d in found["dimensions"]["bound"]}


def test_withholding_what_is_not_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_UNSAFE_WITHHOLD", "adaptor")
    finding = only_unsafe("KVPROV_UNSAFE_WITHHOLD")
    assert "adaptor, which is no dimension" in finding["message"]
    assert "adapter" in finding["advice"]
    found = doctor(exit_code=1)["dimensions"]
    assert [d["name"] for d in found["bound"]] == [d.name for d in BUILT_IN]
    assert found["withheld"] == []
    monkeypatch.setenv("KVPROV_UNSAFE_WITHHOLD", "adaptor,weights")
    found = doctor(exit_code=1)["dimensions"]
    assert len(found["bound"]) == len(BUILT_IN) - 1
    assert found["withheld"] == ["weights"]


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("KVPROV_MODE", "of", "KVPROV_MODE cannot be used: 'of' is neither enforce nor off."),
        ("KVPROV_DIGEST_BITS", "64", "KVPROV_DIGEST_BITS cannot be used: 64 is neither 256 nor 128."),
        ("KVPROV_DIGEST_BITS", "many", "KVPROV_DIGEST_BITS cannot be used: 'many' is neither 256 nor 128."),
        ("KVPROV_REQUIRE_SECRET", "perhaps", "'perhaps' is neither yes nor no."),
        ("KVPROV_UNSAFE_WITHHOLD", "Not A Name", "Not A Name"),
        ("KVPROV_WEIGHTS_LABEL", "no slash", "no slash"),
        ("KVPROV_MOOD", "off", "KVPROV_MOOD is not a setting."),
    ],
)
def test_settings_that_cannot_be_used(name: str, value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    finding = only_unsafe(name)
    assert says in finding["message"]
    assert finding["advice"]
    if name in NAMES:
        assert doctor(exit_code=1)["settings"][name] == {"value": value, "set": True, "refused": True}
        shown = run("doctor", "--no-engine").stdout
        assert re.search(rf"{name} +{value} +REFUSED", shown)
    assert "kvprov doctor" not in finding["advice"], "that is where the reader is"


def test_all_settings_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_MODE", "x")
    monkeypatch.setenv("KVPROV_DIGEST_BITS", "x")
    monkeypatch.setenv("KVPROV_MOOD", "x")
    found = doctor(exit_code=1)
    assert [f["check"] for f in unsafe(found)] == ["KVPROV_DIGEST_BITS", "KVPROV_MODE", "KVPROV_MOOD"]
    assert found["settings"]["KVPROV_MODE"] == {"value": "x", "set": True, "refused": True}


def test_a_label_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_WEIGHTS_LABEL", "run-7/3")
    assert doctor()["settings"]["KVPROV_WEIGHTS_LABEL"] == {"value": "run-7/3", "set": True, "refused": False}


def test_short_digests_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_DIGEST_BITS", "128")
    assert "KVPROV_DIGEST_BITS" in [finding["check"] for finding in doctor()["findings"]]


def write_secret(folder: Path, text: str = SECRET, mode: int = 0o600) -> Path:
    file = folder / "secret"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_secret_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_SECRET_FILE", str(write_secret(tmp_path)))
    monkeypatch.setenv("KVPROV_SECRET_KEY_ID", "fleet-2")
    monkeypatch.setenv("KVPROV_REQUIRE_SECRET", "yes")
    found = doctor()
    assert found["secret"] == {"source": "file", "key_id": "fleet-2", "file_mode": "0600"}
    assert found["findings"] == []


def test_a_secret_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_SECRET", SECRET)
    found = doctor()
    assert found["secret"]["source"] == "environment"
    assert len(found["secret"]["key_id"]) == 8
    assert found["settings"]["KVPROV_SECRET"] == {"value": "(set)", "set": True, "refused": False}


@pytest.mark.parametrize("case", ["good", "short", "open", "missing", "both", "named"])
def test_a_secret_is_never_shown(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = SECRET[:12] if case == "short" else SECRET
    monkeypatch.setenv("KVPROV_SECRET", secret)
    if case in {"open", "missing", "both"}:
        file = write_secret(tmp_path, mode=0o644 if case == "open" else 0o600)
        if case == "missing":
            file.unlink()
        monkeypatch.setenv("KVPROV_SECRET_FILE", str(file))
        if case != "both":
            monkeypatch.delenv("KVPROV_SECRET")
    if case == "named":
        monkeypatch.setenv("KVPROV_SECRET_KEY_ID", "Not Allowed")
    for args in (["--json"], []):
        result = run("doctor", "--no-engine", *args)
        assert result.exit_code == (0 if case == "good" else 1)
        assert secret not in result.output
    if case != "good":
        only_unsafe("secret")
        assert doctor(exit_code=1)["secret"]["source"] == "refused"


def test_a_key_id_without_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_SECRET_KEY_ID", "fleet-2")
    only_unsafe("secret")
    assert doctor(exit_code=1)["secret"]["source"] is None


def test_a_required_secret_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_REQUIRE_SECRET", "1")
    assert "engines do not start" in only_unsafe("secret")["message"]
    monkeypatch.setenv("KVPROV_MODE", "off")
    assert "start all the same" in str(unsafe(doctor(exit_code=1)))


@pytest.mark.parametrize("value", ["", "other", "other, kvprov"])
def test_a_plugin_that_vllm_filters_out(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # vLLM takes the spaces of a list for parts of the names.
    monkeypatch.setenv("VLLM_PLUGINS", value)
    assert "filters kvprov's plugin out" in only_unsafe("VLLM_PLUGINS")["message"]


def test_a_plugin_that_vllm_lets_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other,kvprov")
    found = doctor()
    assert {plugin["allowed"] for plugin in found["plugins"] if plugin["kvprov"]} == {True}


def only_points(monkeypatch: pytest.MonkeyPatch, *points: Any) -> None:
    def entry_points(group: str) -> list[Any]:
        return [point for point in points if point.group == group]

    monkeypatch.setattr(engines, "entry_points", entry_points)


def point(load: Any, group: str = "vllm.general_plugins") -> Any:
    return SimpleNamespace(name="kvprov", value="kvprov.engines.x:register", group=group, load=load)


def only_engines(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    monkeypatch.setattr(engines, "_versions", lambda: versions)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_without_the_plugin(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, **{engine: "9.9"})
    only_points(monkeypatch)
    assert "has no plugin" in only_unsafe("plugins")["message"]


def test_no_engine_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch)
    only_points(monkeypatch)
    found = doctor("--json")
    assert (found["engines"], found["plugins"], found["vllm"], found["sglang"]) == ({}, [], None, None)


def test_a_plugin_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        raise SyntaxError("half an installation")

    only_points(monkeypatch, point(load))
    finding = only_unsafe("plugins")
    assert "SyntaxError: half an installation" in finding["message"]


def test_a_plugin_that_is_no_function(monkeypatch: pytest.MonkeyPatch) -> None:
    only_points(monkeypatch, point(lambda: 7))
    assert "no function" in only_unsafe("plugins")["message"]


@pytest.mark.parametrize(("value", "passes"), [("", True), ("a, kvprov", True), ("a", False)])
def test_sglang_reads_its_own_variable(value: str, passes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    only_engines(monkeypatch, sglang="9.9")
    only_points(monkeypatch, point(lambda: print, "sglang.srt.plugins"))
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    if passes:
        doctor()
    else:
        only_unsafe("SGLANG_PLUGINS")


def test_engines_are_found_without_an_import(site: Path) -> None:
    install(site, "lmcache", lmcache="raise RuntimeError('imported')")
    install(site, "mooncake-transfer-engine")
    found = doctor()["engines"]
    assert (found["lmcache"], found["mooncake-transfer-engine"]) == ("9.9", "9.9")
    shown = run("doctor", "--no-engine").stdout
    assert re.search(r"LMCache +9\.9 +package lmcache\n", shown)
    assert re.search(r"Mooncake +9\.9 +package mooncake-transfer-engine\n", shown)


def test_an_extension_is_listed(site: Path) -> None:
    install(site, "acme", {"kvprov.dimensions": ["rope = acme_good:rope"]}, acme_good=EXTENSION)
    [found] = [d for d in doctor()["dimensions"]["bound"] if not d["built_in"]]
    assert found == {"name": "acme.rope", "half": "worker", "kind": "computational", "built_in": False}


@pytest.mark.parametrize(
    ("module", "source", "says"),
    [
        ("acme_raises", "raise RuntimeError('half an installation')", "half an installation"),
        ("acme_imports", "import no_such_module", "no_such_module"),
        ("acme_lacks", "", "rope"),
        ("acme_other", "rope = 7", "not a kvprov Extension"),
        ("acme_plain", EXTENSION.replace("acme.rope", "rope"), "no prefix"),
    ],
)
def test_a_broken_extension_is_unsafe(module: str, source: str, says: str, site: Path) -> None:
    install(site, "acme", {"kvprov.dimensions": [f"rope = {module}:rope"]}, **{module: source})
    assert says in only_unsafe("dimensions")["message"]


def test_a_cache_that_others_may_write_to(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "digests"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    found = doctor()
    assert found["cache"] == {"folder": str(folder), "state": "off", "files": 0}
    assert ("cache", "warning") in [(finding["check"], finding["level"]) for finding in found["findings"]]
    folder.chmod(0o700)
    (folder / "entry.json").touch()
    (folder / "lock-00").touch()
    assert doctor()["cache"] == {"folder": str(folder), "state": "usable", "files": 1}


def test_a_cache_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "digests").symlink_to(tmp_path)
    assert doctor()["cache"]["state"] == "off"


def answer(
    monkeypatch: pytest.MonkeyPatch,
    stdout: object = "",
    returncode: int = 0,
    stderr: bytes = b"",
    engine: str = "vllm",
) -> None:
    """Let the process that imports the engine, the only one that is installed, answer so."""
    raw = stdout.encode() if isinstance(stdout, str) else json.dumps(stdout).encode()

    def run_process(command: list[str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        assert command[-2:] == ["-m", f"kvprov.engines.{engine}.inspect"]
        return subprocess.CompletedProcess(command, returncode, raw, stderr)

    monkeypatch.setattr(subprocess, "run", run_process)
    only_engines(monkeypatch, **{engine: "9.9"})


WAYS = {"vllm": "connectors", "sglang": "paths"}
NAMES_OF_ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}


def inspected(error: str = "", engine: str = "vllm") -> dict[str, Any]:
    seam = {"module": "core.hashes", "name": "hash_blocks", "error": error, "advice": error and "Install another."}
    bound = {"name": "Good", "bound": True, "treatment": "bound by view", "reason": "it hashes", "strength": "128 bits"}
    refused = {"name": "Bad", "bound": False, "treatment": "refused", "reason": "not known", "strength": ""}
    return {"version": "9.9", "seams": [seam], WAYS[engine]: [bound, refused]}


@pytest.mark.parametrize("engine", sorted(WAYS))
def test_an_engine_with_every_seam(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, inspected(engine=engine), engine=engine)
    found = doctor("--json")
    assert found[engine] == inspected(engine=engine)
    assert [found[other] for other in WAYS if other != engine] == [None]
    shown = run("doctor").stdout
    assert f"{NAMES_OF_ENGINES[engine]} 9.9: 1 of 1 seams" in shown
    assert shown.index("Good") < shown.index("refused") < shown.index("Bad")


@pytest.mark.parametrize("engine", sorted(WAYS))
def test_an_engine_without_a_seam_is_unsafe(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, inspected("9.9 has no core.hashes.hash_blocks as kvprov needs it.", engine), engine=engine)
    found = doctor("--json", exit_code=1)
    assert [finding["check"] for finding in unsafe(found)] == [engine]
    shown = run("doctor").stdout
    assert "0 of 1 seams" in shown
    assert "hash_blocks" in shown


def test_a_plugin_that_sglang_filters_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLUGINS", "other")
    assert "filters kvprov's plugin out" in only_unsafe("SGLANG_PLUGINS")["message"]
    # SGLang takes an empty list for none, and drops spaces.
    for allowed in ("", "other, kvprov"):
        monkeypatch.setenv("SGLANG_PLUGINS", allowed)
        assert unsafe(doctor()) == []


@pytest.mark.parametrize(
    ("stdout", "returncode", "stderr", "says"),
    [
        ("", 1, b"Traceback\nImportError: libcuda.so.1\n", "libcuda.so.1"),
        ("", -9, b"", "exit code -9"),
        ("INFO not json", 0, b"", "no JSON"),
    ],
)
def test_an_engine_that_cannot_be_asked(
    stdout: str, returncode: int, stderr: bytes, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, stdout, returncode, stderr)
    found = doctor("--json", exit_code=3)
    assert [(f["check"], f["level"]) for f in found["findings"]] == [("vllm", "failed"), ("secret", "warning")]
    assert says in found["findings"][0]["message"]
    assert run("doctor").exit_code == 3
    # What is unsafe is so whether the engine answers or not.
    monkeypatch.setenv("KVPROV_MODE", "off")
    doctor("--json", exit_code=1)


def test_an_engine_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_process(command: list[str], **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    only_engines(monkeypatch, vllm="9.9")
    monkeypatch.setattr(subprocess, "run", run_process)
    assert "longer than" in doctor("--json", exit_code=3)["findings"][0]["message"]


def test_findings_are_sorted_by_how_bad_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, "", 1)
    monkeypatch.setenv("VLLM_PLUGINS", "")
    assert [finding.level for finding in diagnose().findings] == [Level.UNSAFE, Level.FAILED, Level.WARNING]


def test_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPROV_MODE", "off")
    monkeypatch.setenv("VLLM_PLUGINS", "")
    result = run("doctor", "--no-engine")
    assert (result.exit_code, result.stderr) == (1, "")
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)
    assert lines[-1] == "Unsafe."
    assert "FILTERED OUT" in result.stdout
    assert sum(line.startswith("UNSAFE") for line in lines) == 2
    monkeypatch.delenv("KVPROV_MODE")
    monkeypatch.delenv("VLLM_PLUGINS")
    assert run("doctor", "--no-engine").stdout.splitlines()[-1] == "Nothing unsafe was found."


def test_settings_are_no_markup(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVPROV_CACHE_DIR", str(tmp_path / "[red]x[/red]\x1b[2J"))
    shown = run("doctor", "--no-engine").stdout.replace("\n", "").replace(" ", "")
    assert "[red]x[/red]" in shown
    assert "\x1b" not in shown


@pytest.mark.engine
def test_the_real_vllm() -> None:
    done = process("doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert found["safe"]
    vllm = found["vllm"]
    assert len(vllm["seams"]) > 10
    assert not [seam for seam in vllm["seams"] if seam["error"]]
    connectors = {connector["name"]: connector for connector in vllm["connectors"]}
    assert connectors["ExampleConnector"]["bound"]
    assert connectors["ExampleConnector"]["strength"]
    assert not connectors["NixlConnector"]["bound"]
    assert all(connector["reason"] for connector in connectors.values())
