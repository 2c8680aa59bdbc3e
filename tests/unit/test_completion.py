"""The command `distcse`: its commands, version, mistakes, and what bash makes of its completion."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import distcse
from distcse.__main__ import COMMANDS, main
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("shtab", reason="shtab is not installed")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    file = tmp_path_factory.mktemp("completion") / "distcse.bash"
    with pytest.MonkeyPatch.context() as patch, open(file, "w") as written:
        patch.setattr("sys.stdout", written)
        assert main(["completion", "bash"]) == 0
    return file


def completed(script: Path, folder: Path, *words: str) -> set[str]:
    """What bash offers for the last of some words, asked as it asks itself."""
    asked = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
        '$(complete -p distcse | sed "s/.*-F \\([^ ]*\\).*/\\1/") distcse "${@: -1}" "${@: -2:1}"; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", asked, "bash", str(script), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes(script: Path, tmp_path: Path) -> None:
    (tmp_path / "minilm-mine.yaml").touch()
    assert completed(script, tmp_path, "distcse", "") >= set(COMMANDS)
    assert completed(script, tmp_path, "distcse", "ev") == {"evaluate"}
    assert completed(script, tmp_path, "distcse", "train", "--re") == {"--rerun", "--resume"}
    assert completed(script, tmp_path, "distcse", "train", "minilm") == {
        "minilm-3layer",
        "minilm-mutual",
        "minilm-mine.yaml",
    }
    assert completed(script, tmp_path, "distcse", "evaluate", "--precision", "f") == {"fp32", "fp16"}
    assert completed(script, tmp_path, "distcse", "recipe", "sc") == {"schema"}
    assert completed(script, tmp_path, "distcse", "recipe", "schema", "m") == {"mutual"}
    assert completed(script, tmp_path, "distcse", "recipe", "migrate", "minilm") == {"minilm-mine.yaml"}
    assert completed(script, tmp_path, "distcse", "recipe", "show", "minilm-m") == {"minilm-mutual", "minilm-mine.yaml"}


def test_zsh_has_a_script_too(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed")
    assert main(["completion", "zsh"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("#compdef distcse") and "minilm-3layer" in told and "--resume" in told


def test_a_command_is_the_module_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--print-recipe"]) == 0
    assert "\nstudent:\n" in capsys.readouterr().out


def test_alone_it_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    alone = capsys.readouterr()
    assert alone.err == "" and all(f"\n  {name} " in alone.out for name in [*COMMANDS, "completion"])
    with pytest.raises(SystemExit) as asked:
        main(["--help"])
    assert asked.value.code == 0 and capsys.readouterr().out == alone.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian", "quickstart", "seed=7"], "no command 'trian'; did you mean 'train'?"),
        (["complete"], "no command 'complete'; did you mean 'completion'?"),
        (["zzz"], "no command 'zzz'; commands: train, tune, "),
    ],
)
def test_an_unknown_command_is_one_line_and_status_2(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"distcse: [DCSE-R10] {told}") and err.count("\n") == 1


def test_the_version_is_the_package_s_and_needs_no_heavy_import() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert distcse.__version__ == version("distcse") == declared
    script = Path(sys.executable).with_name("distcse")
    for command in ([script, "--version"], [sys.executable, "-m", "distcse", "--version"]):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (f"distcse {declared}\n", "")
    seen = (
        "import sys; from distcse.__main__ import main; main([]); print({'torch', 'ray', 'pydantic'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", seen], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
