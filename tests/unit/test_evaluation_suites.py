"""Whole evaluations: what is found, what is missing, how models compare, what was trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distcse.errors import EvaluationError
from distcse.evaluation import (
    SUITES,
    Contamination,
    CustomSet,
    EvalConfig,
    Evaluation,
    LoadOptions,
    candidate_of,
    collect,
    evaluate,
    named,
    open_candidate,
    suites_named,
)
from distcse.evaluation.models import PairScores
from distcse.models import Encoder
from tests.labelled import scored


def test_what_is_missing_is_listed_and_odd_sizes_are_warned_of(evaluation: Evaluation) -> None:
    assert sum(line.startswith("STS13: no ") for line in evaluation.missing) == 1
    assert any(line.startswith("QNLI: no ") for line in evaluation.missing)
    assert any(
        line.startswith("STS12: ") and "has 150 rows, the published set 3,108" in line for line in evaluation.warnings
    )
    averages = [score.set for score in evaluation.scores if score.average]
    assert set(averages) == {"average of 2 of 7"}  # one set of pairs has no average


def test_averages_are_over_their_sets_alone(evaluation: Evaluation) -> None:
    mine = [evaluation.figure("sts", name, "all", "wide") for name in ("STS12", "STS-B")]
    expected = np.mean([round(value, 2) for value in mine])
    assert evaluation.figure("sts", "average of 2 of 7", "all", "wide") == pytest.approx(expected)


def test_cross_encoders_are_measured_where_pairs_are(evaluation: Evaluation) -> None:
    measured = {suite: {m for s in evaluation.scores if s.suite == suite for m in s.values} for suite in SUITES}
    for suite in ("sts", "pairs", "ranking"):
        assert measured[suite] == {"wide", "thin", "cross"}
    for suite in ("geometry", "retrieval"):
        assert measured[suite] == {"wide", "thin"}
    assert [about.kind for about in evaluation.models] == ["bi-encoder", "bi-encoder", "cross-encoder"]


def test_every_model_is_compared_with_every_other(evaluation: Evaluation) -> None:
    score = next(score for score in evaluation.scores if score.set == "STS-B" and score.measure == "all")
    assert len(score.comparisons) == 6
    apart, back = score.against("thin", "wide"), score.against("wide", "thin")
    assert apart is not None and back is not None and apart.value == pytest.approx(-back.value)
    assert apart.value == pytest.approx(score.values["thin"] - score.values["wide"])
    uniformity = next(score for score in evaluation.scores if score.measure == "uniformity")
    assert uniformity.comparisons == []  # has no items to draw


def test_neighbours_that_changed_are_told(evaluation: Evaluation) -> None:
    changes = evaluation.neighbours["thin"]
    assert set(evaluation.neighbours) == {"thin"} and 0 < changes.changed <= changes.sentences
    gains = [entry.gained for entry in changes.clearest]
    assert gains == sorted(gains, reverse=True) and all(entry.before != entry.after for entry in changes.clearest)


def test_an_evaluation_is_stored_whole(evaluation: Evaluation, tmp_path: Path) -> None:
    evaluation.write(tmp_path / "evaluation.json")
    again = Evaluation.read(tmp_path / "evaluation.json")
    assert json.dumps(again.models[0].__dict__) == json.dumps(evaluation.models[0].__dict__)
    assert again.scores[0].against("thin", "wide") == evaluation.scores[0].against("thin", "wide")
    again.write(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "evaluation.json").read_text()
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(EvaluationError, match=r"other\.json is no evaluation"):
        Evaluation.read(tmp_path / "other.json")


def test_sets_of_ones_own_stand_beside_but_not_in_averages(
    labelled: Path, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.tsv").write_text(scored(sentences, 60, 5))
    own = [CustomSet.parse(f"{suite}={tmp_path / 'mine.tsv'}") for suite in ("sts", "ranking", "geometry")]
    tasks = collect(labelled, suites_named(["sts"]), own, EvalConfig(aggregate="wmean"))
    result = evaluate([open_candidate("model", str(tiny()), LoadOptions(pooling="cls"))], tasks)
    assert result.scores[0].measure == "wmean"
    sts = [score.set for score in result.scores if score.suite == "sts" and score.measure == "wmean"]
    assert sts == ["STS12", "STS-B", "mine", "average of 2 of 7"]
    alone = collect(None, [], own, EvalConfig())
    assert [task.name for task in alone.tasks] == ["mine"] * 3 and alone.missing == []


def test_a_run_knows_what_it_was_trained_on(
    labelled: Path, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    import shutil

    tasks = collect(labelled, suites_named(["sts", "pairs"]), [], EvalConfig())
    by_name = {task.name: list(task.sentences()) for task in tasks.tasks}
    corpus = [text.upper().replace(" ", "  ").rstrip(".") + "!" for text in by_name["STS12"]] + ["other words"]
    exposure = Contamination.measure(corpus, by_name.values())
    assert exposure.of(by_name["STS12"]) == 1
    share = exposure.of(by_name["MRPC"])
    assert share is not None and share == pytest.approx(
        len(set(by_name["MRPC"]) & set(by_name["STS12"])) / len(set(by_name["MRPC"]))
    )
    assert exposure.of(["never looked at"]) is None
    model = Path(shutil.copytree(tiny(), tmp_path / "model"))
    exposure.write(model)
    result = evaluate([open_candidate("model", str(model), LoadOptions(pooling="cls"))], tasks)
    assert result.models[0].contamination["sts/STS12"] == 1
    from distcse.report.grids import grids, legend

    sts = grids(result)[0]
    marks = dict(zip(sts.columns, [cell.mark for cell in sts.rows["model"]], strict=True))
    assert marks["STS12"] == "‡" and marks["average of 2 of 7"] == "‡"
    assert "‡ model, sts STS12: transductive, 100 % of the set's sentences were in the training text" in legend(result)


def test_an_average_has_seen_what_its_sets_have(
    labelled: Path, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.tsv").write_text(scored(sentences, 60, 5))
    own = [CustomSet.parse(f"sts={tmp_path / 'mine.tsv'}")]
    tasks = collect(labelled, suites_named(["sts"]), own, EvalConfig())
    model = candidate_of("model", "here", Encoder.load(tiny(), pooling="mean"), Contamination({}))
    result = evaluate([model], tasks)
    seen = {"sts/mine": 0.9, "sts/STS12": 0.1, "sts/STS-B": 0.2}
    result = replace(result, models=[replace(result.models[0], contamination=seen)])
    average = next(score for score in result.scores if score.average)
    assert result.overlap_fraction(average, "model") == 0.2
    own_score = next(score for score in result.scores if score.set == "mine")
    assert result.overlap_fraction(own_score, "model") == 0.9


def test_pooling_is_given_to_those_that_do_not_say_theirs(tiny: Callable[..., Path], tmp_path: Path) -> None:
    Encoder.load(tiny(), pooling="mean").save(tmp_path / "says")
    opened = [open_candidate("m", str(model), LoadOptions(pooling="cls")) for model in (tmp_path / "says", tiny())]
    assert [candidate.about.pooling for candidate in opened] == ["mean", "cls"]


def test_a_scorer_that_gives_no_numbers_is_refused() -> None:
    class Broken:
        def score(self, pairs: Sequence[tuple[str, str]], **_: Any) -> NDArray[np.float64]:
            return np.full(len(pairs), np.nan)

    with pytest.raises(EvaluationError, match=r"no numbers \(NaN or infinity\) for 2 of 2 pairs"):
        PairScores(Broken()).similarities(["a", "b"], ["c", "d"])  # type: ignore[arg-type]


def test_sets_that_a_protocol_cannot_take_are_refused_before_the_work(tmp_path: Path, sentences: list[str]) -> None:
    rows = [f"{number % 2}\t{text}" for number, text in enumerate(sentences[:22])]
    (tmp_path / "few.tsv").write_text("\n".join(["label\ttext", *rows]) + "\n")
    few = [CustomSet.parse(f"transfer={tmp_path / 'few.tsv'}")]
    with pytest.raises(EvaluationError, match="a label has 11 rows; 10 folds within 10 folds need 12 of each"):
        collect(None, [], few, EvalConfig())
    assert collect(None, [], few, EvalConfig(transfer="fast")).tasks
    (tmp_path / "below.tsv").write_text(scored(sentences, 60, 5).replace("a\t", "a\t-"))
    with pytest.raises(EvaluationError, match="ranking below: a score is -"):
        collect(None, [], [CustomSet.parse(f"ranking={tmp_path / 'below.tsv'}")], EvalConfig())


def test_names_of_models_and_sets(tmp_path: Path) -> None:
    assert named(["a=x/y", "runs/z", "runs/q/model"]) == {"a": "x/y", "z": "runs/z", "q": "runs/q/model"}
    with pytest.raises(EvaluationError, match="two models are called z; name one: NAME=b/z"):
        named(["a/z", "b/z"])
    assert named(["z=a/z", "z=b/z", "one=c"]) == {"z, run 1": "a/z", "z, run 2": "b/z", "one": "c"}
    with pytest.raises(EvaluationError, match="two models are called z; name one"):
        named(["z=a/z", "z=a/z"])
    (tmp_path / "lr=3e-5" / "model").mkdir(parents=True)
    assert named([f"{tmp_path}/lr=3e-5/model", f"a={tmp_path}/lr=3e-5"]) == {
        "lr=3e-5": f"{tmp_path}/lr=3e-5/model",
        "a": f"{tmp_path}/lr=3e-5",
    }
    for none in ("", "a="):
        with pytest.raises(EvaluationError, match="names no model"):
            named([none])
    assert CustomSet.parse("sts:My set=a/b.tsv.gz") == CustomSet("sts", "My set", Path("a/b.tsv.gz"))
    assert CustomSet.parse("pairs=a/b.jsonl.gz").name == "b" and CustomSet.parse("retrieval=a/folder").name == "folder"
    for bad in ("sts", "sts=", "stt=x.tsv"):
        with pytest.raises(EvaluationError, match="expected SUITE=PATH or SUITE:NAME=PATH"):
            CustomSet.parse(bad)
    with pytest.raises(EvaluationError, match="no suite 'stss'; there are sts, transfer"):
        suites_named(["stss"])


def test_a_set_in_one_file_and_in_splits_is_refused(tmp_path: Path, sentences: list[str]) -> None:
    """What is trained on may not be what is measured on."""
    for split in ("all", "train", "test"):
        rows = [f"{number % 2}\t{text}" for number, text in enumerate(sentences[:60])]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["label\ttext", *rows]) + "\n")
    with pytest.raises(EvaluationError, match=r"holds all\.tsv.* beside other splits"):
        collect(None, [], [CustomSet.parse(f"transfer={tmp_path}")], EvalConfig())
    (tmp_path / "all.tsv").unlink()
    (task,) = collect(None, [], [CustomSet.parse(f"transfer={tmp_path}")], EvalConfig()).tasks
    assert task.suite == "transfer"


def test_nothing_to_measure_is_an_error(tmp_path: Path, sentences: list[str]) -> None:
    with pytest.raises(EvaluationError, match=r"nothing to measure: give --data .*STS12: no "):
        collect(tmp_path, suites_named(["sts"]), [], EvalConfig())
    with pytest.raises(EvaluationError, match="is no folder"):
        collect(tmp_path / "nowhere", suites_named(["sts"]), [], EvalConfig())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "set.tsv").write_text(scored(sentences, 20))
    twice = [CustomSet.parse(f"sts={tmp_path / name / 'set.tsv'}") for name in ("a", "b")]
    with pytest.raises(EvaluationError, match="two sets of suite sts are called set"):
        collect(None, [], twice, EvalConfig())
