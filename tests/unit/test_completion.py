"""`distcse`, all commands under one name, and what bash makes of its completion."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from distcse.__main__ import COMMANDS, main


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


def test_zsh_has_a_script_too(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed")
    assert main(["completion", "zsh"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("#compdef distcse") and "minilm-3layer" in told and "--resume" in told


def test_a_command_is_the_module_of_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "quickstart", "--print-recipe"]) == 0
    assert "\nstudent:\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as asked:
        main(["--help"])
    told = capsys.readouterr().out
    assert asked.value.code == 0 and all(f"\n  {name} " in told for name in COMMANDS)
    with pytest.raises(SystemExit) as asked:
        main(["trian"])
    assert asked.value.code == 2
