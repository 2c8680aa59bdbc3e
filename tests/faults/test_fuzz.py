"""Whatever is typed or lies in a file: an answer or one message of ours, no traceback, and the disk as it was.

DISTCSE_FUZZ=20 tries twenty times as many cases, and others every time; without it the same ones are tried.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distcse import cli
from distcse.errors import DistcseError
from distcse.evaluation import Contamination
from distcse.recipe import CorpusSection
from distcse.report.history import read_run
from distcse.runs.directory import RunDirectory
from distcse.runs.mutual.phase_store import PhaseStore
from distcse.storage import open_store
from distcse.text import Corpus
from distcse.text.readers import read_sentences
from distcse.training.checkpoints import CheckpointStore
from distcse.tuning.records import read_trial

pytestmark = pytest.mark.usefixtures("without_ray")
TIMES = int(os.environ.get("DISTCSE_FUZZ", "1"))


def cases(count: int) -> Callable[[Any], Any]:
    """Try `count` cases, at DISTCSE_FUZZ=1."""
    return settings(
        max_examples=count * TIMES,
        deadline=None,
        derandomize=TIMES == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


# -- what is tried --------------------------------------------------------------------------------------------------------

NASTY = (
    "", " ", "\t", "a", ".", "\0", "a\0b", "\r\n", "\ufeff", "\ufeffa", "\ud800", "a\udfffb", "\u2028", "\x1a", "\x7f",
    "🤷🏽‍♀️", "👩‍👩‍👧", "مرحبا بالعالم", "\u202eabc", "e\u0301" * 9, "ﬃ", "İ", "ß", "𝔘𝔫𝔦", "NaN", "null", "-", "~", "1e999", "0x1",
    "../../etc/passwd", "/dev/null", "a" * 300, "%s %d {0} {x}", "$HOME `id` $(id)", "<script>", "'", '"', '"""', "\\", ":", "=",
)  # fmt: skip
anything = st.one_of(
    st.sampled_from(NASTY), st.text(max_size=12), st.text(st.characters(exclude_categories=()), max_size=6)
)
numbers = st.one_of(
    st.integers(-3, 70),
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, 1e308, 1e-320]),
)
scalars = st.one_of(anything, numbers, st.booleans(), st.none())
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(anything, inner, max_size=3)),
    max_leaves=6,
)

STUDENT: dict[str, Any] = {
    "name": "small",
    "corpus": {"path": "a.txt", "column": "text", "limit": 9},
    "student": {"backbone": "nowhere", "pooling": "mean", "projection": "none", "layers": [0, 2]},
    "teachers": {"encoders": [{"backbone": "nowhere", "alpha": 1.0}], "shard_rows": 100},
    "objective": {"tau1": 0.05, "rank": {"form": "list_net", "tau2": 0.1, "exclude_positive": True}, "regression": {}},
    "training": {"batch_size": 16, "epochs": 1, "lr": 1e-3, "workers": 0},
    "evaluation": {"num_heldout": 32, "eval_steps": 6, "final_suites": ["agreement"]},
    "storage": {"runs": "runs", "cache": "cache"},
}
MUTUAL: dict[str, Any] = {
    "name": "groups",
    "pairs": {"mine": {"corpus": {"path": "a.txt"}, "bands": [{"low": 0.5, "high": 0.9}]}},
    "groups": [{"name": "one", "backbone": "nowhere"}, {"name": "two", "backbone": "nowhere"}],
    "mutual": {"cycles": 1, "combine": "mean"},
    "evaluation": {"dev": "none"},
    "ray": False,
}
SPACE: dict[str, Any] = {
    "name": "space",
    "parameters": {"training.lr": {"values": [0.1, 0.2]}, "objective.rank.tau2": {"expression": "lr / 2"}},
    "search": {"algorithm": "grid", "trials": 2},
    "schedule": {"kind": "asha"},
    "final_runs": {"seeds": [1]},
}


def paths(document: Any, before: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [before] if before else []
    inside = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in inside:
        found += paths(value, (*before, key))
    return found


@st.composite
def documents(draw: st.DrawFn, base: dict[str, Any]) -> dict[str, Any]:
    """A document with one to three of its values replaced by others, or with further keys."""
    document: dict[str, Any] = json.loads(json.dumps(base))
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from(paths(base)))
        inside: Any = document
        with contextlib.suppress(LookupError, TypeError):  # an earlier replacement took the place away
            for key in parents:
                inside = inside[key]
            inside[last]
            key = draw(st.one_of(st.just(last), st.just(last), scalars)) if isinstance(inside, dict) else last
            inside[key] = draw(values)
    return document


