"""Dev sets, which select checkpoints, and the overlap of training text, dev set and test sets: counted, excluded on request."""

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
from distcse.errors import (
    CorpusTooSmallError,
    EvaluationDataError,
    EvaluationFormatError,
    EvaluationResultError,
    InvalidValueError,
)
from distcse.evaluation import (
    Contamination,
    CustomDev,
    CustomSet,
    Dev,
    LabelledDev,
    Tasks,
    VectorModel,
    collect,
    evaluation_sentences,
    labelled_dev,
    read_dev,
    read_table,
    refuse_test_as_dev,
)
from distcse.evaluation.contamination import OverlapCounts
from distcse.events import DevScore, Event, Reporter, StageProgress
from distcse.models import Encoder
from distcse.planning.costs import DEV_SENTENCES
from distcse.recipe import CorpusSection, Recipe
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.final_evaluation import contamination_of, labelled_tasks
from distcse.runs.distillation.preflight import recipe_questions
from distcse.runs.mutual.final_evaluation import labelled_tasks as checked_tasks
from distcse.storage import open_store
from distcse.text import Corpus, Excluded
from tests.backends import run, run_mutual
from tests.failures import fails_with
from tests.labelled import scored, write_retrieval
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


@pytest.fixture
def own(tmp_path: Path, sentences: list[str], model: VectorModel) -> dict[str, Path]:
    """Dev sets of the user's, by the name of their scores' measure."""
    folder = tmp_path / "own"
    folder.mkdir()
    write_triplets(folder / "triplets.tsv", sentences, model)
    (folder / "pairs.tsv").write_text(scored(sentences, 60, 4))
    lines = [f"{row % 2}\t{sentences[row]}\t{sentences[row + 90]}" for row in range(40)]
    (folder / "labels.tsv").write_text("\n".join(["label\tsentence1\tsentence2", *lines]))
    write_retrieval(folder / "search", sentences[60:75], sentences[:60])
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


def test_a_file_of_the_user_is_scored_by_the_columns_that_it_has(own: dict[str, Path], model: VectorModel) -> None:
    """The accuracy of triplets is the share of nearer positives."""
    table = read_table(own["Spearman"])
    cosines = model.similarities(table.texts("sentence1"), table.texts("sentence2"))
    expected = {"accuracy": 0.75, "Spearman": spearmanr(cosines, table.numbers("score")).statistic}
    table = read_table(own["AUC"])
    cosines = model.similarities(table.texts("sentence1"), table.texts("sentence2"))
    expected["AUC"] = roc_auc_score(table.binary("label"), cosines)
    for measure, score in expected.items():
        dev = CustomDev.read(own[measure])
        assert dev.name == f"own {own[measure].stem}, {measure}" and dev.score(model) == pytest.approx(100 * score)
    triplets = CustomDev.read(own["accuracy"])
    assert len(triplets.first) == len(triplets.second) == 80 and triplets.gold == [1.0] * 40 + [0.0] * 40


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


def test_a_changed_document_changes_the_fingerprint(own: dict[str, Path], sentences: list[str]) -> None:
    before, file = CustomDev.read(own["NDCG@10"]).fingerprint, own["NDCG@10"] / "corpus.tsv"
    file.write_text(file.read_text().replace(sentences[59], "another one"))
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


def test_exact_and_normalized_matches_are_counted_and_stored_with_the_model(tmp_path: Path) -> None:
    test = ["A dog runs.", "A cat sleeps.", "Nobody is here.", "?!"]
    found = Contamination.measure(["a DOG, runs", "A  cat sleeps.", "Something else."], [test])
    (counts,) = found.overlap_counts.values()
    assert (counts.sentences, counts.exact, counts.normalized) == (3, 1, 2)
    assert found.overlap_of(test) == pytest.approx(2 / 3)
    described = "of 3 labeled sentences the training text contains 1 exactly, 2 ignoring case and punctuation"
    assert found.describe(None) == described
    assert found.describe("corpus.KEY") == f"{described}; set corpus.KEY: true to leave them out"
    assert "none of 3 labeled sentences" in Contamination.measure(["Other."], [test]).describe("corpus.KEY")
    found.write(tmp_path)
    assert Contamination.read(tmp_path) == found
    for damaged in ("[", "[]", '{"a": 0.5}', '{"a": {}}', '{"a": {"share": "x"}}', '{"a": {"share": 1, "other": 2}}'):
        (tmp_path / "distcse" / "contamination.json").write_text(damaged)
        with fails_with(EvaluationResultError, "contamination.json"):
            Contamination.read(tmp_path)


