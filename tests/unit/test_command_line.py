"""The command `distcse`: its subcommands, version, errors, environment, and completion in shells."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path

import pytest

import distcse
from distcse.cli import build_parser, main
from distcse.cli.shared import COMMANDS, USUAL_CALLS
from tests.conftest import ROOT


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed")
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    assert main(["completion", "bash"]) == 0
    (script := tmp_path / "distcse.bash").write_text(capsys.readouterr().out)
    (tmp_path / "minilm-mine.yaml").touch()

    def complete(*words: str) -> set[str]:
        """Return bash's completions of the last word, computed as an interactive bash does."""
        program = (
            'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
            '_shtab_distcse distcse "${@: -1}" "${@: -2:1}"; '
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        command = ["bash", "--norc", "-c", program, "bash", str(script), "distcse", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return set(done.stdout.split())

    assert complete("") >= set(COMMANDS)
    assert complete("ev") == {"evaluate"}
    assert complete("train", "--re") == {"--rerun", "--resume"}
    assert complete("train", "minilm") == {"minilm-mine.yaml"}
    assert complete("evaluate", "--precision", "f") == {"fp32", "fp16"}
    assert complete("recipe", "sc") == {"schema"}
    assert complete("recipe", "schema", "m") == {"mutual"}


@pytest.mark.parametrize(
    ("shell", "parts"),
    [("zsh", ["#compdef distcse", "--resume", "_files"]), ("fish", ["complete -c distcse", "-l resume"])],
)
def test_there_is_a_completion_script_for_other_shells(
    shell: str, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab", reason="shtab is not installed")
    assert main(["completion", shell]) == 0
    output = capsys.readouterr().out
    assert all(part in output for part in parts)


def test_env_prints_what_a_bug_report_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "its-variables")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["env", "--json"]) == 0
    output = capsys.readouterr().out
    found = json.loads(output)
    assert {"distcse", "torch", "ray", "python", "cpus", "memory", "gpus", "ray cluster"} <= found.keys()
    assert found["distcse"] == distcse.__version__ and found["$OMP_NUM_THREADS"] == "1"
    assert "hf_secret" not in output and "its-variables" not in output


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "active"}])
def test_a_command_limits_spinning_unless_the_user_has(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert main(["train", "quickstart", "--print-recipe"]) == 0 and "\nstudent:\n" in capsys.readouterr().out
    assert {name: os.environ[name] for name in names if name in os.environ} == (given or {"GOMP_SPINCOUNT": "2000"})


def test_without_arguments_it_lists_its_subcommands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    captured = capsys.readouterr()
    assert captured.err == "" and all(f"\n  {name} " in captured.out for name in COMMANDS)
    assert all(f"\n  {call}  " in captured.out for call in USUAL_CALLS)
    with pytest.raises(SystemExit) as exited:
        main(["--help"])
    assert exited.value.code == 0 and capsys.readouterr().out == captured.out


def test_the_usual_calls_work_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    copy, train, *_ = (shlex.split(call)[1:] for call in USUAL_CALLS)
    assert main(copy) == 0
    assert main([*train, "--print-recipe"]) == 0


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
    program = "import sys; from distcse.cli import main; main([]); print({'torch', 'ray', 'pydantic'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(
    ("module", "usages"),
    [
        ("distcse.cli", ["train distcse train", "plan distcse plan"]),
        ("distcse.__main__", ["train python -m distcse train", "plan python -m distcse plan"]),
        ("distcse.train", ["train python -m distcse.train", "plan python -m distcse plan"]),
    ],
)
def test_a_command_calls_itself_as_it_was_called(
    module: str, usages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`distcse train --help` and `python -m distcse train --help` show the form that the user typed, in the example too."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", ModuleSpec(module, None))
    for name, form in (usage.split(" ", 1) for usage in usages):
        text = build_parser()[1].choices[name].format_help()
        assert text.startswith(f"usage: {form}") and f"Example: {form}" in " ".join(text.split())


EMPTY = "is empty, such as an unset shell variable; write a value, or leave it out"


@pytest.mark.parametrize(
    ("words", "end"),
    [
        ("train --config my.yaml --training.lr 2e-5", "the recipe is the first word; write distcse train FILE"),
        ("train my.yaml --training.lr=2e-5", "write training.lr=VALUE"),
        ("train my.yaml --batch-size 64", "settings are key.path=value; write training.batch_size=VALUE"),
        ("train my.yaml --seed 1", "write seed=VALUE"),
        ("train my.yaml --dryrun", "did you mean '--dry-run'?"),
        ("evaluate model --datas x", "did you mean '--data'?"),
        ("recipe show quickstart --all", "unrecognized arguments: --all"),
        # an unset shell variable
        ("train --resume ''", f"--resume {EMPTY}"),
        ("train quickstart --run-id=", f"--run-id {EMPTY}"),
        ("train ''", f"an argument {EMPTY}"),
        ("evaluate MODEL --texts ' '", f"--texts {EMPTY}"),
        ("recipe cp quickstart ''", f"an argument {EMPTY}"),
    ],
)
def test_other_programs_forms_and_empty_words_are_refused_with_the_right_form(
    words: str, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(shlex.split(words))
    assert exited.value.code == 2 and capsys.readouterr().err.rstrip().endswith(end)
