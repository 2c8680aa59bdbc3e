"""Each check of `distcse doctor`, passing and failing, with real folders, sockets, limits and servers."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from unittest.mock import Mock

import pytest

from distcse.checks import Check, answers
from distcse.cluster import health
from distcse.devices import host
from distcse.errors import StorageWriteError
from distcse.preflight import machine
from distcse.preflight.models import check_model
from distcse.recipe import EncoderSection, EndpointSection, Recipe, TeacherSection
from distcse.runs.distillation.precompute import require_space
from distcse.teachers.kinds import kind_of
from tests.commands import command
from tests.endpoints import Reply, open_endpoint
from tests.failures import fails_with

main = command("doctor")


def the_only(found: list[Check]) -> Check:
    (check,) = found
    return check


def test_python_torch_transformers_and_ray_are_supported() -> None:
    found = list(islice(health.diagnose(), 4))
    assert [check.name for check in found] == ["python", "torch", "transformers", "ray"]
    assert all(check.verdict == "ok" for check in found)


@pytest.mark.parametrize(
    ("requirement", "releases"),
    [("torch>=99", [(99, 0)]), ("torch<1", [(0, 1), (1, 0)]), ("no-such-package", [(0, 0)])],
)
def test_a_package_that_is_too_old_too_new_or_missing_fails(requirement: str, releases: list[tuple[int, int]]) -> None:
    found = machine.check_package(requirement, *releases)
    assert found.verdict == "fail" and found.fix == f'pip install "{requirement}"'


def test_a_required_gpu_is_checked_where_the_run_trains(recipe_with: Callable[..., Recipe]) -> None:
    with host.gpus_hidden():
        found = machine.check_gpus(recipe_with("resources.gpu=required"))
        assert found.verdict == "fail" and "resources.gpu=auto" in found.fix
        for overrides in ((), ("resources.gpu=required", "training.workers=1")):
            assert "required" not in machine.check_gpus(recipe_with(*overrides)).line


def test_memory_is_the_kernels_available_memory(tmp_path: Path) -> None:
    assert "available" in machine.check_memory().found
    for available, verdict in ((500_000, "fail"), (2_000_000, "warn")):
        (tmp_path / "meminfo").write_text(f"MemTotal:       8000000 kB\nMemAvailable:     {available} kB\n")
        assert machine.check_memory(tmp_path / "meminfo").verdict == verdict


def test_a_container_has_the_resources_of_its_cgroup(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       256000000 kB\nMemAvailable:     200000000 kB\n")
    v2, v1 = tmp_path / "new", tmp_path / "old"
    for file, text in (
        (v2 / "memory.max", str(8 * 2**30)),
        (v2 / "memory.current", str(6 * 2**30)),
        (v2 / "memory.stat", f"anon 1\ninactive_file {2**30}\n"),
        (v2 / "cpu.max", "50000 100000"),
        (v1 / "memory" / "memory.limit_in_bytes", str(8 * 2**30)),
        (v1 / "memory" / "memory.usage_in_bytes", str(6 * 2**30)),
        (v1 / "memory" / "memory.stat", f"inactive_file 7\ntotal_inactive_file {2**30}\n"),
        (v1 / "cpu" / "cpu.cfs_quota_us", "50000"),
        (v1 / "cpu" / "cpu.cfs_period_us", "100000"),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    for cgroup in (v2, v1):
        found = machine.check_memory(meminfo, cgroup)
        assert found.verdict == "warn" and "3.0 GiB of 8.0 GiB" in found.found
        assert host.cpus(cgroup) == 1
    (v2 / "memory.max").write_text("max\n")
    (v2 / "cpu.max").write_text("max 100000\n")
    assert host.memory(v2) == host.memory(tmp_path / "none") and host.cpus(v2) == host.cpus(tmp_path / "none")


def test_a_folder_is_tested_and_left_unchanged(tmp_path: Path) -> None:
    assert machine.check_folder("storage.runs", tmp_path, good_free=1).verdict == "ok"
    missing = tmp_path / "a" / "b"
    found = machine.check_folder("storage.runs", missing, good_free=1)
    assert found.verdict == "ok" and f"{missing} (to be created in {tmp_path})" in found.found
    assert list(tmp_path.iterdir()) == []
    assert machine.check_folder("storage.runs", tmp_path, good_free=1e18).verdict == "warn"


def test_a_folder_that_cannot_be_used_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system refuses to delete a missing file too."""

    def found_of(folder: Path) -> str:
        found = machine.check_folder("storage.runs", folder)
        assert found.verdict == "fail" and "storage.runs=FOLDER" in found.fix
        return found.found

    (file := tmp_path / "file").write_text("")
    found_of(Path("/proc/self/cache"))
    assert str(file) in found_of(file / "runs")
    with monkeypatch.context() as patch:
        for opener in ("builtins.open", "pathlib.Path.unlink"):
            patch.setattr(opener, Mock(side_effect=OSError(30, "Read-only file system")))
        assert "Read-only file system" in found_of(tmp_path)
    monkeypatch.setattr(Path, "exists", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert "Permission denied" in found_of(tmp_path / "closed" / "runs")


def test_models_are_checked(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """A folder of weights fails until it has a tokenizer."""

    def failure_of(name: str | Path) -> str:
        check = the_only([*answers([("model", lambda: check_model(EncoderSection(backbone=str(name))))])])
        return check.found if check.verdict == "fail" else ""

    bare, pickled = tmp_path / "bare", tmp_path / "pickled"
    for folder, weights in ((bare, "model.safetensors"), (pickled, "pytorch_model.bin")):
        folder.mkdir()
        (folder / weights).write_bytes((tiny("bert") / "model.safetensors").read_bytes())
    assert "/nowhere" in failure_of("/nowhere") and "HF_HUB_OFFLINE" in failure_of("nobody/has-this")
    assert "no tokenizer" in failure_of(bare) and "safetensors" in failure_of(pickled)
    shutil.copy(tiny("bert") / "config.json", bare)
    (bare / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    assert str(bare) in failure_of(bare) and "tokenizer" in failure_of(bare)
    shutil.copy(tiny("bert") / "tokenizer.json", bare)
    assert not failure_of(bare)


@pytest.mark.parametrize(("status", "verdict"), [(200, "ok"), (401, "fail"), (503, "warn")])
def test_endpoints_are_requested(status: int, verdict: str) -> None:
    with open_endpoint(lambda body, headers: Reply("", status)) as url:
        teacher = kind_of(TeacherSection(backbone="teacher", endpoint=EndpointSection(url=url)))
        assert the_only(teacher.check_source()).verdict == verdict


@pytest.mark.parametrize(("host", "verdict"), [("127.0.0.1", "ok"), ("0.0.0.0", "fail")])
def test_a_port_beyond_loopback_fails(host: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with socket.socket() as listening:
        listening.bind((host, 0))
        listening.listen()
        port = listening.getsockname()[1]
        found = health.check_ports([port])
        assert found.verdict == verdict and str(port) in found.found
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        assert health.check_ports([port]).verdict == ("warn" if verdict == "fail" else "ok")
    closed = health.check_ports([port])
    assert closed.verdict == "ok" and str(port) not in closed.found


@pytest.mark.parametrize(
    ("overrides", "problem", "fix"),
    [
        (("training.workers=16", "training.gpus_per_worker=1"), "16 GPUs", "training.gpus_per_worker"),
        (("training.workers=2", "resources.gpu=required"), "no GPU", "resources.gpu=auto"),
        (("training.workers=16", "training.cpus_per_worker=64"), "1024 CPUs", "training.cpus_per_worker"),
        (("training.workers=2", "training.node_labels={role: students}"), "role=students", "ray start"),
        (("training.workers=1", "training.cpus_per_worker=1"), "", ""),
    ],
)
def test_a_recipe_needs_what_this_machine_has(
    overrides: tuple[str, ...], problem: str, fix: str, recipe_with: Callable[..., Recipe]
) -> None:
    cluster, found = health.check_cluster(recipe=recipe_with(*overrides))
    assert (cluster.name, cluster.verdict) == ("cluster", "ok")
    assert found.verdict == ("fail" if problem else "ok") and problem in found.found and fix in found.fix


def test_tables_that_do_not_fit_are_refused_with_the_bytes_that_are_missing(
    recipe_with: Callable[..., Recipe], sentences: list[str]
) -> None:
    recipe = recipe_with()
    (found,) = health.check_tables(recipe)
    assert found.verdict == "ok" and f"{len(sentences)} rows" in found.found
    needed = 2 * 10**14 * (48 + 32)
    with fails_with(StorageWriteError, f"need {needed / 2**30:,.1f} GiB", "GiB are missing", "storage.cache=FOLDER"):
        require_space(recipe, {0: 10**14, 1: 10**14})


def test_the_token_is_required_and_private(tmp_path: Path) -> None:
    def verdicts(**environment: str) -> list[str]:
        return [check.verdict for check in health.check_token(environment, tmp_path)]

    joined = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": "10.0.0.1:6379"}
    assert verdicts() == verdicts(**joined, RAY_AUTH_TOKEN="abc") == ["ok"]
    assert verdicts(RAY_AUTH_MODE="disabled") == ["warn"] and verdicts(**joined) == ["fail"]
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("abc")
    file.chmod(0o644)
    assert verdicts(**joined) == ["ok", "warn"]
    file.chmod(0o600)
    assert verdicts(**joined) == ["ok"]


def test_without_an_address_no_cluster_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert health.check_cluster()[0].found.startswith("none")
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        assert f"export RAY_ADDRESS={address}" in health.check_cluster()[0].found
    assert health.check_cluster()[0].found.startswith("none")  # it has ended, and its file remains


def test_the_command_prints_checks_and_leaves_no_files(
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
    output = capsys.readouterr().out
    failed = [line for line in output.splitlines() if line.startswith("fail")]
    assert status == bool(failed) and "storage.cache" in output and "python" in output
    assert "ok    tables " in output
    assert "not required: training.engine" in output  # DeepSpeed is not imported
    assert sorted(tmp_path.rglob("*")) == before  # no file remains
    assert main([file, "student.backbone=/nowhere", "--json"]) == 1
    checks = json.loads(capsys.readouterr().out)
    assert any(check["verdict"] == "fail" and "/nowhere" in check["found"] and check["fix"] for check in checks)