def test_of_several_records_the_larger_shares_count() -> None:
    first = Contamination({"a": 0.5, "b": 0.1}, {"a": OverlapCounts(4, 1, 2)})
    second = Contamination({"a": 0.25, "b": 0.2}, {"b": OverlapCounts(5, 0, 1)})
    both = Contamination.of_several([first, second])
    assert both == Contamination({"a": 0.5, "b": 0.2}, {"a": OverlapCounts(4, 1, 2), "b": OverlapCounts(5, 0, 1)})


KNOWN = Contamination({"of an earlier run": 1.0})


@pytest.fixture
def contaminated(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A start that was trained on test sentences."""
    start = shutil.copytree(tiny("bert"), tmp_path / "contaminated")
    KNOWN.write(start)
    return start


def test_a_run_excludes_its_test_sentences_on_request_and_inherits_what_its_start_was_trained_on(
    contaminated: Path, recipe_with: MakeRecipe, labelled: Path, sentences: list[str]
) -> None:
    recipe = recipe_with(
        "training.max_steps=2",
        f"student.backbone={contaminated}",
        f"evaluation.data={labelled}",
        "evaluation.final_suites=[sts, pairs]",
        "evaluation.num_heldout=2",
        "training.batch_size=4",
        "corpus.exclude_evaluation=true",
    )
    varied = sentences[0].upper().replace(".", " !")
    others = (f"Xylophone {number} plays quietly." for number in range(40))
    Path(str(recipe.corpus.path)).write_text("\n".join([*sentences, varied, *others]) + "\n")
    events: list[Event] = []
    result = run(recipe, Reporter(events.append))
    stages = (event for event in events if isinstance(event, StageProgress))
    assert "contains none of" in next(event.note for event in stages if event.name == "contamination")
    found = Contamination.read(result.directory.model).overlap
    assert found.items() > KNOWN.overlap.items() and sorted({*found.values()}) == [0, 1]
    (contaminated / "distcse" / "contamination.json").write_text("[")
    with fails_with(EvaluationResultError, str(contaminated)):
        labelled_tasks(recipe)


@pytest.mark.slow
def test_groups_inherit_what_their_starts_were_trained_on(
    contaminated: Path, tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    changes = ("mutual.cycles=1", "mutual.initialization=sequential", "evaluation.dev=none", "bi.epochs=1")
    models = {"seen": contaminated, "clean": tiny("minilm")}
    result = run_mutual(make_mutual_recipe(tmp_path / "mutual", models, sentences, *changes), Reporter())
    found = {(best.group, best.kind): Contamination.read(best.model).overlap for best in result.best}
    kinds = ("bi", "cross")
    assert found == {("seen", kind): KNOWN.overlap for kind in kinds} | {("clean", kind): {} for kind in kinds}


@pytest.mark.parametrize("is_excluded", [False, True])
@pytest.mark.parametrize("is_published", [False, True])
def test_dev_sets_are_counted_and_excluded_as_other_labelled_sets(
    recipe_with: MakeRecipe, sentences: list[str], both: Path, tmp_path: Path, is_published: bool, is_excluded: bool
) -> None:
    (tmp_path / "dev.tsv").write_text(scored(sentences, 20, 4))
    recipe = recipe_with(
        f"evaluation.dev={'stsb_sickr' if is_published else tmp_path / 'dev.tsv'}",
        f"evaluation.data={both if is_published else 'null'}",
        f"corpus.exclude_evaluation={str(is_excluded).lower()}",
        "evaluation.num_heldout=3",
    )
    corpus, dev = read_corpus(recipe, Reporter()), read_dev(recipe)
    assert dev is not None
    events: list[Event] = []
    found = contamination_of(recipe, corpus, Tasks(), Reporter(events.append))
    share = found.overlap_of([*dev.first, *dev.second])
    assert share is not None and (share > 0.8) != is_excluded and (share > 0) != is_excluded
    assert bool({*dev.first, *dev.second} & {*corpus.texts(range(len(corpus)))}) != is_excluded
    assert is_published or corpus.excluded_rows == (len({*dev.first, *dev.second}) if is_excluded else 0)
    (event,) = events
    assert isinstance(event, StageProgress) and "compared with 1 labeled set" in event.note
    assert ("exactly" in event.note and "corpus.exclude_evaluation" in event.note) != is_excluded


def test_excluded_rows_are_left_out_of_the_corpus(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = ["one", "two", "Three!", "four"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    section = CorpusSection(path=str(file))
    full = Corpus.prepare(section, open_store(tmp_path / "cache"))
    filtered = Corpus.prepare(section, open_store(tmp_path / "cache"), excluded=Excluded.of(["THREE", "two."]))
    assert filtered.texts(range(2)) == ["one", "four"] and filtered.excluded_rows == 2
    assert len(full) == 4 and full.fingerprint != filtered.fingerprint
    assert Corpus.prepare(section, open_store(tmp_path / "cache"), excluded=Excluded.of(["two.", "THREE"])).reused
    with fails_with(CorpusTooSmallError, "4"):
        Corpus.prepare(section, open_store(tmp_path / "cache"), excluded=Excluded.of(rows))


def test_dev_and_all_test_sets_are_excluded(labelled: Path, tmp_path: Path) -> None:
    section = CorpusSection(path="x.txt", exclude_evaluation=True)
    excluded = evaluation_sentences(section, labelled, ["from elsewhere"])
    assert excluded is not None and excluded.holds("From elsewhere") and not excluded.holds("Xylophone.")
    assert all(map(excluded.holds, labelled_dev(labelled).unique))
    for task in collect(labelled, ["sts", "pairs"], []).tasks:
        assert all(map(excluded.holds, task.sentences()))
    assert evaluation_sentences(CorpusSection(path="x.txt"), labelled) is None
    with fails_with(EvaluationDataError, "corpus.exclude_evaluation", str(tmp_path), "evaluation.data"):
        evaluation_sentences(section, tmp_path)
    (tmp_path / "sts" / "stsb").mkdir(parents=True)
    shutil.copy(labelled / "sts" / "stsb" / "dev.tsv.gz", tmp_path / "sts" / "stsb")
    excluded = evaluation_sentences(section, tmp_path)
    assert excluded is not None and all(map(excluded.holds, labelled_dev(labelled).unique))
    write_retrieval(tmp_path / "search" / "retrieval" / "mine", ["a question"], ["an answer"])
    excluded = evaluation_sentences(section, tmp_path / "search")
    assert excluded is not None and excluded.holds("A question?") and excluded.holds("an answer")


def test_a_test_set_is_a_dev_set_only_with_dev_is_test(tmp_path: Path, recipe_with: MakeRecipe, labelled: Path) -> None:
    data = shutil.copytree(labelled, tmp_path / "data")
    shutil.copy(data / "sts" / "stsb" / "test.tsv.gz", data / "sts" / "stsb" / "dev.tsv.gz")
    overrides = (f"evaluation.data={data}", "evaluation.final_suites=[sts]", "training.max_steps=1")
    with fails_with(InvalidValueError, "100 %", "STS-B", "evaluation.dev", "evaluation.dev_is_test: true"):
        run(recipe_with(*overrides), Reporter())
    assert not any(file.is_file() for folder in ("runs", "cache") for file in (tmp_path / folder).rglob("*"))
    assert labelled_tasks(recipe_with(*overrides, "evaluation.dev_is_test=true")).tasks


def test_mutual_distillation_refuses_a_test_set_as_dev_set(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], labelled: Path
) -> None:
    """Reordered and in capitals, with the sides exchanged: still the same pairs."""
    test = gzip.decompress((labelled / "sts" / "sts12" / "test.tsv.gz").read_bytes()).decode()
    header, *rows = [line.split("\t") for line in test.splitlines()]
    changed = [[subset, score, second.upper(), first] for subset, score, first, second in reversed(rows)]
    (tmp_path / "my-dev.tsv").write_text("\n".join("\t".join(row) for row in [header, *changed]))
    sets = (f"evaluation.data={labelled}", f"evaluation.dev={tmp_path}/my-dev.tsv")
    overrides = (*sets, "evaluation.final_suites=[sts]")
    with fails_with(InvalidValueError, "STS12", "evaluation.dev_is_test: true"):
        checked_tasks(make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *overrides))
    allowed = make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *overrides, "evaluation.dev_is_test=true")
    assert checked_tasks(allowed).tasks


def test_the_published_dev_set_is_disjoint_from_the_published_test_sets(data: Path) -> None:
    dev = labelled_dev(data)
    refuse_test_as_dev(dev.first, dev.second, collect(data, ["sts", "pairs"], []), False)
