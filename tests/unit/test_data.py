"""`distcse data`: published files of SentEval, GLUE and BEIR, downloaded from a local server, converted and read."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from distcse.errors import (
    DistcseError,
    DownloadError,
    EvaluationDataError,
    EvaluationFormatError,
    EvaluationOptionError,
)
from distcse.evaluation import RetrievalDataset, collect, downloads, read_table
from distcse.evaluation.suites import DEV_SETS, DatasetFolder
from distcse.recipe import MutualRecipe, read_recipe
from distcse.runs.mutual.pairs import read_pairs
from distcse.storage import open_store
from tests.commands import command
from tests.disks import Disk

main = command("data")
Row = tuple[str, ...]
YEARS = {
    "sts12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "sts13": ("FNWN", "headlines", "OnWN"),
    "sts14": ("deft-forum", "deft-news", "headlines", "OnWN", "images", "tweet-news"),
    "sts15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "sts16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
POLARITY = {
    "mr": ("rt-polarity.pos", "rt-polarity.neg"),
    "cr": ("custrev.pos", "custrev.neg"),
    "subj": ("subj.objective", "subj.subjective"),
    "mpqa": ("mpqa.pos", "mpqa.neg"),
}
MSR = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
SICK = "pair_ID\tsentence_A\tsentence_B\trelatedness_score\tentailment_judgment\n"
OTHERS = {  # set -> splits, file, header, and the line of a row of (label or score, text, text)
    "sts/stsb": ("train dev test", "STSBenchmark/sts-{}.csv", "", "news\tMSRpar\t2012test\t1\t{}\t{}\t{}\tsource"),
    "sts/sickr": ("train trial test_annotated", "SICK/SICK_{}.txt", SICK, "1\t{1}\t{2}\t{0}\tNEUTRAL"),
    "transfer/sst2": ("train dev test", "SST/binary/sentiment-{}", "", "{1}\t{0}"),
    "transfer/trec": ("train_5500 TREC_10", "TREC/{}.label", "", "{}:other {}"),
    "transfer/mrpc": ("train test", "MRPC/msr_paraphrase_{}.txt", MSR, "{0}\t1\t2\t{1}\t{2}"),
}
SPLITS = {"test_annotated": "test", "train_5500": "train", "TREC_10": "test"}


def write(file: Path, lines: Sequence[str], header: str = "", encoding: str = "utf-8") -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(header + "".join(f"{line}\n" for line in lines), encoding=encoding)


def publish(root: Path, name: str, rows_of: Callable[[str], Sequence[Row]]) -> None:
    """Write a set's rows, of each split: (label or score, text, text), in the years after the subset, as SentEval has them."""
    short = name.partition("/")[2]
    if short in YEARS:
        for subset in YEARS[short]:
            rows = [row[1:] for row in rows_of("test") if row[0] == subset]
            folder = root / "STS" / f"{short.upper()}-en-test"
            write(folder / f"STS.input.{subset}.txt", ["\t".join(row[1:]) for row in rows])
            write(folder / f"STS.gs.{subset}.txt", [row[0] for row in rows])
    elif short in POLARITY:
        for label, file in zip("10", POLARITY[short], strict=True):
            write(root / short / file, [text for of, text in rows_of("all") if of == label], encoding="latin-1")
    else:
        splits, file, header, line = OTHERS[name]
        for split in splits.split():
            lines = [line.format(*row) for row in rows_of(SPLITS.get(split, split))]
            write(root / file.format(split), lines, header, "latin-1" if short == "trec" else "utf-8")


SETS = [f"sts/{year}" for year in YEARS] + [f"transfer/{name}" for name in POLARITY] + list(OTHERS)


def few_rows(name: str) -> Callable[[str], Sequence[Row]]:
    short = name.partition("/")[2]
    if short in YEARS:
        scored = [(subset, str(n), f"{short} {subset} {n}", "b") for subset in YEARS[short] for n in range(4)]
        return lambda split: [*scored, (YEARS[short][0], "", f"{short} unscored", " b ")]
    if short in POLARITY:
        return lambda split: [*((str(n % 2), f"caf\xe9 {short} {n}") for n in range(20)), ("1", "")]
    labels = ("ABBR", "DESC") if short == "trec" else ("0", "1")
    return lambda split: [(labels[n % 2], f"{name} {split} {n}", "same") for n in range(20)]


