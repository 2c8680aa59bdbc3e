"""Complete evaluations: labeled files of all formats, found and missing sets, comparisons of models, contamination."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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
    VectorModel,
    collect,
    evaluate,
    open_candidate,
    parse_models,
    parse_suites,
)
from distcse.evaluation.models import PairScores
from distcse.evaluation.tables import Table, read_table
from distcse.evaluation.tasks.transfer import Labelled
from distcse.models import Encoder
from distcse.report.grids import grids, legend
from tests.failures import fails_with
from tests.labelled import scored


def test_averages_are_over_the_published_sets_that_are_there(evaluation: Evaluation) -> None:
    assert sum(line.startswith("STS13: no ") for line in evaluation.missing) == 1
    assert any(line.startswith("QNLI: no ") for line in evaluation.missing)
    assert any(line.startswith("STS12: ") and "150 rows" in line and "3,108" in line for line in evaluation.warnings)
    assert {score.set for score in evaluation.scores if score.average} == {"average of 2 of 7"}  # not of a single set
    values = [evaluation.score("sts", name, "all", "wide") for name in ("STS12", "STS-B")]
    expected = np.mean([round(value, 2) for value in values])
    assert evaluation.score("sts", "average of 2 of 7", "all", "wide") == pytest.approx(expected)


def test_every_model_is_compared_with_every_other_on_the_suites_that_apply(evaluation: Evaluation) -> None:
    measured = {suite: {m for s in evaluation.scores if s.suite == suite for m in s.values} for suite in SUITES}
    vectors, pairs = {"wide", "thin"}, {"wide", "thin", "cross"}
    assert measured == {**dict.fromkeys(SUITES, pairs), "geometry": vectors, "retrieval": vectors, "transfer": set()}
    score = next(score for score in evaluation.scores if score.set == "STS-B" and score.measure == "all")
    gap, reverse = score.against("thin", "wide"), score.against("wide", "thin")
    assert gap is not None and reverse is not None and gap.value == pytest.approx(-reverse.value)
    assert gap.value == pytest.approx(score.values["thin"] - score.values["wide"]) and len(score.comparisons) == 6
    uniformity = next(score for score in evaluation.scores if score.measure == "uniformity")
    assert uniformity.comparisons == []  # it has no items to resample


def test_an_evaluation_survives_writing_and_reading(evaluation: Evaluation, tmp_path: Path) -> None:
    evaluation.write(tmp_path)
    again = Evaluation.read(tmp_path / "evaluation.json")
    assert again.models == evaluation.models and again.scores == evaluation.scores
    before = (tmp_path / "evaluation.json").read_text()
    again.write(tmp_path)
    assert (tmp_path / "evaluation.json").read_text() == before
    (tmp_path / "other.json").write_text("{}")
    with fails_with(EvaluationResultError, "other.json"):
        Evaluation.read(tmp_path / "other.json")


def test_contamination_is_marked_in_tables_of_published_and_custom_sets(
    labelled: Path, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    """A custom set is listed, and not part of the average, whose contamination is the maximum of its sets."""
    (tmp_path / "mine.tsv").write_text(scored(sentences, 60, 5))
    tasks = collect(labelled, parse_suites(["sts"]), [CustomSet.parse(f"sts={tmp_path / 'mine.tsv'}")], "wmean")
    texts = {task.name: list(task.sentences()) for task in tasks.tasks}
    corpus = [text.upper().replace(" ", "  ").rstrip(".") + "!" for text in texts["STS12"]] + ["other words"]
    contamination = Contamination.measure(corpus, texts.values())
    share = len({*texts["mine"]} & {*texts["STS12"]}) / len({*texts["mine"]})
    assert contamination.overlap_of(texts["STS12"]) == 1 and contamination.overlap_of(["never looked at"]) is None
    assert contamination.overlap_of(texts["mine"]) == pytest.approx(share)
    model = Path(shutil.copytree(tiny(), tmp_path / "model"))
    contamination.write(model)
    result = evaluate([open_candidate("model", str(model), LoadOptions(pooling="cls"))], tasks)
    scores = {score.set: score for score in result.scores if score.measure == "wmean"}
    assert [*scores] == ["STS12", "STS-B", "mine", "average of 2 of 7"] and result.scores[0].measure == "wmean"
    cells = dict(zip(grids(result)[0].columns, grids(result)[0].rows["model"], strict=True))
    assert cells["STS12"].mark == cells["average of 2 of 7"].mark == "‡"
    assert any("‡ model, sts STS12" in line and "100 %" in line for line in legend(result))
    shares = {"sts/mine": 0.9, "sts/STS12": 0.1, "sts/STS-B": 0.2}
    result = replace(result, models=[replace(result.models[0], contamination=shares)])
    assert result.overlap_fraction(scores["average of 2 of 7"], "model") == 0.2
    assert result.overlap_fraction(scores["mine"], "model") == 0.9


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
    assert parse_models(["z=a/z", "z=b/z", "one=c"]) == {"z, run 1": "a/z", "z, run 2": "b/z", "one": "c"}
    model = tmp_path / "lr=3e-5" / "model"
    model.mkdir(parents=True)
    assert parse_models([str(model), f"a={model.parent}"]) == {"lr=3e-5": str(model), "a": str(model.parent)}
    assert CustomSet.parse("sts:My set=a/b.tsv.gz") == CustomSet("sts", "My set", Path("a/b.tsv.gz"))
    assert CustomSet.parse("pairs=a/b.jsonl.gz").name == "b" and CustomSet.parse("retrieval=a/folder").name == "folder"


@pytest.mark.parametrize(
    ("parse", "text", "named"),
    [
        (parse_models, ["a/z", "b/z"], ["name z", "NAME=b/z"]),
        (parse_models, ["z=a/z", "z=a/z"], ["name z", "NAME=a/z"]),
        (parse_models, [""], ["''", "NAME=MODEL"]),
        (parse_models, ["a="], ["'a='", "NAME=MODEL"]),
        *(
            (CustomSet.parse, text, [f"--add {text}", "SUITE=PATH", "SUITE:NAME=PATH"])
            for text in ("sts", "sts=", "stt=x")
        ),
        (parse_suites, ["stss"], ["'stss'", "sts, transfer"]),
    ],
)
def test_names_that_cannot_be_parsed(parse: Callable[[Any], object], text: Any, named: list[str]) -> None:
    with fails_with(EvaluationOptionError, *named):
        parse(text)


def test_sets_that_cannot_be_collected(tmp_path: Path, sentences: list[str]) -> None:
    labels = "\n".join(["label\ttext", *(f"{number % 2}\t{text}" for number, text in enumerate(sentences[:60]))])
    for folder in ("a", "b", "folds"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "set.tsv").write_text(scored(sentences, 20))
    for split in ("all", "train", "test"):
        (tmp_path / "folds" / f"{split}.tsv").write_text(labels)
    equal = [CustomSet.parse(f"sts={tmp_path}/{folder}/set.tsv") for folder in ("a", "b")]
    with fails_with(EvaluationOptionError, "--data", "STS12: no "):
        collect(tmp_path, ["sts"], [])
    with fails_with(EvaluationDataError, "nowhere"):
        collect(tmp_path / "nowhere", ["sts"], [])
    with fails_with(EvaluationOptionError, "suite sts", "name set", "--add SUITE:"):
        collect(None, ["sts"], equal)
    with fails_with(EvaluationFormatError, "folds", "all.tsv"):  # a classifier could train on test rows
        collect(None, [], [CustomSet.parse(f"transfer={tmp_path}/folds")])


SCORED, LABELLED = "score\tsentence1\tsentence2\n", "label\tsentence1\tsentence2\n"
ROWS = [("1.5", "A cat.", "A dog"), ("4", "", 'He said "no".')]


@pytest.mark.parametrize("kind", [".tsv", ".windows.tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet"])
def test_all_formats_are_read_alike(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"set{kind}"
    objects = [dict(zip(SCORED.split(), row, strict=True)) for row in ROWS]
    if kind == ".parquet":
        pq.write_table(pa.Table.from_pylist([{**o, "score": float(o["score"])} for o in objects]), file)
    else:
        lines = [json.dumps(o) for o in objects] if "jsonl" in kind else [SCORED.rstrip(), *map("\t".join, ROWS)]
        content = "\n".join(lines).encode()
        if "windows" in kind:  # with a byte order mark and Windows line ends
            content = "\r\n".join(["\ufeff" + lines[0], *lines[1:], "", ""]).encode()
        file.write_bytes(gzip.compress(content) if kind.endswith(".gz") else content)
    table = read_table(file)
    assert table.texts("sentence1") == ["A cat.", "."]  # SentEval's text for an empty sentence
    assert table.texts("sentence2") == ["A dog", 'He said "no".']
    np.testing.assert_array_equal(table.numbers("score"), [1.5, 4.0])


@pytest.mark.parametrize(
    ("added", "content", "named"),
    [
        ("sts=s.tsv", "", ["is empty"]),
        ("sts=s.tsv", SCORED, ["header", "rows"]),
        ("sts=s.tsv", "score\tsentence1\n1\tx\n2\ty\n", ["'sentence2'", "score, sentence1"]),
        ("sts=s.tsv", "score\tsentence1\tsentence1\n1\tx\ty\n", ["'sentence1'"]),
        ("sts=s.tsv", f"{SCORED}1\tx\ty\n1\tx\n", ["line 3", "2", "3 fields"]),
        ("sts=s.tsv", f"{SCORED}1\tx\ty\nhigh\tx\ty\n", ["line 3, column 'score'", "'high'"]),
        ("sts=s.tsv", f"{SCORED}nan\tx\ty\n2\tx\ty\n", ["line 2, column 'score'", "'nan'"]),
        ("sts=s.tsv", f"{SCORED}\tx\ty\n2\tx\ty\n", ["line 2, column 'score'", "''"]),
        ("sts=s.tsv", f"{SCORED}1\tx\ty\n1\tv\tw\n", ["2 pairs"]),
        ("sts=s.jsonl", '{"score": 1}\n{"score": ', ["line 2", "JSON"]),
        ("sts=s.jsonl", '{"score": 1}\n{"gold": 1}', ["line 2", "line 1 (score)"]),
        ("sts=s.jsonl", "[1]", ["line 1", "object"]),
        ("sts=s.txt", "", [".tsv, .tsv.gz"]),
        ("sts=plain.tsv.gz", "score\tno gzip", []),
        ("sts=latin.tsv", b"score\tsentence1\n1\tx\n2\t\xe4\n", ["line 3", "0xe4"]),
        ("sts=broken.parquet", "PAR1", ["Parquet"]),
        ("pairs=p.tsv", f"{LABELLED}1\tx\ty\n2\tx\ty\n", ["line 3, column 'label'", "0 or 1", "'2'"]),
        ("pairs=p.tsv", f"{LABELLED}1\tx\ty\n1\tx\ty\n", ["label 1"]),
        ("transfer=t.tsv", "label\ttext\n" + "a\tx\n" * 30, ["'a'"]),
        ("transfer=t.tsv", "label\ttext\n" + "a\tx\n" * 30 + "b\ty\n" * 9, ["9 rows", "10 per label"]),
        ("transfer=t.tsv", "label\ttext\n\tx\n", ["line 2, column 'label'", "''"]),
        ("ranking=r.tsv", f"{SCORED}1\tx\ty\n2\tz\ty\n", ["4 partners"]),
        ("ranking=below.tsv", f"{SCORED}1\tx\ty\n-2\tz\ty\n", ["-2"]),
    ],
)
def test_errors_in_files_name_file_and_line(tmp_path: Path, added: str, content: str | bytes, named: list[str]) -> None:
    suite, name = added.split("=")
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    named_file = "ranking below" if name == "below.tsv" else name
    with fails_with(EvaluationFormatError, named_file, *named):
        collect(None, [], [CustomSet.parse(f"{suite}={tmp_path / name}")])


def test_missing_files_and_missing_numbers_are_named(tmp_path: Path) -> None:
    with fails_with(EvaluationDataError, "nowhere.tsv"):
        read_table(tmp_path / "nowhere.tsv")
    pq.write_table(pa.table({"score": [1.0, None], "sentence1": ["a", "b"]}), tmp_path / "hole.parquet")
    with fails_with(EvaluationFormatError, "hole.parquet, row 2, column 'score'"):
        read_table(tmp_path / "hole.parquet").numbers("score")


def test_sentences_of_transfer_sets_are_in_sentevals_order() -> None:
    texts = ["x  y z", "x y z", "long word s here", "one"]
    part = Labelled.of(Table(Path("t.tsv"), {"label": ["b", "a", "10", "9"], "text": texts}))
    assert part.names == ["9", "10", "a", "b"]
    assert part.sides == [["one", "x y z", "x y z", "long word s here"]] and part.labels.tolist() == [0, 2, 3, 1]


def test_transfer_sets_with_pairs_and_a_test_split(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    for split, rows in (("train", 120), ("test", 60), ("dev", 60)):
        words = generator.integers(0, 40, (rows, 2))
        words[::2, 1] = words[::2, 0]
        lines = [f"{int(one == other)}\tword {one}\tword {other}\n" for one, other in words]
        (tmp_path / f"{split}.tsv").write_text(LABELLED + "".join(lines))
    vectors = {f"word {n}": row for n, row in enumerate(generator.normal(size=(40, 12)))}
    model = VectorModel(lambda requested: np.array([vectors[text] for text in requested], dtype=np.float32))
    for has_dev in (True, False):
        tasks = collect(None, [], [CustomSet.parse(f"transfer:Same={tmp_path}")])
        (task,) = tasks.tasks
        assert not tasks.missing and task.name == "Same" and task.measure(model).scores["accuracy"].value > 95, has_dev
        (tmp_path / "dev.tsv").unlink(missing_ok=True)
        for split in ("train", "test"):  # the second time, both sentences have other names
            (tmp_path / f"{split}.tsv").write_text(
                (tmp_path / f"{split}.tsv").read_text().replace("sentence1\tsentence2", "text\ttext2")
            )


def test_folders_of_beirs_layout_are_measured_by_role(tmp_path: Path) -> None:
    texts = {"a": "one", "b": "two", "c": "three"}
    for name, split in (("first", "test"), ("second", "dev")):
        folder = tmp_path / "retrieval" / name
        (folder / "qrels").mkdir(parents=True)
        rows = [json.dumps({"_id": key, "title": "", "text": text}) for key, text in texts.items()]
        (folder / "corpus.jsonl.gz").write_bytes(gzip.compress("\n".join(rows).encode()))
        (folder / "queries.jsonl").write_text(
            "\n".join(json.dumps({"_id": f"q{key}", "text": texts[key]}) for key in "ab")
        )
        (folder / "qrels" / f"{split}.tsv").write_text("query-id\tcorpus-id\tscore\nqa\ta\t1\nqb\tc\t1\n")
    (tmp_path / "retrieval" / "notes").mkdir()
    asked: list[tuple[str, str]] = []

    def encode(texts: Sequence[str], role: str = "text") -> NDArray[np.float32]:
        asked.extend((role, text) for text in texts)
        return np.array([[len(text), text.count("e"), 1] for text in texts], dtype=np.float32)

    tasks = collect(tmp_path, ["retrieval"], [])
    scores = [task.measure(VectorModel(encode, ["query", "document"])).scores for task in tasks.tasks]
    assert [task.name for task in tasks.tasks] == ["first", "second"] and next(iter(scores[0])) == "ndcg@10"
    assert asked[:5] == [("query", "one"), ("query", "two"), *(("document", text) for text in texts.values())]
    by_hand = [1.0, 1 / np.log2(2 + 1)]  # "one" is found first, "three" second for "two"
    vectors = (
        np.array([[3, 1, 1], [3, 0, 1], [5, 2, 1]]) / np.linalg.norm([[3, 1, 1], [3, 0, 1], [5, 2, 1]], axis=1)[:, None]
    )
    rank = 1 + int((vectors[[0, 1]] @ vectors[1] > vectors[2] @ vectors[1]).sum())
    by_hand[1] = 1 / np.log2(rank + 1)
    assert scores[0]["ndcg@10"].value == pytest.approx(100 * np.mean(by_hand))
