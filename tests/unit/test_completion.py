"""The command `distcse`: its subcommands, version, errors, and completion in bash."""

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


def complete(script: Path, folder: Path, *words: str) -> set[str]:
    """Return bash's completions of the last word, computed as an interactive bash does."""
    program = (
        'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
        '$(complete -p distcse | sed "s/.*-F \\([^ ]*\\).*/\\1/") distcse "${@: -1}" "${@: -2:1}"; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "--norc", "-c", program, "bash", str(script), *words],
        cwd=folder,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return set(done.stdout.split())


def test_bash_completes(script: Path, tmp_path: Path) -> None:
    (tmp_path / "minilm-mine.yaml").touch()
    assert complete(script, tmp_path, "distcse", "") >= set(COMMANDS)
    assert complete(script, tmp_path, "distcse", "ev") == {"evaluate"}
    assert complete(script, tmp_path, "distcse", "train", "--re") == {"--rerun", "--resume"}
    assert complete(script, tmp_path, "distcse", "train", "minilm") == {
        "minilm-3layer",
        "minilm-mutual",
        "minilm-mine.yaml",
    }
    assert complete(script, tmp_path, "distcse", "evaluate", "--precision", "f") == {"fp32", "fp16"}
    assert complete(script, tmp_path, "distcse", "recipe", "sc") == {"schema"}
    assert complete(script, tmp_path, "distcse", "recipe", "schema", "m") == {"mutual"}
    assert complete(script, tmp_path, "distcse", "recipe", "migrate", "minilm") == {"minilm-mine.yaml"}
    assert complete(script, tmp_path, "distcse", "recipe", "show", "minilm-m") == {"minilm-mutual", "minilm-mine.yaml"}


def test_there_is_a_completion_script_for_zsh(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed")
    assert main(["completion", "zsh"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("#compdef distcse") and "minilm-3layer" in output and "--resume" in output


def test_a_subcommand_runs_the_module_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--print-recipe"]) == 0
    assert "\nstudent:\n" in capsys.readouterr().out


def test_without_arguments_it_lists_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and all(f"\n  {name} " in captured.out for name in [*COMMANDS, "completion"])
    with pytest.raises(SystemExit) as exited:
        main(["--help"])
    assert exited.value.code == 0 and capsys.readouterr().out == captured.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["trian", "quickstart", "seed=7"], ("'trian'", "'train'")),
        (["complete"], ("'complete'", "'completion'")),
        (["zzz"], ("'zzz'", "train, tune, ")),
    ],
)
def test_an_unknown_command_is_one_line_and_status_2(
    words: list[str], named: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("distcse: [DCSE-R10] ") and err.count("\n") == 1
    assert all(text in err for text in named)


def test_the_version_is_the_packages_and_needs_no_heavy_import() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert distcse.__version__ == version("distcse") == declared
    script = Path(sys.executable).with_name("distcse")
    for command in ([script, "--version"], [sys.executable, "-m", "distcse", "--version"]):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (f"distcse {declared}\n", "")
    program = (
        "import sys; from distcse.__main__ import main; main([]); print({'torch', 'ray', 'pydantic'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
