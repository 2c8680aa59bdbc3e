"""Keys of what is cached or recorded: whatever changes the content changes the key, or a resumed run is refused."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, fields, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import AutoTokenizer

from distcse.errors import ResumeMismatchError, RunRecordError
from distcse.evaluation import collect
from distcse.evaluation.suites import CustomSet
from distcse.events import Reporter
from distcse.recipe import CorpusSection, Recipe
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.experiment import Experiment
from distcse.runs.mutual.experiment import MutualDistillation
from distcse.runs.mutual.phase_store import StoredScores
from distcse.storage import content_key, open_store
from distcse.teachers.embedding import identity_of
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.targets import TargetSpec
from distcse.text import Corpus, Pairs, PairTokenTable
from distcse.text.token_table import Reading, Tokenization
from tests.failures import fails_with
from tests.jobs import make_recipe
from tests.models import change_json, make_custom_code
from tests.pairs import make_mutual_recipe

MakeRecipe = Callable[..., Recipe]


@dataclass(frozen=True)
class Settings:
    content_name: ClassVar[str] = "settings"
    value: Any
    note: str = field(default="", compare=False)


def test_values_have_one_key_each() -> None:
    numbers = np.arange(4)
    values: list[Any] = [
        *(None, True, 1, 1.0, "1", "", "None", float("nan"), b"".hex() + "0"),
        *([], [[]], [""], ["a", "b"], ["a\nb"], ["ab"], [["a"], "b"], {"a": "b"}, {"a": None}, {1: 2.0}, {"x", "y"}),
        *(numbers, numbers.reshape(2, 2), numbers.astype(np.int32), np.array(["0", "1"]), Settings([1]), Settings("1")),
    ]
    keys = [content_key(value) for value in values]
    assert len(set(keys)) == len(values) and keys == [content_key(value) for value in values]
    assert content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1}) and content_key((1, 2)) == content_key([1, 2])
    assert content_key(Settings(1, "one")) == content_key(Settings(1, "other"))
    renamed = make_dataclass("Renamed", ["value"], namespace={"content_name": "settings"})
    assert content_key(renamed([1])) == content_key(Settings([1])), "the key of what users have stored"
    for value in (object(), make_dataclass("Unnamed", ["value"])(1)):
        with pytest.raises(TypeError):
            content_key([value])


def changes_of_files(folder: Path) -> dict[str, Callable[[], object]]:
    """Changes of a model folder, by name; each makes other vectors, or may."""
    weights = folder / "model.safetensors"
    return {
        "weights": lambda: weights.write_bytes(weights.read_bytes()[:-1] + b"x"),
        "config": lambda: change_json(folder / "config.json", layer_norm_eps=1e-3),
        "tokenizer": lambda: change_json(folder / "tokenizer_config.json", do_lower_case=False),
        "vocabulary": lambda: (folder / "words.tiktoken").write_text("IQ== 0"),
        "code": lambda: (folder / "own.py").write_text("changed = True"),
        "pooling": lambda: (folder / "modules.json").write_text("[]"),
    }


def test_a_teachers_table_depends_on_its_files_its_settings_and_the_sentences(
    recipe_with: MakeRecipe, sentences: list[str], tmp_path: Path
) -> None:
    model = make_custom_code(tmp_path / "own", sentences)
    recipe = recipe_with()
    source, cache = Path(str(recipe.corpus.path)), Path(recipe.storage.cache)
    section = recipe.teachers.encoders[0].model_copy(update={"backbone": str(model), "trust_remote_code": True})

    def identity(shard_rows: int = 100, **settings: Any) -> TableIdentity:
        corpus = Corpus.prepare(recipe.corpus, open_store(cache))
        return identity_of(section.model_copy(update=settings), corpus, shard_rows)

    first = identity()
    found = {
        "code that does not run": identity(trust_remote_code=False),
        "part size": identity(shard_rows=64),
        "pooling": identity(pooling="cls"),
        "length": identity(max_length=9),
        "prompt": identity(prompt="query: "),
        "precision": identity(precision="bf16"),
        "model": identity(backbone=str(recipe.teachers.encoders[1].backbone), trust_remote_code=False),
    }
    for name, lines in {
        "rows": sentences[1:],
        "order": sentences[::-1],
        "duplicates": [*sentences, sentences[0]],
    }.items():
        source.write_text("\n".join(lines) + "\n")
        found[name] = identity()
    source.write_text("\n".join(sentences) + "\n")
    for name, change in changes_of_files(model).items():
        change()
        found[f"file: {name}"] = identity()
    keys = [first.key, *(each.key for each in found.values())]
    assert len(set(keys)) == len(keys), [name for name, each in found.items() if keys.count(each.key) > 1]
    differing = {
        each.name
        for other in found.values()
        for each in fields(other)
        if getattr(other, each.name) != getattr(first, each.name)
    }
    assert differing == {each.name for each in fields(TableIdentity)} - {"format"}, "a field that no change reaches"


def test_tokens_depend_on_sentences_tokenizer_length_side_and_prompt_and_not_on_parts(
    tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    tokenizer, others = (AutoTokenizer.from_pretrained(tiny(kind)) for kind in ("bert", "roberta"))
    left = AutoTokenizer.from_pretrained(tiny("bert"), truncation_side="left")
    added = AutoTokenizer.from_pretrained(tiny("bert"))
    added.add_tokens(["guitar"])

    def corpus_of(lines: list[str]) -> Corpus:
        (tmp_path / "corpus.txt").write_text("\n".join(lines) + "\n")
        return Corpus.prepare(CorpusSection(path=str(tmp_path / "corpus.txt")), open_store(tmp_path / "cache"))

    first = Tokenization(corpus_of(sentences), tokenizer, {"text": Reading("", 16)}, open_store(tmp_path))
    changed = [
        replace(first, corpus=corpus_of(sentences[1:])),
        *(replace(first, tokenizer=other) for other in (others, left, added)),
        replace(first, readings={"text": Reading("", 15)}),
        replace(first, readings={"text": Reading("q: ", 16)}),
    ]
    assert len({each.store for each in (first, *changed)}) == 1 + len(changed)
    assert replace(first, part_rows=50).store == first.store
    pairs = Pairs.write(open_store(tmp_path / "pairs"), pairwise(sentences))
    fewer = Pairs.write(open_store(tmp_path / "fewer"), pairwise(sentences[:10]))
    for number, (of, by, length, both) in enumerate(
        [
            (pairs, tokenizer, 32, True),
            (fewer, tokenizer, 32, True),
            (pairs, others, 32, True),
            (pairs, left, 32, True),
            (pairs, tokenizer, 31, True),
            (pairs, tokenizer, 32, False),
        ]
    ):
        PairTokenTable.prepare(of, by, length, both, open_store(tmp_path))
        assert len([*(tmp_path / "pair_tokens").iterdir()]) == number + 1


def test_projections_depend_on_the_tables_and_the_teachers_weights(tmp_path: Path) -> None:
    identity = TableIdentity("m", "c", 25, "mean", 8, "", "fp32", 10)
    tables = [EmbeddingTable.at(open_store(tmp_path), replace(identity, model=name)) for name in ("m", "n")]
    targets = TargetSpec(tables, [1.0, 2.0])
    assert len({targets.key, replace(targets, tables=tables[::-1]).key, replace(targets, alphas=[1.0, 1.0]).key}) == 3
    assert replace(targets, alphas=[2.0, 4.0]).key == targets.key, "only the weights' shares matter"


LABELLED = {
    "sts": ("score\tsentence1\tsentence2", ["5\ta\tb", "1\tc\td", "2\te\tf"], "4\ta\tb"),
    "pairs": ("label\tsentence1\tsentence2", ["1\ta\tb", "0\tc\td", "1\te\tf"], "0\ta\tb"),
    "triplets": ("anchor\tpositive\tnegative", ["a\tb\tc", "d\te\tf", "g\th\ti"], "a\tc\tb"),
}


@pytest.mark.parametrize("suite", LABELLED)
def test_a_test_set_depends_on_its_sentences_labels_and_order(suite: str, tmp_path: Path) -> None:
    header, rows, other_label = LABELLED[suite]

    def key(lines: list[str], name: str = "set.tsv") -> str:
        file = tmp_path / name
        file.write_text("\n".join([header, *lines]))
        (found,) = collect(None, [], [replace(CustomSet.parse(f"{suite}={file}"), name="set")]).fingerprints().values()
        return found

    variants = [rows, [other_label, *rows[1:]], rows[::-1], [*rows, rows[0]], [f"{rows[0]}x", *rows[1:]]]
    assert len({key(lines) for lines in variants}) == len(variants)
    assert key(rows) == key(rows, "elsewhere.tsv")


def test_scores_of_a_phase_are_named_and_checked_by_their_content(tmp_path: Path) -> None:
    scores = np.linspace(0, 1, 9, dtype=np.float32)
    variants = [scores, scores[::-1].copy(), scores[:-1], np.append(scores, scores[-1]), np.nextafter(scores, 2)]
    stored = [StoredScores.write(open_store(tmp_path), "start-bert", each) for each in variants]
    assert len({each.name for each in stored}) == len({each.sha256 for each in stored}) == len(variants)
    for each, written in zip(variants, stored, strict=True):
        np.testing.assert_array_equal(written.read(), each)
    with fails_with(RunRecordError, "changed"):
        replace(stored[0], name=stored[4].name).read()


def replace_in(file: Path, old: str, new: str) -> None:
    text = gzip.decompress(file.read_bytes()).decode() if file.suffix == ".gz" else file.read_text()
    assert old in text
    changed = text.replace(old, new, 1).encode()
    file.write_bytes(gzip.compress(changed) if file.suffix == ".gz" else changed)


def assert_each_changes_one_key(
    experiment: Experiment[Any], folder: Path, changes: dict[str, tuple[str, Callable[[Path], None]]]
) -> None:
    """Change each file, check that only its key changes and that a run which recorded the keys refuses it, and restore it."""
    before, run = experiment.fingerprints(Reporter()), RunDirectory.create(experiment.recipe)
    assert before.keys() >= changes.keys()
    run.record(0, before)
    for name, (file, change) in changes.items():
        content = (folder / file).read_bytes()
        change(folder / file)
        after = experiment.fingerprints(Reporter())
        (folder / file).write_bytes(content)
        assert {key for key in before if before[key] != after[key]} == {name}
        with fails_with(ResumeMismatchError, name):
            run.record(0, after)
    run.record(0, {})  # an earlier record may have data that a resumed run does not read


def test_a_mutual_run_records_the_text_that_it_mines(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    pytest.importorskip("bm25s"), pytest.importorskip("faiss")
    models = {kind: shutil.copytree(tiny(kind), tmp_path / kind) for kind in ("bert", "roberta")}
    (tmp_path / "corpus.txt").write_text("\n".join(sentences))
    (tmp_path / "dev.tsv").write_text("score\tsentence1\tsentence2\n1\ta\tb\n3\tc\td\n5\te\tf")
    mined = f"pairs={{mine: {{corpus: {{path: '{tmp_path / 'corpus.txt'}'}}, pairs: 100, num_neighbors: 5}}}}"
    dev = f"evaluation.dev={tmp_path / 'dev.tsv'}"
    experiment = MutualDistillation(make_mutual_recipe(tmp_path / "recipe", models, sentences, mined, dev))
    changes: dict[str, tuple[str, Callable[[Path], None]]] = {
        "corpus": ("corpus.txt", lambda file: replace_in(file, "guitar", "violin")),
        "model of bert": ("bert/config.json", lambda file: change_json(file, layer_norm_eps=1e-3)),
        "dev set": ("dev.tsv", lambda file: replace_in(file, "\n1\t", "\n2\t")),
    }
    assert_each_changes_one_key(experiment, tmp_path, changes)


def test_a_run_records_its_data_labels_included_and_refuses_others(
    tmp_path: Path, tiny: Callable[..., Path], labelled: Path, sentences: list[str]
) -> None:
    student, teacher = (
        shutil.copytree(tiny(kind), tmp_path / to) for kind, to in (("bert", "student"), ("minilm", "teacher"))
    )
    data = shutil.copytree(labelled, tmp_path / "data")
    settings = (f"evaluation.data={data}", "evaluation.dev=stsb", "evaluation.final_suites=[sts, pairs]")
    experiment = Distillation(make_recipe(tmp_path, student, [teacher], sentences, *settings))
    changes: dict[str, tuple[str, Callable[[Path], None]]] = {
        "corpus": ("corpus.txt", lambda file: replace_in(file, "guitar", "violin")),
        "student": ("student/config.json", lambda file: change_json(file, layer_norm_eps=1e-3)),
        "teacher 0": ("teacher/tokenizer.json", lambda file: replace_in(file, "{", "{ ")),
        "dev set": ("data/sts/stsb/dev.tsv.gz", lambda file: replace_in(file, "5.00", "4.00")),
        "test set sts/STS-B": ("data/sts/stsb/test.tsv.gz", lambda file: replace_in(file, "5.00", "4.00")),
        "test set pairs/MRPC": ("data/pairs/mrpc/test.tsv", lambda file: replace_in(file, "\n1\t", "\n0\t")),
    }
    assert_each_changes_one_key(experiment, tmp_path, changes)
