"""What a release is made of: the wheel, its package page, pinned versions, notes, and what `make` installs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from distcse.cli import main
from distcse.devices import host
from release_notes import notes
from tests.conftest import ROOT

URL = "https://example.org/owner/distcse"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    target = tmp_path_factory.mktemp("release") / "package"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / ".ci"))
        from package import write_package
    write_package(URL, target)
    return target


def test_an_sdist_and_the_wheel_of_it_have_all_files_of_the_package(tree: Path, tmp_path: Path) -> None:
    build = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", build], cwd=tree, check=True, capture_output=True)
    (sdist,) = tmp_path.glob("distcse-*.tar.gz")
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(sdist)], check=True)
    (wheel,) = tmp_path.glob("distcse-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        inside = {name.removeprefix("distcse/") for name in archive.namelist()}
        assert archive.read("distcse/constraints.txt") == (ROOT / "constraints.txt").read_bytes()
    files = {file.relative_to(tree / "distcse").as_posix() for file in (tree / "distcse").rglob("*") if file.is_file()}
    assert not files - inside
    assert {"recipes/quickstart.yaml", "spaces/rankcse-listnet.yaml", "text/samples/queries.txt.gz"} <= inside


def test_the_package_page_has_urls_and_links_that_work_there(tree: Path) -> None:
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == URL
    links = re.findall(r"\]\(([^)\s]+)\)", (tree / "README.md").read_text())
    assert len(links) > 10 and all(link.startswith("https://") for link in links)
    before = f"/v{project['version']}/"
    linked = [link.partition("#")[0].partition(before)[2] for link in links if link.startswith(f"{URL}/")]
    assert linked and all((ROOT / name).exists() for name in linked)


def test_the_tested_versions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--constraints"]) == 0
    assert capsys.readouterr().out == (ROOT / "constraints.txt").read_text()


def test_the_lock_has_the_pins_of_the_constraints_and_a_hash_of_each() -> None:
    def pins(text: str) -> list[tuple[str, str]]:
        found = re.findall(r"^([\w.-]+)==([\w.+]+)", text, re.M)
        return sorted((re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in found)

    lock = (ROOT / "requirements.lock").read_text()
    assert pins(lock) == pins((ROOT / "constraints.txt").read_text()), "make lock"
    entry = re.compile(r"^[\w.-]+==.*(\n    --hash=sha256:[0-9a-f]{64}( \\)?)+\n", re.M)
    assert all(line.startswith("#") for line in entry.sub("", lock).splitlines())


def test_messages_name_the_packages_of_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    command = ["git", "grep", "-hoE", r"'\.\[[a-z,]+\]'", "--", "*.md", "*.ipynb", "*.yaml"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {name for each in found for name in each[3:-2].split(",")} <= extras.keys(), "pages name extras that exist"
    extras = {name: packages for name, packages in extras.items() if name not in ("dev", "docs", "quickstart")}
    assert {name: re.findall('"(.+?)"', host.pip_install(name)) for name in extras} == extras


def test_nothing_says_to_install_distcse_from_an_index() -> None:
    """Anybody could register the name."""
    installers = r"(pipx?|uv|conda|mamba|poetry) (pip )?(install|add|run|tool install) |\b(uvx|--with) "
    pattern = rf"({installers})[^`]*(?<![\w./@-])distcse(?![\w./-])|(?<![\w./-])distcse(\[[a-z]|[=~<>]=)"
    command = ["git", "grep", "--perl-regexp", "-I", "-n", pattern, "--", ":!tests", ":!CHANGELOG.md"]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout == ""
    assert all(
        re.search(pattern, f"{words} distcse") for words in ("pip install -U", "uv pip install", "uv add", "uvx")
    )
    assert re.search(pattern, "distcse[onnx]") and re.search(pattern, "distcse==0.1.0")


def test_release_notes_are_a_versions_part_of_the_changelog() -> None:
    part = "### Added\n- One, in\n  two lines.\n- Two.\n"
    changelog = f"# Changelog\n\n## [Unreleased]\n\n## [0.2.0] - 2026-12-01\n\n{part}"
    assert notes(changelog, "0.2.0") == "### Added\n- One, in two lines.\n- Two."
    with pytest.raises(SystemExit, match=r"nothing of version 'unreleased'; versions there: Unreleased, 0\.2\.0"):
        notes(changelog, "unreleased")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_torch_is_the_cpu_build_where_there_is_no_nvidia_driver(tmp_path: Path) -> None:
    """`make --dry-run` prints the commands; variables of the `make test` that may be running are not passed on."""
    inherited = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "TORCH_INDEX", "VENV", "ARGS", "NVIDIA"}
    environment = {name: value for name, value in os.environ.items() if name not in inherited}

    def commands(*variables: str) -> str:
        command = ["make", "--dry-run", "quickstart", f"VENV={tmp_path}", *variables]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout

    assert "--extra-index-url https://download.pytorch.org/whl/cpu torch==" in (cpu := commands("NVIDIA="))
    assert "--editable .'[quickstart]'" in cpu and "[dev]" not in cpu
    assert "dist/x.whl'[quickstart]'" in (wheel := commands("SOURCE=dist/x.whl")) and "--editable" not in wheel
    assert "index-url" not in commands("NVIDIA=", "TORCH_INDEX=")
    driver = tmp_path / "nvidia-smi"
    driver.touch(0o755)
    environment["PATH"] = f"{tmp_path}{os.pathsep}{environment['PATH']}"
    assert "index-url" not in commands()
