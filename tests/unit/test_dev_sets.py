"""The dev sets that select checkpoints: STS-B dev, SICK-R trial, the mean of both, and sets of the user's."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

from distcse.checks import require
from distcse.errors import EvaluationDataError, EvaluationFormatError, InvalidValueError
from distcse.evaluation import (
    CustomDev,
    CustomSet,
    Dev,
    LabelledDev,
    VectorModel,
    collect,
    labelled_dev,
    read_dev,
    read_table,
)
from distcse.events import DevScore, Event, Reporter
from distcse.models import Encoder
from distcse.planning.costs import DEV_SENTENCES
from distcse.recipe import Recipe
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.preflight import recipe_questions
from tests.backends import run
from tests.failures import fails_with
from tests.labelled import scored
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def both(tmp_path: Path, labelled: Path, sentences: list[str]) -> Path:
    """A data folder with both dev sets."""
    folder = tmp_path / "data"
    shutil.copytree(labelled, folder)
    (folder / "sts" / "sickr").mkdir()
    (folder / "sts" / "sickr" / "trial.tsv.gz").write_bytes(gzip.compress(scored(sentences[40:], 60, 7).encode()))
    return folder


@pytest.fixture
def model(tiny: Callable[..., Path]) -> VectorModel:
    return VectorModel.of(Encoder.load(tiny("bert"), pooling="mean", max_length=16))


def test_the_published_dev_sets_have_their_published_sizes(data: Path) -> None:
    both = LabelledDev.read(data, "stsb_sickr").sets
    assert [(each.name, len(each.first)) for each in both] == [("STS-B dev", 1500), ("SICK-R trial", 500)]
    for name, sentences in DEV_SENTENCES.items():
        if name != "none":
            dev = LabelledDev.read(data, name)
            assert len(dev.first) + len(dev.second) == sentences


def test_the_score_of_two_dev_sets_is_the_mean_of_their_correlations(both: Path, model: VectorModel) -> None:
    dev = LabelledDev.read(both, "stsb_sickr")
    each = [LabelledDev.read(both, name) for name in ("stsb", "sickr")]
    correlations = [
        100 * spearmanr(model.similarities(pairs.first, pairs.second), pairs.gold).statistic for pairs in dev.sets
    ]
    assert dev.score(model) == pytest.approx(np.mean(correlations))
    assert [one.score(model) for one in each] == pytest.approx(correlations)
    assert dev.name == "mean of STS-B dev and SICK-R trial"
    assert each[0].fingerprint == labelled_dev(both).fingerprint != dev.fingerprint
    assert dev.first == each[0].first + each[1].first and dev.gold == each[0].gold + each[1].gold


def test_its_sentences_are_excluded_from_the_corpus_on_request(
    recipe_with: MakeRecipe, both: Path, sentences: list[str]
) -> None:
    def texts(dev: str) -> set[str]:
        overrides = ("corpus.exclude_evaluation=true", f"evaluation.data={both}", f"evaluation.dev={dev}")
        corpus = read_corpus(recipe_with(*overrides), Reporter())
        return set(corpus.texts(range(len(corpus))))

    trial = LabelledDev.read(both, "sickr")
    met = texts("stsb") & {*trial.first, *trial.second}
    assert met and not met & texts("stsb_sickr")


def test_a_missing_dev_set_is_named(recipe_with: MakeRecipe, labelled: Path) -> None:
    with fails_with(EvaluationDataError, "SICK-R trial", "trial.tsv.gz"):
        read_dev(recipe_with(f"evaluation.data={labelled}", "evaluation.dev=stsb_sickr"))
    with fails_with(InvalidValueError, "evaluation.dev is stsb_sickr", "evaluation.data"):
        require(recipe_questions(recipe_with("evaluation.dev=stsb_sickr")))


def write_triplets(file: Path, sentences: list[str], model: VectorModel) -> None:
    """Write triplets of which the model gets three of four right."""
    lines = ["anchor\tpositive\tnegative"]
    for row in range(40):
        anchor, one, other = sentences[row], sentences[row + 50], sentences[row + 100]
        near, far = model.similarities([anchor, anchor], [one, other])
        ordered = (one, other) if (near > far) == (row % 4 != 0) else (other, one)
        lines.append("\t".join((anchor, *ordered)))
    file.write_text("\n".join(lines))


def write_retrieval(folder: Path, sentences: list[str]) -> None:
    folder.mkdir()
    rows = [json.dumps({"id": f"d{row}", "text": text}) for row, text in enumerate(sentences[:60])]
    (folder / "corpus.jsonl").write_text("\n".join(rows))
    rows = [json.dumps({"id": f"q{row}", "text": text}) for row, text in enumerate(sentences[60:75])]
    (folder / "queries.jsonl").write_text("\n".join(rows))
    rows = [json.dumps({"query_id": f"q{row}", "corpus_id": f"d{3 * row}"}) for row in range(15)]
    (folder / "relevant.jsonl").write_text("\n".join(rows))


@pytest.fixture
def own(tmp_path: Path, sentences: list[str], model: VectorModel) -> dict[str, Path]:
    """Dev sets of the user's, by the name of their scores' measure."""
    folder = tmp_path / "own"
    folder.mkdir()
    write_triplets(folder / "triplets.tsv", sentences, model)
    (folder / "pairs.tsv").write_text(scored(sentences, 60, 4))
    lines = [f"{row % 2}\t{sentences[row]}\t{sentences[row + 90]}" for row in range(40)]
    (folder / "labels.tsv").write_text("\n".join(["label\tsentence1\tsentence2", *lines]))
    write_retrieval(folder / "search", sentences)
    files = {"accuracy": "triplets.tsv", "Spearman": "pairs.tsv", "AUC": "labels.tsv", "NDCG@10": "search"}
    return {measure: folder / name for measure, name in files.items()}


@pytest.mark.parametrize("measure", ["published", pytest.param("accuracy", marks=pytest.mark.slow), "NDCG@10"])
def test_a_student_is_selected_by_its_dev_set(
    recipe_with: MakeRecipe, both: Path, own: dict[str, Path], measure: str
) -> None:
    chosen = (f"evaluation.data={both}", "evaluation.dev=stsb_sickr")
    if measure != "published":
        chosen = (f"evaluation.dev={own[measure]}", "evaluation.data=null")
    recipe = recipe_with(*chosen, "evaluation.final_suites=[]", "evaluation.eval_steps=6", "training.max_steps=12")
    events: list[Event] = []
    result = run(recipe, Reporter(events.append))
    dev = read_dev(recipe) if measure == "published" else CustomDev.read(own[measure])
    assert dev is not None and (measure == "published" or dev.name.endswith(f", {measure}"))
    scores = [event.score for event in events if isinstance(event, DevScore) and event.name == dev.name]
    best = dev.score(VectorModel.of(Encoder.load(result.directory.model)))
    assert len(scores) == 3 and max(scores) == pytest.approx(best, abs=1e-3)


@pytest.mark.parametrize("measure", ["Spearman", "AUC"])
def test_pairs_of_the_user_are_scored_by_the_column_that_they_have(
    own: dict[str, Path], measure: str, model: VectorModel
) -> None:
    dev, table = CustomDev.read(own[measure]), read_table(own[measure])
    predicted = model.similarities(table.texts("sentence1"), table.texts("sentence2"))
    if measure == "Spearman":
        expected = spearmanr(predicted, table.numbers("score")).statistic
    else:
        expected = roc_auc_score(table.binary("label"), predicted)
    assert dev.name == f"own {own[measure].stem}, {measure}" and dev.score(model) == pytest.approx(100 * expected)


def test_the_accuracy_of_triplets_is_the_share_of_nearer_positives(own: dict[str, Path], model: VectorModel) -> None:
    dev = CustomDev.read(own["accuracy"])
    assert dev.score(model) == pytest.approx(75)
    assert len(dev.first) == len(dev.second) == 80 and dev.gold == [1.0] * 40 + [0.0] * 40


@pytest.mark.parametrize("dev", ["dev", "Validation", None])
def test_of_a_file_with_splits_only_the_dev_rows_are_read(tmp_path: Path, dev: str | None) -> None:
    """With tabs, and as CSV; sbert.net's stsbenchmark.tsv.gz has such a column."""
    splits = ["train", dev or "x", "test"] * 9
    rows = [[split, str(row), f"one {row}", f"other, {row}"] for row, split in enumerate(splits)]
    rows.insert(0, ["split", "score", "sentence1", "sentence2"])
    (tmp_path / "s.tsv").write_text("\n".join("\t".join(row) for row in rows))
    (tmp_path / "s.csv").write_text("\n".join(";".join(f'"{field}"' for field in row) for row in rows))
    for file in (tmp_path / "s.csv", tmp_path / "s.tsv"):
        if dev is None:
            with fails_with(EvaluationFormatError, file.name, "no 'dev'", "remove the column"):
                CustomDev.read(file)
            continue
        read = CustomDev.read(file)
        assert read.gold == [float(row) for row in range(1, 27, 3)] and "9 rows of split dev" in read.name
        assert read.second[0] == "other, 1"
    tasks = collect(None, [], [CustomSet.parse(f"sts={tmp_path / 's.csv'}")])
    (task,), (warning,) = tasks.tasks, tasks.warnings
    assert len([*task.sentences()]) == 18 and "9 of split test" in warning
    rows[2][1] = "x"
    (tmp_path / "s.tsv").write_text("\n".join("\t".join(row) for row in rows))
    if dev is not None:
        with fails_with(EvaluationFormatError, "s.tsv, line 3", "'x'"):
            CustomDev.read(tmp_path / "s.tsv")


