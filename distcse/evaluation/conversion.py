"""Convert the published files of SentEval, GLUE, sentence-transformers and BEIR into the tables of a data folder.

Pairs have the splits of Trans-Encoder's public code (Liu et al. 2022, §4.1).
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from itertools import chain, islice
from pathlib import Path

from distcse.errors import EvaluationDataError, EvaluationFormatError
from distcse.evaluation.suites import PAIRS, SICKR_DEV, STS, STSB_DEV, TRANSFER
from distcse.evaluation.tables import find_table, read_table
from distcse.events import Reporter
from distcse.storage import open_store

Row = tuple[str, ...]
_HEADERS: dict[int, Row] = {
    2: ("label", "text"),
    3: ("label", "sentence1", "sentence2"),
    4: ("subset", "score", "sentence1", "sentence2"),
}
_UNLABELLED = "pairs/sts_unlabelled"
_FIX = "take the file as its publisher has it"


@dataclass
class Conversion:
    """What `convert` wrote (tables with their rows), the folders that it kept, and what other sets lack."""

    written: dict[Path, int] = field(default_factory=dict)
    kept: list[Path] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)


def published_rows(data: Path) -> dict[Path, int]:
    """Return the number of rows of each table that the suites measure, by its path in a data folder."""
    known = (*STS, *TRANSFER, *PAIRS, STSB_DEV, SICKR_DEV)
    return {data / each.folder / f"{split}.tsv.gz": rows for each in known for split, rows in each.rows.items()}


def convert(folder: Path, data: Path, reporter: Reporter) -> Conversion:
    """Write the tables of each set whose published files are in a folder, at any depth; sets that exist are kept.

    From the seven STS sets of the data folder, it also makes `pairs/sts_unlabelled`: their different pairs, without scores.

    Raises:
        EvaluationDataError: The folder has no set of which all files are there.
        EvaluationFormatError: A file has other columns than the published one.
        StorageWriteError: A table cannot be written. No table of its set is written then.
    """
    if not folder.is_dir():
        raise EvaluationDataError(f"{folder} is not a folder; name the one in which the published files are")
    found_files = (file for file in folder.resolve().rglob("*") if file.is_file())
    files = sorted(found_files, key=lambda file: (len(file.parts), file))
    done = Conversion()
    for name, splits in _SETS.items():
        reporter.check_stop(f"before {name}")
        found = {end: _find(files, end) for split in splits.values() for end in split.files.split()}
        missing = [end for end, file in found.items() if file is None]
        if len(missing) == len(found) or found.get(_DEV_IDS, folder) is None or _is_kept(data / name, done):
            continue  # without GLUE's ids, Microsoft's files are those of transfer
        if missing:
            done.incomplete.append(f"{name}: no {missing[0]}")
            continue
        with open_store(data / name).write_folder() as target:
            rows = {
                split: _write(target / f"{split}.tsv.gz", source.rows_of(found)) for split, source in splits.items()
            }
        done.written |= {data / name / f"{split}.tsv.gz": count for split, count in rows.items()}
    for corpus in (file for file in files if file.name == "corpus.jsonl"):
        reporter.check_stop(f"before {corpus}")
        _convert_beir(corpus, data, done)
    _write_unlabelled(data, done)
    if not done.written and not done.kept:
        reason = next(iter(done.incomplete), f"{folder} has no file of SentEval, GLUE or BEIR, such as SICK_train.txt")
        raise EvaluationDataError(f"{reason}; name the folder in which the published archives were unpacked")
    return done


def _find(files: Sequence[Path], end: str) -> Path | None:
    """Return the least deep file whose path ends so."""
    return next((file for file in files if fnmatch(file.as_posix(), f"*/{end}")), None)


def _is_kept(folder: Path, done: Conversion) -> bool:
    if exists := folder.is_dir() and any(folder.iterdir()):
        done.kept.append(folder)
    return exists


def _write(file: Path, rows: Iterable[Row], header: Row | None = None) -> int:
    count = 0
    with open(file, "wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed:
        for count, row in enumerate(rows, start=1):
            lines = [row] if count > 1 else [header or _HEADERS[len(row)], row]
            packed.writelines("\t".join(line).encode() + b"\n" for line in lines)
    return count


def _convert_beir(corpus: Path, data: Path, done: Conversion) -> None:
    """Copy a set of BEIR's layout, with the judgments of one split and the queries that have any."""
    source = corpus.parent
    prefix = "cqadupstack-" if source.parent.name == "cqadupstack" else ""
    folder = data / "retrieval" / f"{prefix}{source.name}"
    judged = next(filter(None, (find_table(source / "qrels", split) for split in ("test", "dev"))), None)
    queries = find_table(source, "queries")
    if _is_kept(folder, done):
        return
    if judged is None or queries is None:
        done.incomplete.append(f"{folder.name}: no queries.jsonl, or neither qrels/test.tsv nor qrels/dev.tsv")
        return
    scores, texts = read_table(judged), read_table(queries)
    wanted = set(scores.columns[scores.find_column("query-id")])
    rows = zip(texts.columns[texts.find_column("_id")], texts.columns[texts.find_column("text")], strict=True)
    kept = [json.dumps({"_id": key, "text": text}) + "\n" for key, text in rows if key in wanted]
    with open_store(folder).write_folder() as target:
        (target / "qrels").mkdir()
        shutil.copyfile(judged, target / "qrels" / judged.name)
        with gzip.open(target / "queries.jsonl.gz", "wt", encoding="utf-8") as packed:
            packed.writelines(kept)
        with open(corpus, "rb") as read, gzip.open(target / "corpus.jsonl.gz", "wb") as copy:
            shutil.copyfileobj(read, copy)
    done.written[folder / "queries.jsonl.gz"] = len(kept)


