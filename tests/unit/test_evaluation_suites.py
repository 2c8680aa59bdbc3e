"""Complete evaluations: found and missing sets, comparisons of models, contamination."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from distcse.errors import (
    EvaluationDataError,
    EvaluationFormatError,
    EvaluationOptionError,
    EvaluationResultError,
    ModelOutputError,
)
from distcse.evaluation import (
    SUITES,
    Contamination,
    CustomSet,
    Evaluation,
    LoadOptions,
    collect,
    evaluate,
    make_candidate,
    open_candidate,
    parse_models,
    parse_suites,
)
from distcse.evaluation.models import PairScores
from distcse.models import Encoder
from tests.failures import fails_with
from tests.labelled import scored


def test_missing_sets_are_listed_and_other_sizes_are_warned_of(evaluation: Evaluation) -> None:
    assert sum(line.startswith("STS13: no ") for line in evaluation.missing) == 1
    assert any(line.startswith("QNLI: no ") for line in evaluation.missing)
    assert any(line.startswith("STS12: ") and "150 rows" in line and "3,108" in line for line in evaluation.warnings)
    averages = [score.set for score in evaluation.scores if score.average]
    assert set(averages) == {"average of 2 of 7"}  # a single set has no average


def test_averages_are_over_the_published_sets(evaluation: Evaluation) -> None:
    values = [evaluation.score("sts", name, "all", "wide") for name in ("STS12", "STS-B")]
    expected = np.mean([round(value, 2) for value in values])
    assert evaluation.score("sts", "average of 2 of 7", "all", "wide") == pytest.approx(expected)


def test_cross_encoders_are_measured_on_suites_of_pairs(evaluation: Evaluation) -> None:
    measured = {suite: {m for s in evaluation.scores if s.suite == suite for m in s.values} for suite in SUITES}
    for suite in ("sts", "pairs", "ranking"):
        assert measured[suite] == {"wide", "thin", "cross"}
    for suite in ("geometry", "retrieval"):
        assert measured[suite] == {"wide", "thin"}
    assert [info.kind for info in evaluation.models] == ["bi-encoder", "bi-encoder", "cross-encoder"]


def test_every_model_is_compared_with_every_other(evaluation: Evaluation) -> None:
    score = next(score for score in evaluation.scores if score.set == "STS-B" and score.measure == "all")
    assert len(score.comparisons) == 6
    gap, reverse = score.against("thin", "wide"), score.against("wide", "thin")
    assert gap is not None and reverse is not None and gap.value == pytest.approx(-reverse.value)
    assert gap.value == pytest.approx(score.values["thin"] - score.values["wide"])
    uniformity = next(score for score in evaluation.scores if score.measure == "uniformity")
    assert uniformity.comparisons == []  # it has no items to resample


def test_changed_neighbors_are_listed_by_gain(evaluation: Evaluation) -> None:
    changes = evaluation.neighbors["thin"]
    assert set(evaluation.neighbors) == {"thin"} and 0 < changes.changed <= changes.sentences
    gains = [entry.cosine_gain for entry in changes.examples]
    assert gains == sorted(gains, reverse=True) and all(entry.before != entry.after for entry in changes.examples)


def test_an_evaluation_survives_writing_and_reading(evaluation: Evaluation, tmp_path: Path) -> None:
    evaluation.write(tmp_path)
    again = Evaluation.read(tmp_path / "evaluation.json")
    assert json.dumps(again.models[0].__dict__) == json.dumps(evaluation.models[0].__dict__)
    assert again.scores[0].against("thin", "wide") == evaluation.scores[0].against("thin", "wide")
    before = (tmp_path / "evaluation.json").read_text()
    again.write(tmp_path)
    assert (tmp_path / "evaluation.json").read_text() == before
    (tmp_path / "other.json").write_text("{}")
    with fails_with(EvaluationResultError, "other.json"):
        Evaluation.read(tmp_path / "other.json")


def test_custom_sets_are_listed_but_not_averaged(
    labelled: Path, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.tsv").write_text(scored(sentences, 60, 5))
    custom = [CustomSet.parse(f"{suite}={tmp_path / 'mine.tsv'}") for suite in ("sts", "ranking", "geometry")]
    tasks = collect(labelled, parse_suites(["sts"]), custom, "wmean")
    result = evaluate([open_candidate("model", str(tiny()), LoadOptions(pooling="cls"))], tasks)
    assert result.scores[0].measure == "wmean"
    sts = [score.set for score in result.scores if score.suite == "sts" and score.measure == "wmean"]
    assert sts == ["STS12", "STS-B", "mine", "average of 2 of 7"]
    custom_only = collect(None, [], custom)
    assert [task.name for task in custom_only.tasks] == ["mine"] * 3 and custom_only.missing == []


def test_contamination_is_stored_with_the_model_and_marked_in_tables(
    labelled: Path, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    import shutil

    tasks = collect(labelled, parse_suites(["sts", "pairs"]), [])
    by_name = {task.name: list(task.sentences()) for task in tasks.tasks}
    corpus = [text.upper().replace(" ", "  ").rstrip(".") + "!" for text in by_name["STS12"]] + ["other words"]
    contamination = Contamination.measure(corpus, by_name.values())
    assert contamination.overlap_of(by_name["STS12"]) == 1
    share = contamination.overlap_of(by_name["MRPC"])
    assert share is not None and share == pytest.approx(
        len(set(by_name["MRPC"]) & set(by_name["STS12"])) / len(set(by_name["MRPC"]))
    )
    assert contamination.overlap_of(["never looked at"]) is None
    model = Path(shutil.copytree(tiny(), tmp_path / "model"))
    contamination.write(model)
    result = evaluate([open_candidate("model", str(model), LoadOptions(pooling="cls"))], tasks)
    assert result.models[0].contamination["sts/STS12"] == 1
    from distcse.report.grids import grids, legend

    sts = grids(result)[0]
    marks = dict(zip(sts.columns, [cell.mark for cell in sts.rows["model"]], strict=True))
    assert marks["STS12"] == "‡" and marks["average of 2 of 7"] == "‡"
    assert any("‡ model, sts STS12" in line and "100 %" in line for line in legend(result))


def test_an_averages_contamination_is_the_maximum_of_its_sets(
    labelled: Path, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    (tmp_path / "mine.tsv").write_text(scored(sentences, 60, 5))
    custom = [CustomSet.parse(f"sts={tmp_path / 'mine.tsv'}")]
    tasks = collect(labelled, parse_suites(["sts"]), custom)
    model = make_candidate("model", "here", Encoder.load(tiny(), pooling="mean"), Contamination({}))
    result = evaluate([model], tasks)
    shares = {"sts/mine": 0.9, "sts/STS12": 0.1, "sts/STS-B": 0.2}
    result = replace(result, models=[replace(result.models[0], contamination=shares)])
    average = next(score for score in result.scores if score.average)
    assert result.overlap_fraction(average, "model") == 0.2
    custom_score = next(score for score in result.scores if score.set == "mine")
    assert result.overlap_fraction(custom_score, "model") == 0.9


def test_the_pooling_option_applies_to_folders_without_one(tiny: Callable[..., Path], tmp_path: Path) -> None:
    Encoder.load(tiny(), pooling="mean").save(tmp_path / "with-pooling")
    folders = (tmp_path / "with-pooling", tiny())
    opened = [open_candidate("m", str(model), LoadOptions(pooling="cls")) for model in folders]
    assert [candidate.info.pooling for candidate in opened] == ["mean", "cls"]


def test_a_cross_encoder_that_outputs_nan_is_refused() -> None:
    class Broken:
        def score(self, pairs: Sequence[tuple[str, str]], **_: Any) -> NDArray[np.float64]:
            return np.full(len(pairs), np.nan)

    with fails_with(ModelOutputError, "2 of 2 pairs"):
        PairScores(Broken()).similarities(["a", "b"], ["c", "d"])  # type: ignore[arg-type]


def test_names_of_models_and_sets_are_parsed(tmp_path: Path) -> None:
    assert parse_models(["a=x/y", "runs/z", "runs/q/model"]) == {"a": "x/y", "z": "runs/z", "q": "runs/q/model"}
    with fails_with(EvaluationOptionError, "name z", "NAME=b/z"):
        parse_models(["a/z", "b/z"])
    assert parse_models(["z=a/z", "z=b/z", "one=c"]) == {"z, run 1": "a/z", "z, run 2": "b/z", "one": "c"}
    with fails_with(EvaluationOptionError, "name z", "NAME=a/z"):
        parse_models(["z=a/z", "z=a/z"])
    (tmp_path / "lr=3e-5" / "model").mkdir(parents=True)
    assert parse_models([f"{tmp_path}/lr=3e-5/model", f"a={tmp_path}/lr=3e-5"]) == {
        "lr=3e-5": f"{tmp_path}/lr=3e-5/model",
        "a": f"{tmp_path}/lr=3e-5",
    }
    for empty in ("", "a="):
        with fails_with(EvaluationOptionError, f"{empty!r}", "NAME=MODEL"):
            parse_models([empty])
    assert CustomSet.parse("sts:My set=a/b.tsv.gz") == CustomSet("sts", "My set", Path("a/b.tsv.gz"))
    assert CustomSet.parse("pairs=a/b.jsonl.gz").name == "b" and CustomSet.parse("retrieval=a/folder").name == "folder"
    for bad in ("sts", "sts=", "stt=x.tsv"):
        with fails_with(EvaluationOptionError, f"--add {bad}", "SUITE=PATH", "SUITE:NAME=PATH"):
            CustomSet.parse(bad)
    with fails_with(EvaluationOptionError, "'stss'", "sts, transfer"):
        parse_suites(["stss"])


def test_a_set_in_one_file_and_in_splits_is_refused(tmp_path: Path, sentences: list[str]) -> None:
    """Otherwise the classifier could be trained on test rows."""
    for split in ("all", "train", "test"):
        rows = [f"{number % 2}\t{text}" for number, text in enumerate(sentences[:60])]
        (tmp_path / f"{split}.tsv").write_text("\n".join(["label\ttext", *rows]) + "\n")
    with fails_with(EvaluationFormatError, str(tmp_path), "all.tsv"):
        collect(None, [], [CustomSet.parse(f"transfer={tmp_path}")])
    (tmp_path / "all.tsv").unlink()
    (task,) = collect(None, [], [CustomSet.parse(f"transfer={tmp_path}")]).tasks
    assert task.suite == "transfer"


def test_nothing_to_measure_is_an_error(tmp_path: Path, sentences: list[str]) -> None:
    with fails_with(EvaluationOptionError, "--data", "STS12: no "):
        collect(tmp_path, parse_suites(["sts"]), [])
    with fails_with(EvaluationDataError, str(tmp_path / "nowhere")):
        collect(tmp_path / "nowhere", parse_suites(["sts"]), [])
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "set.tsv").write_text(scored(sentences, 20))
    twice = [CustomSet.parse(f"sts={tmp_path / name / 'set.tsv'}") for name in ("a", "b")]
    with fails_with(EvaluationOptionError, "suite sts", "name set", "--add SUITE:NAME=PATH"):
        collect(None, [], twice)