def test_a_changed_document_changes_the_fingerprint(own: dict[str, Path]) -> None:
    before, file = CustomDev.read(own["NDCG@10"]).fingerprint, own["NDCG@10"] / "corpus.jsonl"
    rows = file.read_text().splitlines()
    file.write_text("\n".join([*rows[:-1], json.dumps({"id": "d59", "text": "another one"})]))
    assert CustomDev.read(own["NDCG@10"]).fingerprint != before


def test_a_group_is_selected_by_triplets_and_not_by_retrieval(
    own: dict[str, Path], tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    def dev_of(path: Path) -> Dev | None:
        return read_dev(make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, f"evaluation.dev={path}"))

    dev = dev_of(own["accuracy"])
    assert dev is not None and dev.name.endswith("accuracy")
    with fails_with(EvaluationFormatError, "evaluation.dev", "search", "pairs or triplets"):
        dev_of(own["NDCG@10"])


def test_a_dev_score_that_is_neither_a_name_nor_a_path_is_refused(
    recipe_with: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fails_with(InvalidValueError, "evaluation.dev", "'stsbb'", "stsb_sickr", "./stsbb.tsv"):
        recipe_with("evaluation.dev=stsbb")
    monkeypatch.chdir(tmp_path)
    assert recipe_with("evaluation.dev=dev.tsv").with_absolute_paths().dev_score == str(tmp_path / "dev.tsv")
    with fails_with(EvaluationDataError, "dev.tsv", "does not exist"):
        require(recipe_questions(recipe_with("evaluation.dev=./dev.tsv")))
    (tmp_path / "dev.tsv").write_text("text\nwords\n")
    with fails_with(EvaluationFormatError, "dev.tsv", "'score', 'label' or 'anchor'"):
        require(recipe_questions(recipe_with("evaluation.dev=./dev.tsv")))