def _write_unlabelled(data: Path, done: Conversion) -> None:
    splits = ("train", "dev", "trial", "test", "unscored")
    files = [[file for split in splits if (file := find_table(data / known.folder, split))] for known in STS]
    if not all(files) or _is_kept(data / _UNLABELLED, done):
        return
    tables = map(read_table, chain(*files))
    rows = dict.fromkeys(
        chain(*(zip(each.texts("sentence1"), each.texts("sentence2"), strict=True) for each in tables))
    )
    with open_store(data / _UNLABELLED).write_folder() as target:
        done.written[data / _UNLABELLED / "pairs.tsv.gz"] = _write(target / "pairs.tsv.gz", rows, _HEADERS[3][1:])


# Readers of the published files


def _fields(file: Path, least: int | None = None, encoding: str = "utf-8-sig") -> Iterator[list[str]]:
    """Yield the fields of each line, which tabs separate, with single spaces; as many as in the first line, or `least`."""
    try:
        lines = file.read_bytes().decode(encoding).split("\n")
    except OSError as error:
        raise EvaluationDataError(f"{file} cannot be read: {error.strerror}; correct its permissions") from None
    except UnicodeDecodeError:
        raise EvaluationFormatError(f"{file} is not UTF-8; {_FIX}") from None
    wanted = least or lines[0].count("\t") + 1
    for number, line in enumerate(lines if lines[-1] else lines[:-1], start=1):
        fields = [" ".join(text.split()) for text in line.split("\t")]
        if len(fields) < wanted or (least is None and len(fields) > wanted):
            raise EvaluationFormatError(
                f"{file}, line {number}: expected {wanted} fields, separated by tabs, found {len(fields)}; {_FIX}"
            )
        yield fields


def _named(names: Row, file: Path) -> Iterator[Row]:
    """Yield columns of a file with a header."""
    lines = _fields(file)
    header = next(lines, [])
    if missing := [name for name in names if name not in header]:
        raise EvaluationFormatError(
            f"{file}: column {missing[0]!r} is missing; its columns are {', '.join(header)[:200]}; {_FIX}"
        )
    indices = [header.index(name) for name in names]
    return (tuple(fields[index] for index in indices) for fields in lines)


def _year(scored: bool, *files: Path) -> Iterator[Row]:
    """Yield the scored pairs of a year's subsets, or the others, from the files of each subset: pairs, gold scores."""
    for pairs, scores in zip(files[::2], files[1::2], strict=True):
        rows, gold = list(_fields(pairs, 2)), [score for score, *_ in _fields(scores, 1)]
        if len(rows) != len(gold):
            raise EvaluationFormatError(f"{scores} has {len(gold)} lines, and {pairs} has {len(rows)}; {_FIX}")
        subset = pairs.name.removeprefix("STS.input.").removesuffix(".txt")
        matching = ((*row[:2], score) for row, score in zip(rows, gold, strict=True) if bool(score) == scored)
        yield from ((subset, score, first, second) for first, second, score in matching)


def _stsb(file: Path) -> Iterator[Row]:
    return (("", *fields[4:7]) for fields in _fields(file, 7))


def _sick(file: Path) -> Iterator[Row]:
    return (("", *row) for row in _named(("relatedness_score", "sentence_A", "sentence_B"), file))


def _polarity(positive: Path, negative: Path) -> Iterator[Row]:
    for label, file in (("1", positive), ("0", negative)):
        yield from ((label, " ".join(fields)) for fields in _fields(file, 1, "latin-1"))


def _sst(file: Path) -> Iterator[Row]:
    return ((label, text) for text, label, *_ in _fields(file, 2))


