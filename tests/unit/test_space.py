"""Search spaces: sampling, the values that a sample gives, refusals before a sweep starts, and the command `tune`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from distcse.errors import (
    InvalidValueError,
    RecipeError,
    RunRecordError,
    SearchSpaceError,
    UnknownKeyError,
)
from distcse.evaluation.results import compute_spread
from distcse.recipe import Recipe, Sweep, read_recipe, read_sweep
from distcse.storage import open_store
from distcse.tuning.records import (
    Trial,
    TrialMetric,
    find_best_trial,
    read_trials,
    readable_trials,
    rows_of,
    write_tables,
)
from distcse.tuning.space import Space
from distcse.tuning.sweep import check
from tests.commands import command
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.sweeps import TAU2, make_sweep

main = command("tune")
pytestmark = pytest.mark.usefixtures("without_ray")
SPACES = Path(__file__).parents[2] / "distcse" / "spaces"
RECIPE = ["rankcse-listnet-bert-base", "evaluation.data=data"]


@pytest.fixture
def recipe(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Recipe:
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta"), tiny("bert")], sentences)


def test_a_grid_has_every_combination_and_computes_expressions(recipe: Recipe, tmp_path: Path) -> None:
    overrides = {
        "objective.rank.tau3": {"expression": "tau2 / 2"},
        "objective.rank.tau2": {"values": [0.05, 0.1]},
        "objective.tau1": {"expression": "objective.rank.tau2 + gamma * 0 + tau3"},
        "objective.rank.gamma": {"values": [1, 2.5, 3]},
    }
    space = Space(make_sweep(tmp_path, overrides, search={"algorithm": "grid"}), recipe)
    values = [space.values(sample) for sample in space.grid()]
    assert len(values) == 6 and list(values[0]) == list(overrides)
    for found in values:
        assert found["objective.rank.tau3"] == found["objective.rank.tau2"] / 2
        assert found["objective.tau1"] == pytest.approx(1.5 * found["objective.rank.tau2"])
    first = space.recipe(space.grid()[0])
    assert isinstance(first, Recipe) and first.objective.rank is not None and first.objective.rank.tau3 == 0.025


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.floats(1e-6, 1 - 1e-6), min_size=3, max_size=3))
def test_weights_lie_on_their_simplex(uniform: list[float]) -> None:
    document = {
        "student": {"backbone": "x"},
        "teachers": {"encoders": [{"backbone": "a"}, {"backbone": "b"}, {"backbone": "c"}]},
        "corpus": {"path": "x.txt"},
    }
    sweep = Sweep.model_validate({"parameters": {"teachers.encoders.*.alpha": {"simplex": True}}})
    space = Space(sweep, Recipe.model_validate(document))
    paths = [f"teachers.encoders.{number}.alpha" for number in range(3)]
    values = space.values(dict(zip(paths, uniform, strict=True)))
    assert sum(values.values()) == pytest.approx(1) and min(values.values()) >= 0
    order = sorted(range(3), key=lambda n: -uniform[n])
    assert [values[paths[n]] for n in order] == sorted(values.values())


def test_simplex_weights_are_uniform(recipe: Recipe, tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, {"teachers.encoders.*.alpha": {"simplex": True}}, search={"algorithm": "random"})
    space = Space(sweep, recipe)
    first = sorted(space.values(sample)["teachers.encoders.0.alpha"] for sample in space.draw(600, seed=3))
    for share in (0.1, 0.5, 0.9):  # of three, each weight is Beta(1, 2): P(w < x) = 1 - (1 - x)²
        assert first[int(600 * share)] == pytest.approx(1 - math.sqrt(1 - share), abs=0.06)


def test_random_samples_depend_on_the_seed_and_respect_their_bounds(recipe: Recipe, tmp_path: Path) -> None:
    overrides = {
        "training.lr": {"log_uniform": [1e-5, 1e-3]},
        "objective.rank.gamma": {"uniform": [0.5, 2]},
        "training.batch_size": {"integers": [8, 16]},
        "student.layers": {"values": [[0, 2], [1, 3], [0, 1, 2]]},
    }
    space = Space(make_sweep(tmp_path, overrides), recipe)
    draws = space.draw(40, seed=1)
    assert draws == space.draw(40, seed=1) != space.draw(40, seed=2)
    values = [space.values(draw) for draw in draws]
    assert all(1e-5 <= v["training.lr"] <= 1e-3 and 0.5 <= v["objective.rank.gamma"] <= 2 for v in values)
    assert sum(v["training.lr"] < 1e-4 for v in values) > 10  # half of them lie below the middle of a log scale
    assert {v["training.batch_size"] for v in values} <= set(range(8, 17))
    assert {tuple(v["student.layers"]) for v in values} == {(0, 2), (1, 3), (0, 1, 2)}


TAU3 = "objective.rank.tau3"
ALLOWED = "teachers.encoders.N.alpha"
"""In the list of what may be searched."""
GRID = {"search": {"algorithm": "grid"}}
PBT = {"schedule": {"kind": "pbt"}, "search": {"algorithm": "random"}}
REFUSED: dict[type[RecipeError], list[tuple[dict[str, Any], dict[str, Any], list[str]]]] = {
    InvalidValueError: [
        ({"objective.detection.weight": {"values": [1]}}, {}, ["objective.detection"]),
        ({TAU2: {"uniform": [0.05, 50]}}, {}, [TAU2, "50.0"]),
        ({TAU2: {"uniform": [0.5, 0.05]}}, {}, [TAU2, "[0.5, 0.05]"]),
        ({TAU2: {"log_uniform": [0, 0.05]}}, {}, [TAU2, "log_uniform"]),
        ({TAU2: {"values": [0.1], "uniform": [0, 1]}}, {}, [TAU2, "values and uniform"]),
        ({TAU2: {}}, {}, [TAU2]),
        ({TAU2: {"simplex": True}}, {}, [TAU2, "simplex"]),
        ({TAU2: {"uniform": [0.1, 1]}}, GRID, [TAU2, "grid"]),
        ({TAU2: {"uniform": [0.1, 1]}}, {"search": {"algorithm": "tpr"}}, ["search.algorithm", "'tpe'"]),
        ({TAU2: {"values": [0.1]}}, {"schedule": {"kind": "pbt"}}, ["pbt"]),
        ({TAU2: {"values": [0.1]}}, {"final_runs": {"seeds": [1, 1]}}, ["seeds"]),
        ({}, {}, ["parameters"]),
    ],
    UnknownKeyError: [
        ({"objective.rank.tau9": {"values": [1]}}, {}, ["objective.rank.tau9", "'tau3'"]),
        ({TAU2: {"unifrom": [0.05, 50]}}, {}, ["unifrom", "'uniform'"]),
    ],
    SearchSpaceError: [
        ({TAU3: {"expression": "tau7 / 2"}}, {}, [TAU3, "tau7 / 2"]),
        ({TAU3: {"expression": "tau2 //"}, TAU2: {"values": [1]}}, {}, [TAU3, "tau2 //"]),
        ({TAU3: {"expression": "1 / 0"}}, {}, [TAU3, "1 / 0"]),
        ({"evaluation.eval_steps": {"values": [1]}}, {}, ["evaluation.eval_steps", ALLOWED]),
        ({"corpus.limit": {"values": [10]}}, {}, ["corpus.limit", ALLOWED]),
        ({"seed": {"values": [10]}}, {}, ["seed", ALLOWED]),
        ({"teachers.encoders.0.backbone": {"values": ["x"]}}, {}, ["0.backbone", ALLOWED]),
        ({"training.workers": {"values": [1]}}, {}, ["training.workers"]),
        ({"student.layers": {"values": [[0, 2]]}}, PBT, ["student.layers", "pbt"]),
        ({"student.*.layers": {"simplex": True}}, {}, ["student.*.layers"]),
        ({"training.precision": {"values": ["auto", "bf16"]}}, {}, ["parameters.training.precision"]),
        (
            {"teachers.encoders.*.alpha": {"simplex": True}},
            {},
            ["teachers.encoders.0.alpha", "evaluation.dev=agreement"],
        ),
    ],
}


@pytest.mark.parametrize(("error", "case"), [(error, case) for error, cases in REFUSED.items() for case in cases])
def test_spaces_that_are_refused(
    recipe: Recipe, tmp_path: Path, error: type[RecipeError], case: tuple[dict[str, Any], dict[str, Any], list[str]]
) -> None:
    parameters, sections, named = case
    with fails_with(error, *named):
        check(recipe, make_sweep(tmp_path, parameters, **sections))


def test_packaged_spaces_fit_their_recipes() -> None:
    others = {"best-small": "best-small", "teacher-weights": "rankcse-listnet-bert-base"}
    spaces = sorted(SPACES.glob("*.yaml"))
    assert len(spaces) == 10
    for file in spaces:
        method = re.sub("-(grid|ratio|pbt)$", "", file.stem)
        recipe = read_recipe(others.get(method, f"{method}-bert-base"), ["evaluation.data=data"])
        found = Space(read_sweep(str(file)), recipe)
        assert found.draw(3, seed=0) if "grid" not in file.stem else len(found.grid()) == 18


def trial(number: int, scores: list[float], status: Any = "finished", **values: Any) -> Trial:
    reported = [TrialMetric(10 * n, 10.0 * n, score, float(n)) for n, score in enumerate(scores)]
    return Trial(f"t{number}", values, float(number), status, reported)


def test_the_best_trial_has_the_best_dev_score_and_did_not_diverge() -> None:
    trials = [
        trial(1, [50, 70, 60], x=1),
        trial(2, [50, 71], "stopped", x=2),
        trial(3, [50, 99], "diverged", x=3),
        trial(4, [50, 98], "failed", x=4),
        trial(5, [], x=5),
    ]
    best = find_best_trial(trials)
    assert best is not None and best.name == "t2"
    assert find_best_trial([trial(1, [71], "stopped"), trial(2, [71])]) == trial(2, [71])
    assert find_best_trial([]) is None


def test_records_and_tables(tmp_path: Path) -> None:
    trials = [trial(2, [50, 70], a=[0, 2], b=0.5), trial(1, [50], "diverged", a=None, b=1.5)]
    for one in trials:
        (tmp_path / one.name).mkdir()
        one.write(open_store(tmp_path / one.name))
    assert read_trials(open_store(tmp_path)) == trials[::-1]
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "trial.json").write_bytes(bytes(64))
    assert {one.name for one in readable_trials(open_store(tmp_path))} == {"t1", "t2"}
    with fails_with(RunRecordError, str(tmp_path / "torn" / "trial.json"), "--resume"):
        read_trials(open_store(tmp_path))
    again = trials[0].with_score(TrialMetric(10, 10.0, 65.0, 9.0))
    assert [entry.score for entry in again.metrics] == [50, 65]
    rows = rows_of(trials)
    assert rows[0]["a"] == "[0, 2]" and rows[0]["dev"] == 70 and rows[1]["status"] == "diverged"
    write_tables(trials, open_store(tmp_path))
    assert (tmp_path / "trials.csv").read_text().splitlines()[0].startswith('"trial","status","dev"')
    spread = compute_spread([1.0, 2.0, 3.0])
    assert (spread.mean, spread.deviation, spread.number) == (2.0, 1.0, 3)


def test_errors_of_overrides_have_their_prefix_and_those_of_the_file_have_none(tmp_path: Path) -> None:
    file = tmp_path / "space.yaml"
    file.write_text("parameters: {training.lr: {values: [1.0e-4]}}\nsearch: {trials: 0}\n")
    assert read_sweep(str(file), ["search.trials=3"], "sweep.").search.trials == 3
    with fails_with(InvalidValueError, "space.yaml: search.trials is 0"):
        read_sweep(str(file), [], "sweep.")
    file.write_text("parameters: {training.lr: {values: [1.0e-4]}}\n")
    with fails_with(UnknownKeyError, "unknown key sweep.search.trails", "did you mean 'trials'?"):
        read_sweep(str(file), ["search.trails=4"], "sweep.")


# -- the command ---------------------------------------------------------------------------------------------------------


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
    ("words", "status", "named"),
    [
        (
            "RECIPE --space nowhere.yaml",
            2,
            "no search space or file 'nowhere.yaml'; packaged search spaces: best-small, ",
        ),
        ("rankcse-lisnet-bert-base --space SPACE", 2, "did you mean 'rankcse-listnet-bert-base'"),
        ("RECIPE --space SPACE --print-space", 2, "leaves objective.detection out"),
        ("RECIPE --space SPACE sweep.serch.trials=3", 2, "unknown key sweep.serch"),
        ("RECIPE --space SPACE sweep.trials=3", 2, "did you mean 'sweep.search.trials'?"),
        ("RECIPE --space SPACE seed=3 training.lrr=1", 2, "did you mean 'lr'?"),
        ("--resume /nowhere", 1, "/nowhere is not a sweep"),
        ("RECIPE --resume /nowhere", 2, "name only the folder"),
        ("--resume /nowhere --dry-run", 2, "--dry-run is for a sweep that has not begun"),
    ],
)
def test_mistakes_end_the_command_at_once(
    words: str, status: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words.replace("RECIPE", " ".join(RECIPE)).replace("SPACE", str(SPACES / "diffcse.yaml"))
    assert main(given.split()) == status
    assert named in capsys.readouterr().err
