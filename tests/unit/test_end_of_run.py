"""What the end of a run prints: size, speed and scores next to the teacher's, and the next commands, which work as printed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse import cli
from distcse.api import Run
from distcse.cli.training import commands_for
from distcse.events import Reporter
from distcse.recipe import Recipe
from distcse.report.exports import scores_csv
from distcse.report.terminal import print_evaluation
from distcse.runs.directory import RunDirectory
from distcse.runs.mutual.phase_store import Phase
from distcse.runs.result import Best, MutualResult
from tests.backends import run
from tests.labelled import write_retrieval
from tests.pairs import make_mutual_recipe

SHORT = ("training.max_steps=2", "evaluation.eval_steps=2", "evaluation.final_suites=[agreement]")


def test_a_student_is_shown_next_to_its_teachers_with_the_next_commands(
    recipe_with: Callable[..., Recipe],
    tiny: Callable[..., Path],
    tmp_path: Path,
    sentences: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    recipe_with()
    assert cli.main(["train", str(tmp_path / "recipe.yaml"), *SHORT]) == 0
    shown = capsys.readouterr()
    assert "loading   PyTorch" in shown.err.partition("run directory")[0]
    lines = shown.out.splitlines()
    table = lines[next(number for number, line in enumerate(lines) if line.startswith("Size and speed (cpu, fp32)")) :]
    rows = {words[0]: words for line in table[:8] if (words := line.split())}
    assert "start" not in rows and rows["student"][1:3] == ["0.0", "M"] and rows["student"][4] == "32"
    assert [line.split()[0] for line in table if line.startswith("teacher")] == ["teacher", "teacher"]
    (run,) = (tmp_path / "runs").iterdir()
    commands = [line for line in lines if "evaluate" in line or "export" in line or "push" in line]
    assert [str(run) in command for command in commands] == [True, True, True]
    assert f'model = SentenceTransformer("{run}/model")' in lines
    words = shlex.split(commands[0])
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(sentences[:20]))
    printed = [str(texts) if word == "FILE" else word for word in words[words.index(f"student={run}") :]]
    assert printed[1] == f"teacher={tiny('minilm')}" and cli.main(["evaluate", *printed]) == 0
    assert "kept@10" in capsys.readouterr().out


def test_a_run_that_found_nothing_better_than_its_start_does_not_look_like_a_success(
    recipe_with: Callable[..., Recipe], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_with()
    assert cli.main(["train", str(tmp_path / "recipe.yaml"), *SHORT, "training.lr=1e-30"]) == 3
    shown = capsys.readouterr()
    assert "DCSE-W11" in shown.err and "its start: no checkpoint is better" in shown.out
    assert "push" not in shown.out and "evaluate" in shown.out
    (run,) = (tmp_path / "runs").iterdir()
    assert "Not improved" in (run / "model" / "README.md").read_text()
    assert "the start: no checkpoint is better" in (run / "report.html").read_text()


def test_the_commands_of_several_models_name_the_first_one(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe = make_mutual_recipe(tmp_path, {"one": tiny("bert"), "two": tiny("minilm")}, sentences)
    run = RunDirectory(tmp_path / "runs" / "small")
    best = [
        Best(group, kind, Phase(1), None, run.path / "models" / group / kind)
        for group in ("one", "two")
        for kind in ("bi", "cross")
    ]
    lines = commands_for(Run(MutualResult.of(recipe, run, best, {}, 60, False, None)))
    command = (
        f"evaluate student={run.path}/models/one/bi start={tiny('bert')} --against start --pooling mean --texts FILE"
    )
    assert command in "\n".join(lines)
    assert not any("SentenceTransformer" in line for line in lines)


def test_a_model_in_a_bucket_is_used_by_its_address(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mirror is of the machine that printed it."""
    monkeypatch.setenv("DISTCSE_MIRROR", str(tmp_path / "mirror"))
    recipe = make_mutual_recipe(tmp_path, {"one": tiny("bert"), "two": tiny("minilm")}, sentences)
    run = RunDirectory(tmp_path / "mirror" / "s3" / "endpoint" / "team" / "small")
    best = Best("one", "bi", Phase(1), None, run.path / "models" / "one" / "bi")
    lines = commands_for(Run(MutualResult.of(recipe, run, [best], {}, 60, False, None)))
    assert "from distcse.models import resolve_model" in lines
    assert 'model = SentenceTransformer(str(resolve_model("s3://team/small/models/one/bi")))' in lines
    assert str(tmp_path / "mirror") not in "\n".join(lines)
    (export,) = (line for line in lines if " export " in line)
    assert export.endswith(" s3://team/small --onnx --int8 --out FOLDER")


def test_a_run_is_compared_with_its_best_teacher(
    recipe_with: Callable[..., Recipe],
    labelled: Path,
    tmp_path: Path,
    sentences: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, texts = tmp_path / "data", list(dict.fromkeys(sentences))[:200]
    write_retrieval(data / "retrieval" / "find", [f"{text[:-1]}, they say." for text in texts[:40]], texts)
    (data / "sts").symlink_to(labelled / "sts")
    changes = ("training.max_steps=1", "evaluation.dev=none", f"evaluation.data={data}")
    for suites, measure in (("retrieval", "ndcg@10"), ("sts,retrieval", "ndcg@10"), ("sts", "all")):
        evaluation = run(recipe_with(*changes, f"evaluation.final_suites=[{suites}]"), Reporter()).evaluation
        assert evaluation is not None
        first = next(s for s in evaluation.scores if s.measure == measure and (s.average or s.suite == "retrieval"))
        best = max(("teacher 0", "teacher 1"), key=first.values.__getitem__)
        assert evaluation.base == best
        assert f"{first.suite},{first.set},{measure},student,{first.values['student']:.6g},{best}," in scores_csv(
            evaluation
        )
        print_evaluation(evaluation)
        shown = capsys.readouterr().out
        assert f"difference from {best} and" in shown
        share = 100 * first.values["student"] / first.values[best]
        (line,) = (line for line in shown.splitlines() if line.startswith(f"Compared with {best}."))
        verdict = shown.lstrip().splitlines()[0]
        assert re.match(rf"student (keeps|reaches) {share:.1f} % \[[\d.]+, [\d.]+\] of {best}'s ", verdict)
        assert ("nDCG@10" in verdict, "STS Spearman" in verdict) == ("retrieval" in suites, "sts" in suites)
        assert re.search(r", [\d.]+x as fast, [\d.]+ MB", verdict) and "bootstrap" in line


def test_the_only_teacher_is_not_compared_with_itself(
    recipe_with: Callable[..., Recipe], tiny: Callable[..., Path]
) -> None:
    teacher = f"{{backbone: '{tiny('minilm')}', pooling: mean, max_length: 16}}"
    changes = (*SHORT, "training.max_steps=1", "evaluation.dev=none", f"teachers.encoders=[{teacher}]")
    evaluation = run(recipe_with(*changes), Reporter()).evaluation
    assert evaluation is not None and "teacher" in [info.name for info in evaluation.models]
    (agreement,) = (score for score in evaluation.scores if score.suite == "agreement")
    assert agreement.values.keys() == {"start", "student"}