def _trec(file: Path) -> Iterator[Row]:
    for number, (line, *_) in enumerate(_fields(file, 1, "latin-1"), start=1):
        label, _, text = line.partition(" ")
        if ":" not in label:
            raise EvaluationFormatError(f"{file}, line {number}: expected CLASS:DETAIL, found {label[:40]!r}; {_FIX}")
        yield label.partition(":")[0], text


def _msr_train(dev: bool, file: Path, dev_ids: Path) -> Iterator[Row]:
    """Yield the rows of Microsoft's training file that are GLUE's dev set, or the others."""
    ids = {tuple(fields[:2]) for fields in _fields(dev_ids, 2)}
    rows = _named(("#1 ID", "#2 ID", "Quality", "#1 String", "#2 String"), file)
    return (row[2:] for row in rows if (row[:2] in ids) == dev)


def _qnli(file: Path) -> Iterator[Row]:
    """Yield 1 for entailment, whose number in GLUE is 0."""
    labels = {"entailment": "1", "not_entailment": "0", "0": "1", "1": "0"}
    for label, *texts in _named(("label", "question", "sentence"), file):
        if label not in labels:
            raise EvaluationFormatError(f"{file}: label {label!r} is none of {', '.join(labels)}; {_FIX}")
        yield labels[label], *texts


@dataclass(frozen=True)
class _Split:
    """How a split is made."""

    read: Callable[..., Iterator[Row]]
    files: str
    """How the paths of the published files end, separated by spaces."""
    rows: tuple[int, int | None] = (0, None)

    def rows_of(self, found: dict[str, Path | None]) -> Iterator[Row]:
        return islice(self.read(*(found[end] for end in self.files.split())), *self.rows)


def _sts(year: int, *subsets: str) -> dict[str, _Split]:
    ends = " ".join(f"STS{year}-en-test/STS.{kind}.{subset}.txt" for subset in subsets for kind in ("input", "gs"))
    test = {"test": _Split(partial(_year, True), ends)}
    return test if year < 15 else {**test, "unscored": _Split(partial(_year, False), ends)}


_qqp = partial(_named, ("is_duplicate", "question1", "question2"))
_msr = partial(_named, ("Quality", "#1 String", "#2 String"))
_DEV_IDS = "*dev_ids.tsv"
_MSR_TRAINING = f"msr_paraphrase_train.txt {_DEV_IDS}"
_SETS: dict[str, dict[str, _Split]] = {
    "sts/sts12": _sts(12, "MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "sts/sts13": _sts(13, "FNWN", "headlines", "OnWN"),
    "sts/sts14": _sts(14, "deft-forum", "deft-news", "headlines", "OnWN", "images", "tweet-news"),
    "sts/sts15": _sts(15, "answers-forums", "answers-students", "belief", "headlines", "images"),
    "sts/sts16": _sts(16, "answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
    "sts/stsb": {split: _Split(_stsb, f"STSBenchmark/sts-{split}.csv") for split in ("train", "dev", "test")},
    "sts/sickr": {
        split: _Split(_sick, f"SICK_{file}.txt")
        for split, file in {"train": "train", "trial": "trial", "test": "test_annotated"}.items()
    },
    "transfer/mr": {"all": _Split(_polarity, "rt-polarity.pos rt-polarity.neg")},
    "transfer/cr": {"all": _Split(_polarity, "custrev.pos custrev.neg")},
    "transfer/subj": {"all": _Split(_polarity, "subj.objective subj.subjective")},
    "transfer/mpqa": {"all": _Split(_polarity, "mpqa.pos mpqa.neg")},
    "transfer/sst2": {split: _Split(_sst, f"binary/sentiment-{split}") for split in ("train", "dev", "test")},
    "transfer/trec": {"train": _Split(_trec, "train_5500.label"), "test": _Split(_trec, "TREC_10.label")},
    "transfer/mrpc": {split: _Split(_msr, f"MRPC/msr_paraphrase_{split}.txt") for split in ("train", "test")},
    "pairs/mrpc": {
        "train": _Split(partial(_msr_train, False), _MSR_TRAINING),
        "dev": _Split(partial(_msr_train, True), _MSR_TRAINING),
        "test": _Split(_msr, "msr_paraphrase_test.txt"),
    },
    "pairs/qqp": {
        "train": _Split(_qqp, "classification/train_pairs.tsv", (0, 10_000)),
        "dev": _Split(_qqp, "classification/dev_pairs.tsv", (0, 1_000)),
        "test": _Split(_qqp, "classification/test_pairs.tsv", (0, 10_000)),
    },
    "pairs/qnli": {  # the labels of GLUE's test rows are not public
        "train": _Split(_qnli, "QNLI/train.tsv", (0, 10_000)),
        "dev": _Split(_qnli, "QNLI/dev.tsv", (0, 1_000)),
        "test": _Split(_qnli, "QNLI/dev.tsv", (1_000, None)),
    },
}
"""Set -> its splits."""