@pytest.fixture
def senteval(tmp_path: Path) -> Path:
    """SentEval's files of all sets, with few rows."""
    for name in SETS:
        publish(tmp_path / "senteval", name, few_rows(name))
    write(
        tmp_path / "senteval" / "STS" / "STS12-en-test" / "test-gold" / "STS.input.MSRpar.txt", ["the original\ttext"]
    )
    return tmp_path / "senteval"


class Publisher(ThreadingHTTPServer):
    """Serves files by name, also parts of them; breaks off after some bytes; redirects as the hub does, with a checksum."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/mirror"
        self.files: dict[str, bytes] = {}
        self.redirects: dict[str, tuple[str, str]] = {}
        self.break_after: int | None = None
        self.ranges: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    server: Publisher

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if name in self.server.redirects:
            target, digest = self.server.redirects[name]
            self._head(302, {"Location": target, "X-Linked-Etag": f'"{digest}"', "Content-Length": "0"})
        elif name not in self.server.files:
            self.send_error(404)
        else:
            content, asked = self.server.files[name], self.headers.get("Range")
            self.server.ranges.append(asked)
            etag = f'"{hashlib.md5(content).hexdigest()}"'
            start = int(asked[len("bytes=") : -1]) if asked and self.headers["If-Range"] == etag else 0
            self._head(206 if start else 200, {"ETag": etag, "Content-Length": str(len(content) - start)})
            self.wfile.write(content[start : self.server.break_after])

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    with Publisher() as server:
        (thread := Thread(target=server.serve_forever, args=[0.01])).start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def state(publisher: Publisher, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bytes], None]:
    """Publish a file, with its checksum where distcse knows one."""

    def state(name: str, content: bytes) -> None:
        publisher.files[name] = content
        if name in downloads.MD5:
            monkeypatch.setitem(downloads.MD5, name, hashlib.md5(content).hexdigest())

    return state


@pytest.fixture
def failure(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function that runs a command that must fail with one line of an error class, and returns the line."""

    def run(kind: type[DistcseError], *words: str) -> str:
        capsys.readouterr()
        assert main([*words, "--quiet"]) == 1
        line = capsys.readouterr().err
        assert line.startswith(f"distcse: [{kind.code}] ") and line.count("\n") == 1
        return line

    return run


def tar(root: Path) -> bytes:
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w") as archive:
        archive.add(root, ".")
    return packed.getvalue()