@st.composite
def spoilt(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes as disks, editors and programs spoil them."""
    at, bit = draw(st.integers(0, max(0, len(content) - 1))), draw(st.integers(0, 7))
    text = content.decode("utf-8", "replace")
    ways = {
        "as it is": content,
        "cut": content[:at],
        "bit": content[:at] + bytes([byte ^ (1 << bit) for byte in content[at : at + 1]]) + content[at + 1 :],
        "insert": content[:at] + draw(st.binary(max_size=6)) + content[at:],
        "utf-16": text.encode("utf-16"),
        "latin": text.encode("latin-1", "replace"),
        "bom": b"\xef\xbb\xbf" + content,
        "crlf": content.replace(b"\n", b"\r\n"),
        "gzip": gzip.compress(content, mtime=0),
        "twice": content * 2,
        "none": b"",
    }
    return ways[draw(st.sampled_from([*ways]))]


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def dumped(document: Any) -> bytes:
    try:
        return encoded(yaml.safe_dump(document, allow_unicode=True))
    except (yaml.YAMLError, UnicodeError):
        return encoded(json.dumps(document))


# -- what is held to ------------------------------------------------------------------------------------------------------


def files(place: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in place.rglob("*") if p.is_file()}


def call(command: str, arguments: list[str], place: Path) -> None:
    """A command as it is typed. It answers, or says in a line of ours what is wrong; files are as they were."""
    before, out, err = files(place), io.StringIO(), io.StringIO()
    with contextlib.chdir(place), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = cli.main([command, *arguments])
        except SystemExit as usage:
            status = int(str(usage.code))
            assert "usage: distcse " in out.getvalue() + err.getvalue()
        else:
            assert status == 0 or any(line.startswith("distcse: ") for line in err.getvalue().splitlines())
    assert status in (0, 1, 2) and "Traceback" not in err.getvalue()
    assert files(place) == before


def ours(work: Callable[[], Any]) -> Any:
    """What some work gives; None where it ends in an error of ours, which is in words."""
    try:
        return work()
    except DistcseError as error:
        assert len(str(error)) > 10 and len(str(error)) < 10_000
        return None


# -- recipes and what is typed --------------------------------------------------------------------------------------------


@cases(80)
@given(data=st.data(), base=st.sampled_from([STUDENT, MUTUAL]))
def test_recipes(place: Path, data: st.DataObject, base: dict[str, Any]) -> None:
    file = place / "recipe.yaml"
    file.write_bytes(dumped(data.draw(documents(base))))
    call("train", [str(file), "--print-recipe"], place)


@cases(80)
@given(
    data=st.data(),
    base=st.sampled_from(["quickstart", "rankcse-listmle-bert-base"]),
    value=st.one_of(anything, values.map(lambda value: dumped(value).decode("utf-8", "replace"))),
)
def test_overrides(place: Path, data: st.DataObject, base: str, value: str) -> None:
    keys = [".".join(map(str, path)) for path in paths(STUDENT)]
    key = data.draw(st.one_of(st.sampled_from(keys), anything, st.lists(anything, max_size=3).map(".".join)))
    argument = f"{key}={value}" if data.draw(st.integers(0, 9)) else key
    call("train", [base, "--print-recipe", argument], place)


@cases(50)
@given(data=st.data(), base=st.sampled_from([STUDENT, MUTUAL, SPACE]))
def test_recipes_and_spaces_of_any_bytes(place: Path, data: st.DataObject, base: dict[str, Any]) -> None:
    file = place / "any.yaml"
    file.write_bytes(data.draw(st.one_of(spoilt(dumped(base)), st.binary(max_size=40))))
    call("train", [str(file), "--print-recipe"], place)
    call("tune", ["quickstart", "--space", str(file), "--print-space"], place)


WORDS = {
    "train": ["--resume", "--rerun", "--print-recipe", "--", "-h", "quickstart", "seed=x"],
    "tune": ["--resume", "sweep.name=x"],
    "evaluate": [
        *("--suite", "sts,pairs", "--data", ".", "--add", "sts=table.tsv", "--max-length", "--out=table.tsv"),
        *("--documents", "x=", "=", "--precision", "bf16", "--device", "cpu"),
    ],
}


@cases(60)
@given(data=st.data(), command=st.sampled_from([*WORDS]))
def test_arguments(place: Path, data: st.DataObject, command: str) -> None:
    words = data.draw(st.lists(st.one_of(anything, st.sampled_from(WORDS[command])), max_size=4))
    if command == "train":
        call("train", [*words, "student.backbone=./nowhere", "--print-recipe"], place)
        call("train", ["--resume", *(words or ["nothing"])], place)
    elif command == "tune":
        (place / "recipe.yaml").write_bytes(dumped(STUDENT))
        (place / "space.yaml").write_bytes(dumped(data.draw(documents(SPACE))))
        call("tune", ["recipe.yaml", "--space", "space.yaml", "--print-space", *words], place)
    else:
        (place / "table.tsv").write_bytes(data.draw(spoilt(encoded(TABLE))))
        call("evaluate", ["./nowhere", "--add", "sts=table.tsv", *words], place)


# -- files ----------------------------------------------------------------------------------------------------------------

TABLE = "score\tlabel\tsentence1\tsentence2\n" + "".join(f"{n / 3}\t{n % 2}\tone {n}\tother {n}\n" for n in range(9))


def parquet(columns: dict[str, list[Any]]) -> bytes:
    store = io.BytesIO()
    pq.write_table(pa.table(columns), store)
    return store.getvalue()


@st.composite
def corpus_files(draw: st.DrawFn) -> tuple[str, bytes]:
    """Name and content of a file of sentences, spoilt or not."""
    lines = draw(st.lists(anything, max_size=8))
    kind = draw(st.sampled_from([".txt", ".jsonl", ".csv", ".parquet"]))
    if kind == ".txt":
        content = encoded("\n".join(lines))
    elif kind == ".jsonl":
        rows: list[Any] = [{"text": draw(st.one_of(st.just(line), values)), "n": n} for n, line in enumerate(lines)]
        content = encoded("\n".join(json.dumps(row) for row in rows))
    elif kind == ".csv":
        table = io.StringIO()
        csv.writer(table).writerows([["text", "n"], *([line.replace("\0", ""), "1"] for line in lines)])
        content = encoded(table.getvalue())
    else:
        texts: list[Any] = [line.encode("utf-8", "ignore").decode() for line in lines]
        content = parquet(draw(st.sampled_from([{"text": texts}, {"text": [1.5] * len(texts)}, {"other": texts}])))
    content = draw(spoilt(content))
    if kind != ".parquet" and draw(st.booleans()):
        kind, content = f"{kind}.gz", draw(spoilt(gzip.compress(content, mtime=0)))
    return f"corpus{kind}", content


@cases(100)
@given(made=corpus_files(), column=st.one_of(st.just("text"), anything))
def test_files_of_sentences(place: Path, made: tuple[str, bytes], column: str) -> None:
    file, cache = place / made[0], place.parent / "cache"
    file.write_bytes(made[1])
    for row in ours(lambda: list(read_sentences(file, column))) or []:
        assert row is None or (row and row == " ".join(row.split()) and "\0" not in row and row.encode())
    before = files(cache)
    corpus = ours(lambda: Corpus.prepare(CorpusSection(path=str(file)), open_store(cache)))
    if corpus is None:
        assert files(cache) == before
    else:
        assert len(corpus) == len(corpus.texts(range(len(corpus)))) > 0


@cases(40)
@given(content=st.one_of(st.binary(max_size=60), values.map(lambda value: encoded(json.dumps(value)))))
def test_what_a_run_left_behind(place: Path, content: bytes) -> None:
    run = place / "run"
    for name in (
        *("recipe.yaml", "run.json", "phases.json", "trial.json", "events.jsonl", "model/distcse/contamination.json"),
        *(
            "latest",
            "step-000001/trainer_state.json",
            "step-000001/weights.safetensors",
            "step-000001/exp_avg.safetensors",
        ),
    ):
        file = run / (f"checkpoints/{name}" if name.startswith(("latest", "step")) else name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    for work in (
        lambda: RunDirectory.reopen(run, []),
        lambda: RunDirectory(run).record(1, {"corpus": "c"}),
        lambda: PhaseStore(open_store(run)),
        lambda: read_trial(open_store(run)),
        lambda: read_run(run),
        lambda: CheckpointStore(open_store(run)).restore(),
        lambda: CheckpointStore(open_store(run)).best(),
        lambda: Contamination.read(run / "model"),
    ):
        ours(work)
    call("train", ["--resume", str(run)], place)


# -- and by name ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a" * 300, "\0", "/" * 300, "x/" * 200])
def test_names_that_no_file_can_have(place: Path, name: str) -> None:
    """A longer search found this: the system raises a separate error for a name that is too long."""
    corpus = [f"corpus.path={json.dumps(name + '.txt')}", "training.workers=0", f"storage.cache={place.parent}/other"]
    for command, *arguments in (
        *(("train", option, name) for option in ("--resume", "--rerun")),
        ("train", name),
        ("tune", "--resume", name),
        ("tune", "quickstart", "--space", name),
        ("evaluate", name, "--add", "sts=x.tsv"),
        ("evaluate", "x", "--data", name),
        ("evaluate", "x", "--add", f"sts={name}.tsv"),
        ("embed", "best-small", *corpus),
    ):
        call(command, arguments, place)
