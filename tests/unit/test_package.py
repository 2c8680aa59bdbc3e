"""What a release contains: recipes, search spaces, constraints, the project's URLs, and a README whose links work elsewhere."""

from __future__ import annotations

import fnmatch
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

from distcse.cli import main
from distcse.devices import host
from distcse.recipe import packaged_spaces, read_sweep
from tests.conftest import ROOT

NOT_IN_MESSAGES = ("dev", "docs", "quickstart")
URL = "https://example.org/owner/distcse"


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    spec = importlib.util.spec_from_file_location("package", ROOT / ".ci" / "package.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    target: Path = tmp_path_factory.mktemp("release") / "package"
    module.write_package(URL, target)
    return target


def test_a_wheel_carries_recipes_spaces_and_constraints(tree: Path, tmp_path: Path) -> None:
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(tree)], check=True)
    (wheel,) = tmp_path.glob("distcse-*.whl")
    inside = {name.removeprefix("distcse/") for name in zipfile.ZipFile(wheel).namelist()}
    assert {
        "constraints.txt",
        "recipes/quickstart.yaml",
        "spaces/rankcse-listnet.yaml",
        "text/samples/quickstart.txt.gz",
        "train.py",
    } <= inside


def test_all_files_of_the_package_are_declared(tree: Path) -> None:
    project = tomllib.loads((tree / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["distcse"]
    data = [file.relative_to(tree / "distcse").as_posix() for file in (tree / "distcse").rglob("*")]
    data = [name for name in data if (tree / "distcse" / name).is_file() and not name.endswith(".py")]
    assert [name for name in data if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)] == []
    assert {"constraints.txt", "recipes/quickstart.yaml", "spaces/rankcse-listnet.yaml"} <= {*data}
    constraints = tree / "distcse" / "constraints.txt"
    assert not constraints.is_symlink() and constraints.read_text() == (ROOT / "constraints.txt").read_text()


def test_the_package_page_has_urls_and_links_that_work_there(tree: Path) -> None:
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == URL
    links = re.findall(r"\]\(([^)\s]+)\)", (tree / "README.md").read_text())
    assert len(links) > 10 and all(link.startswith("https://") for link in links)
    before = f"/v{project['version']}/"
    linked = [link.partition("#")[0].partition(before)[2] for link in links if link.startswith(f"{URL}/")]
    assert linked and all((ROOT / name).exists() for name in linked)
    assert "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_tested_versions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env", "--constraints"]) == 0
    assert capsys.readouterr().out == files("distcse").joinpath("constraints.txt").read_text()


def test_messages_name_the_packages_of_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {extra: re.findall('"(.+?)"', host.pip_install(extra)) for extra in extras.keys() - {*NOT_IN_MESSAGES}}
    assert named == {extra: extras[extra] for extra in named}


def test_nothing_says_to_install_distcse_from_an_index() -> None:
    """Anybody could register the name."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = [name for name in listed.stdout.split() if not name.startswith(("tests/", "CHANGELOG"))]
    texts = {name: (ROOT / name).read_bytes().decode(errors="replace") for name in names if (ROOT / name).is_file()}
    from_index = re.compile(r"""pip install [^`\n]*(?<![\w./@-])distcse(?![\w./-])""")
    assert {name: found[0] for name, text in texts.items() if (found := from_index.search(text))} == {}


@pytest.mark.parametrize("name", packaged_spaces())
def test_a_packaged_space_is_read_by_its_name(name: str) -> None:
    assert read_sweep(name) == read_sweep(str(ROOT / "distcse" / "spaces" / f"{name}.yaml"))