def zipped(files: dict[str, str]) -> bytes:
    with zipfile.ZipFile(packed := io.BytesIO(), "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


BEIR = {
    "scifact/corpus.jsonl": '{"_id": "d1", "title": "T", "text": "one"}\n{"_id": "d2", "title": "", "text": "two"}\n',
    "scifact/queries.jsonl": '{"_id": "q1", "text": "1?", "metadata": {}}\n{"_id": "q2", "text": "2?", "metadata": {}}\n',
    "scifact/qrels/test.tsv": "query-id\tcorpus-id\tscore\nq2\td1\t1\n",
    "scifact/qrels/train.tsv": "query-id\tcorpus-id\tscore\nq1\td2\t1\n",
}


# Downloads


def test_sts_and_transfer_are_downloaded_and_measured(
    senteval: Path, publisher: Publisher, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "data"
    publisher.files["large"] = tar(senteval)
    publisher.redirects["senteval.tar"] = "/large", hashlib.sha256(publisher.files["large"]).hexdigest()
    words = ["get", "sts", "transfer", "--data", str(data), "--from", publisher.url, "--json"]
    assert main(words) == 0
    files = json.loads(capsys.readouterr().out.splitlines()[-1])["files"]
    assert {"file": str(data / "sts" / "sts12" / "test.tsv.gz"), "rows": 20, "published": 3108} in files
    tasks = collect(data, ["sts", "transfer"], [])
    assert len(tasks.tasks) == 7 + 7 and not tasks.missing
    assert all(DatasetFolder(data).load(known) for known in DEV_SETS["stsb_sickr"])
    assert "sts12 MSRpar 0" in tasks.first_sentences()  # SentEval's own file, not the one below test-gold
    mr = read_table(data / "transfer" / "mr" / "all.tsv.gz")
    assert mr.texts("text")[0] == "caf\xe9 mr 1" and mr.labels("label") == ["1"] * 11 + ["0"] * 10
    unlabelled = read_table(data / "pairs" / "sts_unlabelled" / "pairs.tsv.gz")
    assert "sts15 unscored" in unlabelled.texts("sentence1") and "sts12 unscored" not in unlabelled.texts("sentence1")
    before = {file: file.read_bytes() for file in data.rglob("*.gz")}
    publisher.files.clear()
    publisher.redirects.clear()
    assert main(words) == 0, "the archive was kept, and no set is written again"
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["kept"]) == 7 + 7 + 1
    assert {file: file.read_bytes() for file in data.rglob("*.gz")} == before


def test_a_broken_download_of_beir_is_resumed_and_has_the_queries_that_are_judged(
    publisher: Publisher, tmp_path: Path, state: Callable[[str, bytes], None], failure: Callable[..., str]
) -> None:
    words = ["get", "beir:scifact", "--data", str(tmp_path), "--from", f"{publisher.url}/"]
    publisher.files["scifact.zip"], publisher.break_after = b"an earlier version" * 200_000, 2**20
    assert "same command continues" in failure(DownloadError, *words)
    state("scifact.zip", archive := zipped({**BEIR, "scifact/other": "x" * 3_000_000}))
    publisher.break_after = 2**21 + 5
    assert "same command continues" in failure(DownloadError, *words) and publisher.ranges == [None, None]
    publisher.break_after = None
    assert main(words) == 0 and publisher.ranges[2:] == [None, f"bytes={2**21}-"]
    assert (tmp_path / "downloads" / "scifact.zip").read_bytes() == archive
    found = RetrievalDataset.read(tmp_path / "retrieval" / "scifact")
    assert (found.queries, found.documents, found.relevant) == (["2?"], ["T one", "two"], [{0: 1.0}])
    assert not found.warnings and len(collect(tmp_path, ["retrieval"], []).tasks) == 1


def test_checksums_are_the_published_ones_or_those_of_the_first_download(
    publisher: Publisher, tmp_path: Path, senteval: Path, failure: Callable[..., str]
) -> None:
    where = ["--data", str(tmp_path), "--from", publisher.url]
    publisher.files["scifact.zip"] = zipped(BEIR)  # not BEIR's own
    assert downloads.MD5["scifact.zip"] in failure(DownloadError, "get", "beir:scifact", *where)
    archive, recorded = (tmp_path / "downloads" / name for name in ("senteval.tar", "senteval.tar.sha256"))
    publisher.files["senteval.tar"] = tar(senteval)  # whose checksum this server does not state
    assert main(["get", "sts", *where]) == 0
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    assert recorded.read_text() == f"{digest}  senteval.tar\n"
    archive.write_bytes(b"damaged")
    assert digest in failure(DownloadError, "get", "sts", *where) and not archive.exists()
    publisher.files["other.tar"] = publisher.files.pop("senteval.tar") + b"changed"
    publisher.redirects["senteval.tar"] = "/other.tar", "0" * 64
    assert digest in failure(DownloadError, "get", "sts", *where)
    recorded.unlink()
    assert "0" * 64 in failure(DownloadError, "get", "sts", *where)


def test_a_full_disk_leaves_no_part_of_a_set_and_a_link_in_an_archive_is_left_out(
    publisher: Publisher, senteval: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (link := senteval / "SICK" / "SICK_trial.txt").unlink()
    link.symlink_to("/etc/passwd")
    publisher.files["senteval.tar"] = tar(senteval)
    words = ["get", "sts", "--data", str(data := tmp_path / "data"), "--from", publisher.url, "--quiet"]
    with Disk(data, "limited").refusing():
        assert main(words) == 1
    assert "cannot be written" in (error := capsys.readouterr().err) and error.count("\n") == 1
    assert main(words) == 0 and len(collect(data, ["sts"], []).tasks) == 6
    assert "left out  sts/sickr" in capsys.readouterr().out


# Conversion


def test_pairs_have_the_splits_of_trans_encoder(
    publisher: Publisher, tmp_path: Path, state: Callable[[str, bytes], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def lines(header: str, row: str, count: int) -> str:
        return header + "".join(
            row.format(n, ("entailment", "not_entailment")[n % 3 > 0], n % 2) + "\n" for n in range(count)
        )

    quora = "qid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
    qnli = {split: f'{{0}}\t{split} "question {{0}}?\tAnswer  {{0}}.\t{{1}}' for split in ("train", "dev", "test")}
    state("quora-IR-dataset.zip", zipped(
        {f"classification/{s}_pairs.tsv": lines(quora, f"0\t1\t{s} {{0}}?\tB?\t{{2}}", 10_003) for s in ("train", "dev", "test")}
    ))  # fmt: skip
    state("QNLIv2.zip", zipped(
        {f"QNLI/{s}.tsv": lines("index\tquestion\tsentence\tlabel\n", qnli[s], 10_020 if s == "train" else 5_463) for s in qnli}
    ))  # fmt: skip
    state("msr_paraphrase_train.txt", lines(MSR, "{2}\t{0}\t7\ttrain {0}\ts", 10).encode())
    state("msr_paraphrase_test.txt", lines(MSR, "{2}\t{0}\t7\ttest {0}\ts", 5).encode())
    state("mrpc_dev_ids.tsv", b"3\t7\n4\t7\n")
    words = ["get", "pairs", "--data", str(tmp_path), "--from", publisher.url]
    assert main(words) == 0 and not (tmp_path / "transfer").exists()
    printed = capsys.readouterr().out
    assert "dev.tsv.gz  1,000 rows" in printed and "qnli/test.tsv.gz  4,463 rows (published: 4,463)" in printed
    tables = {
        f"{name}/{split}": read_table(tmp_path / "pairs" / name / f"{split}.tsv.gz")
        for name in ("qqp", "qnli", "mrpc")
        for split in ("train", "dev", "test")
    }
    rows = [10_000, 1_000, 10_000, 10_000, 1_000, 4_463, 8, 2, 5]
    assert [len(table) for table in tables.values()] == rows
    assert tables["qqp/dev"].texts("sentence1") == [f"dev {row}?" for row in range(1_000)]
    assert tables["mrpc/dev"].texts("sentence1") == ["train 3", "train 4"]
    assert tables["qnli/train"].texts("sentence1")[-1] == 'train "question 9999?'
    assert tables["qnli/dev"].texts("sentence1")[-1] == 'dev "question 999?'
    assert tables["qnli/dev"].texts("sentence2")[0] == "Answer 0."
    assert tables["qnli/test"].texts("sentence1")[0] == 'dev "question 1000?'
    assert tables["qnli/dev"].binary("label").tolist()[:4] == [1, 0, 0, 1]
    tasks = collect(tmp_path, ["pairs"], [])
    assert [task.name for task in tasks.tasks] == ["QQP", "QNLI", "MRPC"]
    assert [warning.partition(":")[0] for warning in tasks.warnings] == ["MRPC"]
    recipe = read_recipe("trans-encoder-bert-base-qnli", [f"evaluation.data={tmp_path}"])
    assert isinstance(recipe, MutualRecipe)
    assert len(read_pairs(recipe, open_store(tmp_path / "read"))) == 10_000 + 1_000 + 4_463
    (file := tmp_path / "pairs" / "qnli" / "test.tsv.gz").unlink()
    write(file.with_name("test.tsv"), [f"{n % 2}\ta {n}\tb" for n in range(5_463)], "label\tsentence1\tsentence2\n")
    assert main(words) == 0 and not file.exists(), "existing pairs are kept"
    assert f"kept      {file.parent}, which exists" in capsys.readouterr().out
    assert "5,463 rows, the published set 4,463" in collect(tmp_path, ["pairs"], []).warnings[0]


def test_real_sets_are_what_they_were(data: Path, tmp_path: Path) -> None:
    def rows(file: Path) -> list[Row]:
        table = read_table(file)
        columns = [
            each for each in ("score", "label", "sentence1", "text", "sentence2", "text2") if each in table.columns
        ]
        subsets = ["subset"] if "sts/sts1" in str(file) else []
        return list(zip(*(table.columns[name] for name in [*subsets, *columns]), strict=True))

    names = ["sts/sts12", "sts/sts13", "sts/stsb", "sts/sickr", "transfer/cr", "transfer/trec", "transfer/mrpc"]
    for name in names:
        publish(tmp_path / "files", name, lambda split, name=name: rows(data / name / f"{split}.tsv.gz"))  # type: ignore[misc]
    assert main(["convert", str(tmp_path / "files"), "--data", str(tmp_path / "data")]) == 0
    for file in (file for name in names for file in (tmp_path / "data" / name).iterdir()):
        real = rows(data / file.relative_to(tmp_path / "data"))
        assert sorted(rows(file)) == sorted(real), file


def test_the_pairs_of_the_sts_sets_are_written_once_and_without_scores(data: Path, tmp_path: Path) -> None:
    source = data / "pairs" / "sts_unlabelled" / "pairs.tsv.gz"
    for name in (*YEARS, "stsb", "sickr"):
        (folder := tmp_path / "sts" / name).mkdir(parents=True)
        for file in (data / "sts" / name).glob("*"):
            (folder / file.name).symlink_to(file)
        if name in ("sts15", "sts16"):
            (folder / "unscored.tsv.gz").symlink_to(source)
    assert main(["convert", str(tmp_path / "sts"), "--data", str(tmp_path)]) == 0
    found, everything = (read_table(file) for file in (tmp_path / "pairs" / "sts_unlabelled" / "pairs.tsv.gz", source))
    assert list(found.columns) == ["sentence1", "sentence2"]
    pairs, all_pairs = (
        list(zip(each.texts("sentence1"), each.texts("sentence2"), strict=True)) for each in (found, everything)
    )
    assert len(pairs) == len(set(pairs)) == 37_790
    assert set(pairs) == set(all_pairs)


@pytest.mark.parametrize(
    ("file", "old", "new", "named"),
    [
        ("SICK/SICK_trial.txt", "sentence_A", "first", ("SICK_trial.txt", "'sentence_A'", "first")),
        ("STSBenchmark/sts-dev.csv", "\tsame\tsource", "", ("sts-dev.csv, line 1", "7 fields", "found 6")),
        ("STS/STS14-en-test/STS.gs.OnWN.txt", "0\n", "", ("STS.gs.OnWN.txt has 3 lines", "has 4")),
        ("TREC/TREC_10.label", "ABBR:", "ABBR ", ("TREC_10.label, line 1", "CLASS:DETAIL")),
        ("MRPC/msr_paraphrase_test.txt", "same", "same\tmore", ("line 2", "5 fields", "found 6")),
    ],
)
def test_files_with_other_columns_are_named(
    senteval: Path, tmp_path: Path, failure: Callable[..., str], file: str, old: str, new: str, named: Row
) -> None:
    (senteval / file).write_text((senteval / file).read_text().replace(old, new))
    line = failure(EvaluationFormatError, "convert", str(senteval), "--data", str(tmp_path / "data"))
    assert not [name for name in named if name not in line]


WORDS = [
    ("get beir:scifakt", EvaluationOptionError, "did you mean 'beir:scifact'?"),
    ("get sts --from http://127.0.0.1:1/x", DownloadError, "http://127.0.0.1:1/x/senteval.tar"),
    ("get sts --from mirror", DownloadError, "mirror/senteval.tar"),
    ("convert nowhere", EvaluationDataError, "nowhere is not a folder"),
    ("convert empty", EvaluationDataError, "no file of SentEval, GLUE or BEIR"),
    ("convert half", EvaluationDataError, "sts/stsb: no STSBenchmark/sts-train.csv; name the folder"),
]
CONTENTS = [
    (None, DownloadError, "404"),
    (b"PK no archive", DownloadError, "damaged archive"),
    (zipped(BEIR)[:-30], DownloadError, "damaged archive"),
    *(
        (zipped({name: "x"}), DownloadError, "outside its folder")
        for name in ("../../outside.txt", "/tmp/outside.txt", "..\\outside.txt")
    ),
    (zipped({"scifact/queries.jsonl": "{}\n"}), EvaluationDataError, "no file of SentEval, GLUE or BEIR"),
]


@pytest.mark.parametrize(
    ("words", "content", "kind", "named"),
    [
        *((words, None, kind, named) for words, kind, named in WORDS),
        *(("get beir:scifact --from {url}", *wrong) for wrong in CONTENTS),
    ],
)
def test_wrong_words_and_wrong_downloads(
    words: str,
    content: bytes | None,
    kind: type[DistcseError],
    named: str,
    publisher: Publisher,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: Callable[[str, bytes], None],
    failure: Callable[..., str],
) -> None:
    if content is not None:
        state("scifact.zip", content)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "half" / "STSBenchmark" / "sts-dev.csv", ["a\tb\tc\td\t1\te\tf"])
    data = tmp_path / "deep" / "data"
    assert named in failure(kind, *words.format(url=publisher.url).split(), "--data", str(data))
    assert not list(tmp_path.rglob("outside*")) + list(data.glob("retrieval")) + list(data.glob("downloads/.unpacked*"))
