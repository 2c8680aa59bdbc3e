"""What is learned from, what chooses and what is measured on: counted where they meet, and kept apart where asked."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.data import Corpus, Excluded
from distcse.errors import CorpusError, EvaluationError, RecipeError
from distcse.evaluation import Contamination, EvalConfig, collect, excluded_from, labelled_dev, refuse_test_as_dev
from distcse.events import Event, Reporter, StageProgress
from distcse.experiments.distillation.run import run
from distcse.experiments.mutual.final_evaluation import checked_tasks
from distcse.recipe import CorpusSection, Recipe
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., Recipe]


def test_exact_and_alike_sentences_are_counted_apart() -> None:
    test = ["A dog runs.", "A cat sleeps.", "Nobody is here.", "?!"]
    found = Contamination.measure(["a DOG, runs", "A  cat sleeps.", "Something else."], [test])
    (met,) = found.overlap_counts.values()
    assert (met.sentences, met.exact, met.alike) == (3, 1, 2)
    assert found.of(test) == pytest.approx(2 / 3)
    assert "of 3 test sentences 1 were in the training text word for word, 2 but for case" in found.describe
    assert Contamination.measure(["Other."], [test]).describe == "none of 3 test sentences was in the training text"


def test_counts_go_with_the_model_and_old_files_are_read(tmp_path: Path) -> None:
    found = Contamination.measure(["A dog runs."], [["A dog runs.", "A cat."]])
    found.write(tmp_path)
    assert Contamination.read(tmp_path) == found
    file = tmp_path / "distcse" / "exposure.json"
    (mark,) = found.overlap
    file.write_text(json.dumps({mark: 0.5}))
    assert Contamination.read(tmp_path) == Contamination({mark: 0.5})
    for damaged in ("[", "[]", '{"a": {}}', '{"a": {"share": "x"}}', '{"a": {"share": 1, "other": 2}}'):
        file.write_text(damaged)
        with pytest.raises(EvaluationError, match=r"exposure\.json cannot be read"):
            Contamination.read(tmp_path)


def test_a_run_leaves_out_what_it_will_be_measured_on(
    recipe_with: MakeRecipe, labelled: Path, sentences: list[str]
) -> None:
    recipe = recipe_with(
        "training.max_steps=2",
        f"evaluation.data={labelled}",
        "evaluation.final_suites=[sts, pairs]",
        "evaluation.num_heldout=2",
        "training.batch_size=4",
    )
    corpus = Path(str(recipe.corpus.path))
    corpus.write_text("\n".join([*sentences, sentences[0].upper().replace(".", " !"), *map(strange, range(40))]) + "\n")
    told: dict[bool, str] = {}
    for excludes in (False, True):
        events: list[Event] = []
        section = recipe.corpus.model_copy(update={"exclude_evaluation": excludes})
        result = run(recipe.model_copy(update={"corpus": section}), Reporter(events.append))
        told[excludes] = next(
            event.note for event in events if isinstance(event, StageProgress) and event.name == "exposure"
        )
        exposure = Contamination.read(result.directory.model)
        assert all((share > 0) != excludes for share in exposure.overlap.values())
    assert "word for word" in told[False] and "corpus.exclude_evaluation" in told[False]
    assert "was in the training text" in told[True]


def strange(number: int) -> str:
    return f"Xylophone {number} plays quietly."


def test_rows_keep_their_domains_when_others_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    rows = [("one", "a"), ("two", "b"), ("Three!", "c"), ("four", "d")]
    file.write_text("".join(json.dumps({"text": text, "of": domain}) + "\n" for text, domain in rows))
    section = CorpusSection(path=str(file), domain="of")
    whole = Corpus.prepare(section, tmp_path / "cache")
    some = Corpus.prepare(section, tmp_path / "cache", excluded=Excluded.of(["THREE", "two."]))
    assert some.texts(range(2)) == ["one", "four"] and some.excluded_rows == 2
    assert [some.domains[number] for number in some.domain_ids(range(2))] == ["a", "d"]  # type: ignore[arg-type]
    assert len(whole) == 4 and whole.fingerprint != some.fingerprint
    assert Corpus.prepare(section, tmp_path / "cache", excluded=Excluded.of(["two.", "THREE"])).reused
    with pytest.raises(CorpusError, match=r"no sentence that is not in the evaluation \(4 are\)"):
        Corpus.prepare(section, tmp_path / "cache", excluded=Excluded.of([text for text, _ in rows]))


def test_excluding_takes_dev_and_all_test_sets(labelled: Path) -> None:
    asked = CorpusSection(path="x.txt", exclude_evaluation=True)
    excluded = excluded_from(asked, str(labelled), ["from elsewhere"])
    assert excluded is not None and excluded.holds("From elsewhere")
    assert all(map(excluded.holds, labelled_dev(labelled).unique))
    for task in collect(labelled, ["sts", "pairs"], [], EvalConfig()).tasks:
        assert all(map(excluded.holds, task.sentences()))
    assert not excluded.holds("Xylophone.")
    assert excluded_from(CorpusSection(path="x.txt"), str(labelled)) is None


def test_excluding_takes_a_dev_set_alone(labelled: Path, tmp_path: Path) -> None:
    asked = CorpusSection(path="x.txt", exclude_evaluation=True)
    with pytest.raises(EvaluationError, match=r"exclude_evaluation: .* holds no labelled set"):
        excluded_from(asked, str(tmp_path))
    (tmp_path / "sts" / "stsb").mkdir(parents=True)
    dev = next((labelled / "sts" / "stsb").glob("dev.tsv*"))
    shutil.copy(dev, tmp_path / "sts" / "stsb" / dev.name)
    excluded = excluded_from(asked, str(tmp_path))
    assert excluded is not None and all(map(excluded.holds, labelled_dev(labelled).unique))


def test_excluding_wants_labelled_sets(recipe_with: MakeRecipe) -> None:
    with pytest.raises(
        RecipeError, match="exclude_evaluation leaves out the sentences of labelled sets; write evaluation"
    ):
        recipe_with("corpus.exclude_evaluation=true")


def test_a_test_set_is_no_dev_set_unless_the_recipe_says_so(
    tmp_path: Path, recipe_with: MakeRecipe, labelled: Path
) -> None:
    import shutil

    data = shutil.copytree(labelled, tmp_path / "data")
    (data / "sts" / "stsb" / "dev.tsv.gz").write_bytes((data / "sts" / "stsb" / "test.tsv.gz").read_bytes())
    overrides = (f"evaluation.data={data}", "evaluation.final_suites=[sts]", "training.max_steps=1")
    with pytest.raises(RecipeError, match=r"the dev set holds 100 % of the pairs of test set STS-B.*dev_is_test: true"):
        run(recipe_with(*overrides), Reporter())
    assert not any(file.is_file() for folder in ("runs", "cache") for file in (tmp_path / folder).rglob("*"))
    assert run(recipe_with(*overrides, "evaluation.dev_is_test=true"), Reporter()).evaluation is not None


def test_groups_may_not_choose_by_a_test_set_either(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], labelled: Path
) -> None:
    test = gzip.decompress((labelled / "sts" / "sts12" / "test.tsv.gz").read_bytes()).decode()
    turned = tmp_path / "my-dev.tsv"
    header, *rows = test.splitlines()
    columns = header.split("\t")
    one, other = columns.index("sentence1"), columns.index("sentence2")
    lines = []
    for row in rows:  # in another order, in capitals: still the same pairs
        fields = row.split("\t")
        fields[one], fields[other] = fields[other].upper(), fields[one]
        lines.append("\t".join(fields))
    turned.write_text("\n".join([header, *reversed(lines)]))
    overrides = (f"evaluation.data={labelled}", f"evaluation.dev={turned}", "evaluation.final_suites=[sts]")
    with pytest.raises(RecipeError, match="of the pairs of test set STS12"):
        checked_tasks(make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *overrides))
    meant = make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *overrides, "evaluation.dev_is_test=true")
    assert checked_tasks(meant).tasks


def test_the_published_dev_set_is_apart_from_the_published_tests(data: Path) -> None:
    dev = labelled_dev(data)
    refuse_test_as_dev(dev.first, dev.second, collect(data, ["sts", "pairs"], [], EvalConfig()), False)
