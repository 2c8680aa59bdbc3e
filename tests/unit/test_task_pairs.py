"""`python -m distcse pairs`: the pairs of Trans-Encoder's tasks, split as in its public code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from distcse.cli import training
from distcse.errors import EvaluationDataError, EvaluationFormatError, EvaluationOptionError
from distcse.evaluation import collect, read_table
from distcse.evaluation.task_pairs import PAIR_TASKS, write_task_pairs
from distcse.recipe import MutualRecipe, read_recipe
from distcse.runs.mutual.pairs import read_pairs
from distcse.storage import open_store
from tests.commands import command
from tests.failures import fails_with

main = command("pairs")


def table(file: Path, header: str, rows: Sequence[str]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join([header, *rows]) + "\n")
    return file


@pytest.fixture
def qnli(tmp_path: Path) -> list[Path]:
    """GLUE's files, as large as the validation set and larger than the sample of the training set."""
    names, header = ("entailment", "not_entailment"), "index\tquestion\tsentence\tlabel"
    return [
        table(
            tmp_path / "QNLI" / f"{split}.tsv",
            header,
            [f'{row}\t{split} "question {row}?\tAnswer  {row}.\t{names[row % 3 > 0]}' for row in range(count)],
        )
        for split, count in (("train", 10_020), ("dev", 5_463))
    ]


def test_the_first_1000_of_qnlis_validation_rows_are_dev_and_the_4463_others_test(
    qnli: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    assert main(["qnli", *map(str, qnli), "--data", str(data)]) == 0
    printed = capsys.readouterr().out
    assert "dev.tsv.gz  1,000 pairs (paper: 1,000)" in printed and "test.tsv.gz  4,463 pairs (paper: 4,463)" in printed
    train, dev, test = (read_table(data / "pairs" / "qnli" / f"{split}.tsv.gz") for split in ("train", "dev", "test"))
    assert train.texts("sentence1")[-1] == 'train "question 9999?'
    assert dev.texts("sentence1")[-1] == 'dev "question 999?' and dev.texts("sentence2")[0] == "Answer 0."
    assert test.texts("sentence1")[0] == 'dev "question 1000?' and len(test) == 4463
    assert dev.binary("label").tolist()[:4] == [1, 0, 0, 1]
    tasks = collect(data, ["pairs"], [])
    assert [task.name for task in tasks.tasks] == ["QNLI"] and not tasks.warnings
    recipe = read_recipe("trans-encoder-bert-base-qnli", [f"evaluation.data={data}"])
    assert isinstance(recipe, MutualRecipe)
    assert len(read_pairs(recipe, open_store(tmp_path / "read"))) == 10_000 + 1_000 + 4_463
    before = (file := data / "pairs" / "qnli" / "test.tsv.gz").read_bytes()
    assert main(["qnli", *map(str, qnli), "--data", str(data)]) == 1, "existing pairs are kept"
    assert EvaluationOptionError.code in capsys.readouterr().err and file.read_bytes() == before
    file.unlink()
    table(file.with_name("test.tsv"), "label\tsentence1\tsentence2", [f"{n % 2}\ta {n}\tb" for n in range(5_463)])
    (warning,) = collect(data, ["pairs"], []).warnings
    assert "5,463 rows, the published set 4,463" in warning


def test_qqp_has_the_first_rows_of_each_split(tmp_path: Path) -> None:
    header = "qid1\tqid2\tquestion1\tquestion2\tis_duplicate"
    sources = [
        table(
            tmp_path / f"{split}_pairs.tsv", header, [f"0\t1\t{split} {row}?\tB?\t{row % 2}" for row in range(10_003)]
        )
        for split in ("train", "dev", "test")
    ]
    written = write_task_pairs("qqp", tmp_path / "data", sources)
    assert [each.pairs for each in written] == [each.published for each in written] == [10_000, 1_000, 10_000]
    dev = read_table(written[1].file)
    assert dev.texts("sentence1") == [f"dev {row}?" for row in range(1_000)]


def test_real_mrpc_is_written_unchanged(data: Path, tmp_path: Path) -> None:
    train, test = (read_table(data / "pairs" / "mrpc" / f"{split}.tsv.gz") for split in ("train", "test"))
    splits = {"train": (train, slice(0, 3_668)), "validation": (train, slice(3_668, None)), "test": (test, slice(None))}
    sources = []
    for name, (source, rows) in splits.items():
        columns = (source.texts("label")[rows], source.texts("sentence1")[rows], source.texts("sentence2")[rows])
        lines = ["\t".join(row) for row in zip(*columns, strict=True)]
        sources.append(table(tmp_path / f"{name}.tsv", "Quality\t#1 String\t#2 String", lines))
    written = write_task_pairs("mrpc", tmp_path / "data", sources)
    assert [each.pairs for each in written] == [each.published for each in written] == [3_668, 408, 1_725]
    assert read_table(written[2].file).texts("sentence2") == test.texts("sentence2")


def test_the_pairs_of_the_sts_sets_are_written_once_and_without_scores(data: Path, tmp_path: Path) -> None:
    (tmp_path / "sts").symlink_to(data / "sts")
    (written,) = write_task_pairs("sts_unlabelled", tmp_path, [data / "pairs" / "sts_unlabelled" / "pairs.tsv.gz"])
    found = read_table(written.file)
    everything = read_table(data / "pairs" / "sts_unlabelled" / "pairs.tsv.gz")
    assert list(found.columns) == ["sentence1", "sentence2"]

    def pairs(source) -> list[tuple[str, str]]:  # type: ignore[no-untyped-def]
        return list(zip(source.texts("sentence1"), source.texts("sentence2"), strict=True))

    assert len(pairs(found)) == len(set(pairs(found))) == written.pairs == 37_790
    assert set(pairs(found)) == set(pairs(everything))


def test_wrong_sources_are_named(tmp_path: Path, qnli: list[Path]) -> None:
    with fails_with(EvaluationOptionError, "qqp TRAIN DEV TEST", "1"):
        write_task_pairs("qqp", tmp_path, qnli[:1])
    with fails_with(EvaluationDataError, "nowhere.tsv"):
        write_task_pairs("qnli", tmp_path, [qnli[0], tmp_path / "nowhere.tsv"])
    without = table(tmp_path / "test.tsv", "question1\tquestion2", ["a\tb"])
    with fails_with(EvaluationFormatError, "test.tsv", "label"):
        write_task_pairs("qqp", tmp_path, [without] * 3)
    with fails_with(EvaluationOptionError, str(tmp_path), "sts/sts12"):
        write_task_pairs("sts_unlabelled", tmp_path, [])
    assert not list(tmp_path.glob("pairs/*/*"))


def test_the_command_knows_all_tasks() -> None:
    assert training.PAIR_TASKS == PAIR_TASKS
