"""Each check of `distcse.doctor` where all is well, and where it is not: with real folders, sockets, limits and servers."""

from __future__ import annotations

import json
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from distcse import host
from distcse.doctor import main
from distcse.health import machine, ray_cluster, sources, storage
from distcse.health.check import Check
from distcse.recipe import EndpointSection, Recipe


def only(found: list[Check]) -> Check:
    (check,) = found
    return check


def test_python_torch_and_ray_are_what_they_should_be() -> None:
    found = [*machine.python(), *machine.torch_and_transformers(), *ray_cluster.driver_version()]
    assert [check.name for check in found] == ["python", "torch", "transformers", "ray"]
    assert all(check.verdict == "ok" for check in found)


def test_processors_and_gpus_are_told() -> None:
    assert only(machine.processors()).verdict in ("ok", "warn")
    assert only(machine.gpus()).verdict in ("ok", "fail")


def test_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert "available" in only(machine.memory()).found
    little = tmp_path / "meminfo"
    little.write_text("MemTotal:       8000000 kB\nMemAvailable:     500000 kB\n")
    assert only(machine.memory(little)).verdict == "fail"
    little.write_text("MemTotal:       8000000 kB\nMemAvailable:    2000000 kB\n")
    assert only(machine.memory(little)).verdict == "warn"


