"""What `make` would run: which extra each target installs, and where torch comes from."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
CPU_BUILDS = "--extra-index-url https://download.pytorch.org/whl/cpu torch=="
# Of the `make test` that may be running these tests.
INHERITED = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH_INDEX", "VENV", "ARGS", "NVIDIA")


def make(*arguments: str, path: str | None = None) -> str:
    """What `make` prints; `path` comes before PATH."""
    environment = {name: value for name, value in os.environ.items() if name not in INHERITED}
    if path is not None:
        environment["PATH"] = path + os.pathsep + environment["PATH"]
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


def commands(target: str, venv: Path, *variables: str, path: str | None = None) -> str:
    """The commands that `make TARGET` would run; nothing is run."""
    return make("--dry-run", target, f"VENV={venv}", *variables, path=path)


@pytest.mark.parametrize("target", ["quickstart", "test", "test-faults", "test-slow", "unit", "lint", "types", "bench"])
def test_targets_install_what_they_need(target: str, tmp_path: Path) -> None:
    extra = "quickstart" if target == "quickstart" else "dev"
    assert f"'.[{extra}]'" in commands(target, tmp_path)
    (tmp_path / ".dev").touch()
    (tmp_path / ".quickstart").touch()
    assert "'.[dev]'" not in commands(target, tmp_path)


def test_torch_is_the_cpu_build_where_there_is_no_nvidia_driver(tmp_path: Path) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    driver = programs / "nvidia-smi"
    driver.touch()
    driver.chmod(0o755)
    assert CPU_BUILDS in commands("quickstart", tmp_path, "NVIDIA=")
    assert "index-url" not in commands("quickstart", tmp_path, path=str(programs))
    assert "index-url" not in commands("quickstart", tmp_path, "NVIDIA=", "TORCH_INDEX=")
    assert "--extra-index-url http://mine torch==" in commands("quickstart", tmp_path, "TORCH_INDEX=http://mine")


def test_help_lists_targets_and_variables() -> None:
    names = {line.split()[0].partition("=")[0] for line in make("help").splitlines() if line}
    assert names >= {
        "quickstart",
        "test",
        "test-slow",
        "unit",
        "lint",
        "types",
        "PYTHON",
        "VENV",
        "ARGS",
        "TORCH_INDEX",
    }
