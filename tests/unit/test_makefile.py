"""What `make` would run: which extra each target installs, and where torch comes from."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
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


def stamp(venv: Path, *extras: str) -> None:
    for extra in extras:
        (venv / f".{extra}").touch()


def test_quickstart_installs_its_own_extra_and_passes_arguments_on(tmp_path: Path) -> None:
    printed = commands("quickstart", tmp_path, "ARGS=training.max_steps=3 --quiet")
    assert "'.[quickstart]'" in printed and "[dev]" not in printed
    assert printed.endswith("python -m distcse.train quickstart training.max_steps=3 --quiet\n")


@pytest.mark.parametrize("target", ["test", "test-faults", "test-slow", "unit", "lint", "types", "bench"])
def test_the_other_targets_install_dev(target: str, tmp_path: Path) -> None:
    printed = commands(target, tmp_path)
    assert "'.[dev]'" in printed and "[quickstart]" not in printed
    assert f"touch {tmp_path}/.dev {tmp_path}/.quickstart" in printed


def test_dev_serves_quickstart_and_quickstart_does_not_serve_dev(tmp_path: Path) -> None:
    stamp(tmp_path, "quickstart")
    assert "pip" not in commands("quickstart", tmp_path)
    assert "'.[dev]'" in commands("lint", tmp_path)
    stamp(tmp_path, "dev", "quickstart")
    assert "pip" not in commands("quickstart", tmp_path) + commands("lint", tmp_path)


def test_the_documentations_tools_are_installed_for_the_slow_tests_alone(tmp_path: Path) -> None:
    stamp(tmp_path, "dev", "quickstart")
    assert "'.[docs]'" in commands("test-slow", tmp_path) and "touch" not in commands("test", tmp_path)


def test_the_lock_is_made_for_the_oldest_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"--python-version {project['requires-python'].removeprefix('>=')} " in make("--dry-run", "lock")


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
        "test-faults",
        "test-slow",
        "unit",
        "lint",
        "types",
        "PYTHON",
        "VENV",
        "ARGS",
        "TORCH_INDEX",
    }
