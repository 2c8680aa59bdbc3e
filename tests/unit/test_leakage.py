"""Overlap of training data, dev set and test sets: counted, and excluded on request."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.errors import CorpusTooSmallError, EvaluationDataError, EvaluationResultError, InvalidValueError
from distcse.evaluation import (
    Contamination,
    Tasks,
    collect,
    evaluation_sentences,
    labelled_dev,
    read_dev,
    refuse_test_as_dev,
)
from distcse.evaluation.contamination import OverlapCounts
from distcse.events import Event, Reporter, StageProgress
from distcse.recipe import CorpusSection, Recipe
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.final_evaluation import contamination_of, labelled_tasks
from distcse.runs.mutual.final_evaluation import labelled_tasks as checked_tasks
from distcse.storage import open_store
from distcse.text import Corpus, Excluded
from tests.backends import run, run_mutual
from tests.failures import fails_with
from tests.labelled import scored
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., Recipe]


def test_exact_and_normalized_matches_are_counted_and_stored_with_the_model(tmp_path: Path) -> None:
    test = ["A dog runs.", "A cat sleeps.", "Nobody is here.", "?!"]
    found = Contamination.measure(["a DOG, runs", "A  cat sleeps.", "Something else."], [test])
    (counts,) = found.overlap_counts.values()
    assert (counts.sentences, counts.exact, counts.normalized) == (3, 1, 2)
    assert found.overlap_of(test) == pytest.approx(2 / 3)
    described = "of 3 labelled sentences the training text contains 1 exactly, 2 ignoring case and punctuation"
    assert found.describe(None) == described
    assert found.describe("corpus.KEY") == f"{described}; set corpus.KEY: true to leave them out"
    assert "none of 3 labelled sentences" in Contamination.measure(["Other."], [test]).describe("corpus.KEY")
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
def test_a_dev_file_of_yours_is_counted_and_excluded_as_other_labelled_sets(
    recipe_with: MakeRecipe, sentences: list[str], tmp_path: Path, is_excluded: bool
) -> None:
    (tmp_path / "dev.tsv").write_text(scored(sentences, 20, 4))
    recipe = recipe_with(
        f"evaluation.dev={tmp_path}/dev.tsv",
        f"corpus.exclude_evaluation={str(is_excluded).lower()}",
        "evaluation.num_heldout=3",
    )
    corpus, dev = read_corpus(recipe, Reporter()), read_dev(recipe)
    assert dev is not None
    events: list[Event] = []
    found = contamination_of(recipe, corpus, Tasks(), Reporter(events.append))
    share = found.overlap_of([*dev.first, *dev.second])
    assert share is not None and (share > 0.8) != is_excluded and (share > 0) != is_excluded
    assert corpus.excluded_rows == (len({*dev.first, *dev.second}) if is_excluded else 0)
    (event,) = events
    assert isinstance(event, StageProgress) and "compared with 1 labelled set" in event.note
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
    excluded = evaluation_sentences(section, str(labelled), ["from elsewhere"])
    assert excluded is not None and excluded.holds("From elsewhere") and not excluded.holds("Xylophone.")
    assert all(map(excluded.holds, labelled_dev(labelled).unique))
    for task in collect(labelled, ["sts", "pairs"], []).tasks:
        assert all(map(excluded.holds, task.sentences()))
    assert evaluation_sentences(CorpusSection(path="x.txt"), str(labelled)) is None
    with fails_with(EvaluationDataError, "corpus.exclude_evaluation", str(tmp_path), "evaluation.data"):
        evaluation_sentences(section, str(tmp_path))
    (tmp_path / "sts" / "stsb").mkdir(parents=True)
    shutil.copy(labelled / "sts" / "stsb" / "dev.tsv.gz", tmp_path / "sts" / "stsb")
    excluded = evaluation_sentences(section, str(tmp_path))
    assert excluded is not None and all(map(excluded.holds, labelled_dev(labelled).unique))


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
