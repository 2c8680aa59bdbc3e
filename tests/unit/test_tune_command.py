"""`python -m distcse.tune` as a user meets it: what is printed, what is refused, with which exit status."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.commands import command

main = command("tune")

pytestmark = pytest.mark.usefixtures("without_ray")
SPACES = Path(__file__).parents[2] / "distcse" / "spaces"
RECIPE = ["rankcse-listnet-bert-base", "evaluation.data=data"]


def test_a_space_is_checked_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    space = ["--space", str(SPACES / "rankcse-listnet-grid.yaml"), "--print-space"]
    assert main([*RECIPE, *space, "sweep.final_runs.seeds=[7]", "sweep.search.concurrent=3"]) == 0
    printed = capsys.readouterr().out
    assert (
        printed.startswith("# 18 trials (grid), schedule none, 1 final seed\n# ")
        and yaml.safe_load(printed)["search"]
        and "concurrent: 3" in printed
        and "seeds:\n  - 7" in printed
    )


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        ([], 2, "name a recipe and a space"),
        (
            [*RECIPE, "--space", "nowhere.yaml"],
            2,
            "no search space or file 'nowhere.yaml'; packaged search spaces: best-small, ",
        ),
        (
            ["rankcse-lisnet-bert-base", "--space", str(SPACES / "diffcse.yaml")],
            2,
            "did you mean 'rankcse-listnet-bert-base'",
        ),
        ([*RECIPE, "--space", str(SPACES / "diffcse.yaml"), "--print-space"], 2, "leaves objective.detection out"),
        ([*RECIPE, "--space", str(SPACES / "diffcse.yaml"), "sweep.serch.trials=3"], 2, "unknown key sweep.serch"),
        (
            [*RECIPE, "--space", str(SPACES / "diffcse.yaml"), "sweep.trials=3"],
            2,
            "did you mean 'sweep.search.trials'?",
        ),
        ([*RECIPE, "--space", str(SPACES / "diffcse.yaml"), "seed=3", "training.lrr=1"], 2, "did you mean 'lr'?"),
        (["--resume", "/nowhere"], 1, "/nowhere is not a sweep"),
        ([*RECIPE, "--resume", "/nowhere"], 2, "name only the folder"),
        (["--resume", "/nowhere", "--dry-run"], 2, "--dry-run is for a sweep that has not begun"),
    ],
)
def test_mistakes_end_the_command_at_once(
    arguments: list[str], status: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    assert named in capsys.readouterr().err


def test_a_sweep_without_a_dev_score_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "recipe.yaml"
    text = tmp_path / "text.txt"
    text.write_text("A sentence.\n")
    recipe.write_text(
        f"corpus: {{path: '{text}'}}\nstudent: {{backbone: x}}\nobjective: {{rank: null}}\nevaluation: {{dev: none}}\n"
    )
    space = tmp_path / "space.yaml"
    space.write_text("parameters: {training.lr: {values: [1.0e-5]}}\n")
    assert main([str(recipe), "--space", str(space)]) == 2
    assert "evaluation.dev is none" in capsys.readouterr().err