def test_a_container_has_what_it_was_given(tmp_path: Path) -> None:
    much = tmp_path / "meminfo"
    much.write_text("MemTotal:       256000000 kB\nMemAvailable:     200000000 kB\n")
    new, old = tmp_path / "new", tmp_path / "old"
    for file, text in (
        (new / "memory.max", str(8 * 2**30)),
        (new / "memory.current", str(6 * 2**30)),
        (new / "memory.stat", f"anon 1\ninactive_file {2**30}\n"),
        (new / "cpu.max", "50000 100000"),
        (old / "memory" / "memory.limit_in_bytes", str(8 * 2**30)),
        (old / "memory" / "memory.usage_in_bytes", str(6 * 2**30)),
        (old / "memory" / "memory.stat", f"inactive_file 7\ntotal_inactive_file {2**30}\n"),
        (old / "cpu" / "cpu.cfs_quota_us", "50000"),
        (old / "cpu" / "cpu.cfs_period_us", "100000"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for cgroup in (new, old):
        found = only(machine.memory(much, cgroup))
        assert found.verdict == "warn" and "3.0 GiB of 8.0 GiB" in found.found
        assert host.cpus(cgroup) == 1
    (new / "memory.max").write_text("max\n")
    (new / "cpu.max").write_text("max 100000\n")
    assert host.memory(new) == host.memory(tmp_path / "none") and host.cpus(new) == host.cpus(tmp_path / "none")


def test_shared_memory_has_a_size(tmp_path: Path) -> None:
    assert only(machine.shared_memory(tmp_path)).found.endswith(str(tmp_path))
    assert only(machine.shared_memory(tmp_path / "none")).verdict == "warn"
    without_room = only(machine.shared_memory(Path("/proc")))
    assert without_room.verdict == "fail" and "--shm-size" in without_room.fix


@pytest.mark.parametrize(("limit", "verdict"), [(256, "fail"), (2048, "warn")])
def test_a_tiny_limit_of_files_is_seen(limit: int, verdict: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        found = only(machine.open_files())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found.verdict == verdict and found.fix.startswith("ulimit -n")


def test_a_folder_is_written_to_and_left_as_it_was(tmp_path: Path) -> None:
    assert only(storage.folder("storage.runs", tmp_path, good=1)).verdict == "ok"
    new = tmp_path / "a" / "b"
    found = only(storage.folder("storage.runs", new, good=1))
    assert found.verdict == "ok" and "to be made in" in found.found
    assert list(tmp_path.iterdir()) == []
    assert only(storage.folder("storage.runs", tmp_path, good=1e18)).verdict == "warn"


def test_a_folder_that_takes_no_files_is_refused(tmp_path: Path) -> None:
    found = only(storage.folder("storage.cache", Path("/proc/self/cache")))
    assert found.verdict == "fail" and "write storage.cache=FOLDER" in found.fix
    file = tmp_path / "file"
    file.write_text("")
    assert "is no folder" in only(storage.folder("storage.runs", file / "runs")).found


def test_a_folder_that_cannot_be_looked_at_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **how: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refuse)
    found = only(storage.folder("storage.runs", tmp_path / "closed" / "runs"))
    assert found.verdict == "fail" and "Permission denied" in found.found and "storage.runs=FOLDER" in found.fix


def test_storage_that_takes_nothing_away_either_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a read-only file system refuses to remove what is not there."""

    def refuse(*given: object, **how: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    found = only(storage.folder("storage.runs", tmp_path))
    assert found.verdict == "fail" and "Read-only file system" in found.found


def test_a_teacher_of_ones_own_is_made(recipe_with: Callable[..., Recipe]) -> None:
    made = recipe_with("teachers.encoders.0={backbone: mine, class_path: 'tests.unit.test_doctor:Mine'}")
    assert {check.verdict for check in sources.models(made)} == {"ok"}
    lacking = recipe_with("teachers.encoders.0={backbone: mine, class_path: 'tests.unit.test_doctor:Nobody'}")
    (told,) = [check for check in sources.models(lacking) if check.verdict == "fail"]
    assert "Nobody" in told.found and "extending.md" in told.fix


class Mine:
    fingerprint = "1"

    def encode(self, texts: Sequence[str], **how: object) -> np.ndarray:
        return np.ones((len(texts), 2), dtype=np.float32)


def test_models_are_looked_for(tiny: Callable[..., Path], tmp_path: Path) -> None:
    assert only(sources.model(str(tiny("bert")))).verdict == "ok"
    assert only(sources.model("/nowhere")).verdict == "fail"
    offline = only(sources.model("nobody/has-this"))
    assert offline.verdict == "fail" and "HF_HUB_OFFLINE is set" in offline.found
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "model.safetensors").write_bytes((tiny("bert") / "model.safetensors").read_bytes())
    assert "has no tokenizer" in only(sources.model(str(bare))).found
    (bare / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    (bare / "config.json").write_bytes((tiny("bert") / "config.json").read_bytes())
    assert "has a tokenizer without words" in only(sources.model(str(bare))).found
    (bare / "tokenizer.json").write_bytes((tiny("bert") / "tokenizer.json").read_bytes())
    assert only(sources.model(str(bare))).verdict == "ok"
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "pytorch_model.bin").write_bytes(b"")
    assert "no safetensors" in only(sources.model(str(pickled))).found


@pytest.mark.slow
def test_deepspeed_is_imported_where_it_is_wanted(recipe_with: Callable[..., Recipe]) -> None:
    pytest.importorskip("deepspeed")
    found = only(machine.deepspeed(recipe_with("training.engine=deepspeed")))
    assert found.verdict == "ok" and "no op is compiled" in found.found
    assert only(machine.deepspeed(recipe_with())).found.startswith("not asked for")


def test_text_is_looked_for(recipe_with: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = recipe_with()
    assert only(sources.text(recipe)).verdict == "ok"
    assert [check.verdict for check in sources.text(recipe_with("evaluation.data=/nowhere"))] == ["ok", "fail"]
    (tmp_path / "corpus.txt").unlink()
    assert only(sources.text(recipe)).verdict == "fail"


@pytest.fixture
def server() -> Iterator[Callable[[int], str]]:
    """Starts HTTP servers that give one status; tells their base address."""
    running: list[HTTPServer] = []

    def start(status: int) -> str:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        found = HTTPServer(("127.0.0.1", 0), Answer)
        running.append(found)
        threading.Thread(target=found.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{found.server_port}/v1"

    yield start
    for one in running:
        one.shutdown()
        one.server_close()


@pytest.mark.parametrize(("status", "verdict"), [(200, "ok"), (401, "fail"), (503, "warn")])
def test_endpoints_are_asked(status: int, verdict: str, server: Callable[[int], str]) -> None:
    assert only(sources.endpoint("teacher", EndpointSection(url=server(status)))).verdict == verdict


def test_an_endpoint_that_is_not_there_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nothing answers
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        assert only(sources.endpoint("teacher", EndpointSection(url=url))).verdict == "fail"


@pytest.mark.parametrize(("host", "verdict"), [("127.0.0.1", "ok"), ("0.0.0.0", "fail")])
def test_a_port_beyond_loopback_is_seen(host: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with socket.socket() as listening:
        listening.bind((host, 0))
        listening.listen()
        port = listening.getsockname()[1]
        found = only(ray_cluster.exposed_ports([port]))
        assert found.verdict == verdict and str(port) in found.found
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        assert only(ray_cluster.exposed_ports([port])).verdict == ("warn" if verdict == "fail" else "ok")
    assert only(ray_cluster.exposed_ports([port])).found.startswith("no dashboard")


def test_the_token_is_asked_for_and_nobody_elses(tmp_path: Path) -> None:
    assert only(ray_cluster.token({}, tmp_path)).verdict == "ok"
    assert only(ray_cluster.token({"RAY_AUTH_MODE": "disabled"}, tmp_path)).verdict == "warn"
    joined = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "10.0.0.1:6379"}
    assert only(ray_cluster.token(joined, tmp_path)).verdict == "fail"
    assert only(ray_cluster.token({**joined, "RAY_AUTH_TOKEN": "abc"}, tmp_path)).verdict == "ok"
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("abc")
    file.chmod(0o644)
    assert [check.verdict for check in ray_cluster.token(joined, tmp_path)] == ["ok", "warn"]
    file.chmod(0o600)
    assert only(ray_cluster.token(joined, tmp_path)).verdict == "ok"


def test_without_an_address_no_cluster_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert only(ray_cluster.cluster()).found.startswith("none")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert f"export RAY_ADDRESS={address}" in only(ray_cluster.cluster()).found
    assert only(ray_cluster.cluster()).found.startswith("none")  # it ended, and left its file


def test_the_door_tells_and_counts(
    recipe_with: Callable[..., Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    recipe_with()
    before = sorted(tmp_path.rglob("*"))
    file = str(tmp_path / "recipe.yaml")
    status = main([file])
    told = capsys.readouterr().out
    failed = [line for line in told.splitlines() if line.startswith("fail")]
    assert status == bool(failed) and "storage.cache" in told and "python" in told
    assert "not asked for" in told  # training.engine is plain: DeepSpeed is not imported
    assert sorted(tmp_path.rglob("*")) == before  # nothing was left behind
    assert main([file, "student.backbone=/nowhere", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    assert any(check["verdict"] == "fail" and "/nowhere" in check["found"] and check["fix"] for check in checks)


def test_a_mistake_in_the_recipe_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["minilm-3lyer"]) == 2
    assert "did you mean" in capsys.readouterr().err
