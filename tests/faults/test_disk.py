"""Flipped bits, truncated files, full and read-only disks: damage is named, repaired if possible, and never used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from distcse import cli
from distcse.errors import (
    CheckpointError,
    CorpusCacheError,
    DistcseError,
    EmbeddingTableError,
    EncoderError,
    ModelFormatError,
    RunDirectoryError,
    RunRecordError,
)
from distcse.events import Event, LogMessage, Reporter
from distcse.models import Encoder
from distcse.recipe import CorpusSection, Recipe
from distcse.runs.directory import RunDirectory
from distcse.runs.mutual.phase_store import Phase, PhaseStore
from distcse.storage import dump_checked_json, open_store, sha256
from distcse.storage.checksums import load_checked_json_bytes
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.targets import Projection
from distcse.text import Corpus, Pairs, TokenTable
from distcse.training.checkpoint_files import ModelState, TrainerState, load_model_state, load_trainer_state
from distcse.training.checkpoints import CheckpointStore
from distcse.tuning.records import Trial, TrialMetric, read_trial
from tests.backends import run
from tests.disks import Disk, disk
from tests.failures import fails_with

MakeRecipe = Callable[..., Recipe]
LINES = [f"Sentence number {number} of the corpus." for number in range(400)]


def flip(file: Path, position: float = 0.7) -> None:
    """Flip one bit at a relative position of the file."""
    content = bytearray(file.read_bytes())
    content[int(position * len(content))] ^= 1
    file.write_bytes(bytes(content))


def cut(file: Path, position: float = 0.7) -> None:
    """Truncate a file to this share of its size."""
    content = file.read_bytes()
    file.write_bytes(content[: int(position * len(content))])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def zeros(file: Path) -> None:
    """Write zeros: the result of a power failure after renaming a file that was not flushed."""
    file.write_bytes(bytes(file.stat().st_size))


DAMAGES = (flip, cut, empty, zeros, Path.unlink)
Damage = Callable[[Path], None]


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def damage(request: pytest.FixtureRequest) -> Damage:
    chosen: Damage = request.param
    return chosen


# -- damaged caches are rebuilt -------------------------------------------------------------------------------------------


def make_corpus(folder: Path) -> Corpus:
    file = folder / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in LINES))
    return Corpus.prepare(CorpusSection(path=str(file)), open_store(folder / "cache"))


@pytest.mark.parametrize("name", ["values.bin", "offsets.npy", "json"])
@pytest.mark.parametrize("kind", ["corpora", "tokens"])
def test_a_damaged_corpus_or_token_table_is_prepared_again(
    tmp_path: Path, tiny: Callable[..., Path], damage: Damage, kind: str, name: str
) -> None:
    tokenizer = Encoder.load(tiny("bert"), pooling="mean").tokenizer

    def prepare() -> tuple[Path, bool, list[Any]]:
        corpus = make_corpus(tmp_path)
        if kind == "corpora":
            return corpus.store.path, corpus.reused, [*corpus.texts(range(len(LINES))), corpus.fingerprint]
        tokens = TokenTable.prepare(corpus, tokenizer, 16, open_store(tmp_path / "cache"))
        return tokens.store.path, tokens.reused, [row.tolist() for row in tokens.rows(range(len(LINES)))]

    folder, _, content = prepare()
    assert prepare() == (folder, True, content)
    damage(next(folder.glob(f"*{name}")))
    assert prepare() == (folder, False, content)
    assert prepare() == (folder, True, content)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize("name", ["shard-00001.npy", "shard-00001.json"])
def test_a_damaged_shard_is_embedded_again(tmp_path: Path, damage: Damage, name: str) -> None:
    vectors = np.random.default_rng(0).normal(size=(250, 16)).astype(np.float32)

    def open_table() -> EmbeddingTable:
        return EmbeddingTable.locate(open_store(tmp_path), TableIdentity("m", "c", 250, None, None, "", "fp32", 100))

    for shard in (0, 1, 2):
        open_table().write_shard(shard, vectors[100 * shard : 100 * shard + 100])
    expected = open_table().vectors(np.arange(250))
    damage(open_table().directory / name)
    if name.endswith(".npy") and damage in (cut, empty, zeros):
        with fails_with(EmbeddingTableError, "shard-00001.npy"):
            open_table().vectors([101])
    assert open_table().missing_shards() == [1]
    open_table().write_shard(1, vectors[100:200])
    assert open_table().missing_shards() == []
    np.testing.assert_array_equal(open_table().vectors(np.arange(250)), expected)


# -- other damaged files are refused, and the previous checkpoint is used --------------------------------------------------


def make_state(value: float) -> ModelState:
    return ModelState({"w": torch.full((500,), value)}, {"w": {"exp_avg": torch.ones(500)}}, int(value))


@pytest.mark.parametrize("name", ["weights.safetensors", "exp_avg.safetensors", "trainer_state.json"])
def test_the_previous_checkpoint_is_used_if_the_latest_is_damaged(tmp_path: Path, damage: Damage, name: str) -> None:
    checkpoints = CheckpointStore(open_store(tmp_path))
    for step in (1, 2, 3):
        checkpoints.save(make_state(step), TrainerState(step, [(s, float(s)) for s in range(1, step + 1)]))
    latest = checkpoints.latest()
    assert latest is not None and latest == checkpoints.best()
    damage(latest / name)
    with fails_with(CheckpointError, str(latest)):
        load_model_state(latest)
        load_trainer_state(latest)
    events: list[Event] = []
    restored = CheckpointStore(open_store(tmp_path)).restore(events.append)
    assert restored is not None and restored[0].step == 2 and restored[1].weights["w"][0] == 2.0
    (warning,) = events
    assert isinstance(warning, LogMessage) and warning.warning
    assert str(latest) in warning.text and "step-000002" in warning.text
    damage(tmp_path / "checkpoints" / "step-000002" / name)
    with fails_with(CheckpointError, str(tmp_path / "checkpoints")):
        CheckpointStore(open_store(tmp_path)).restore()


def test_a_damaged_pointer_is_replaced_by_the_latest_step(tmp_path: Path, damage: Damage) -> None:
    checkpoints = CheckpointStore(open_store(tmp_path))
    for step in (1, 2):
        checkpoints.save(make_state(step), TrainerState(step, [(step, 1.0)]))
    damage(tmp_path / "checkpoints" / "latest")
    restored = CheckpointStore(open_store(tmp_path)).restore()
    assert checkpoints.best() is not None
    assert restored is not None and restored[0].step in (1, 2)
    assert restored[0].step == 2 or damage is flip  # a flipped bit may name another existing step


def test_a_model_damaged_after_its_export_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    Encoder.load(tiny("bert"), pooling="mean").save(tmp_path / "good")
    for damage in (flip, cut, empty, zeros):
        folder = shutil.copytree(tmp_path / "good", tmp_path / damage.__name__)
        damage(folder / "model.safetensors")
        with fails_with(ModelFormatError, str(folder / "model.safetensors"), "distcse/checksums.json"):
            Encoder.load(folder)
    for file in sorted((tmp_path / "good").rglob("*.json")):
        folder = shutil.copytree(tmp_path / "good", tmp_path / f"{file.parent.name} {file.stem}")
        cut(folder / file.relative_to(tmp_path / "good"), 0.5)
        with pytest.raises(EncoderError):
            Encoder.load(folder)
    assert Encoder.load(tmp_path / "good").encode(["One."]).shape == (1, 32)


@dataclass(frozen=True)
class Record:
    """A small file of a run, with the functions that write and read it."""

    name: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    error: type[DistcseError] = RunRecordError
    named: tuple[str, ...] = ()
    """What the error says. Default: the file's name."""


def write_phase_store(folder: Path) -> None:
    PhaseStore(open_store(folder)).post("bert", Phase(0), _SCORES, None)


def record_run(folder: Path) -> None:
    RunDirectory(folder).record(1, {"corpus": "c"})


def write_trial(folder: Path) -> None:
    Trial("t", {"lr": 1.0}, metrics=[TrialMetric(1, 2.0, 3.0, 4.0)]).write(open_store(folder))


_SCORES = np.zeros(4, dtype=np.float32)
_SCORES_FILE = f"labels/start-bert.{sha256([_SCORES.data])[:12]}.npy"
PAIRS = ("values.bin", "offsets.npy", "rows.npy", "pairs.json")
RECORDS = (
    *(
        Record(
            f"pairs/{name}",
            lambda folder: Pairs.write(open_store(folder / "pairs"), [(f"a {n}", f"b {n}") for n in range(99)]),
            lambda folder: Pairs.open_verified(open_store(folder / "pairs")),
            CorpusCacheError,
            ("is incomplete or damaged", "delete it and --resume"),
        )
        for name in PAIRS
    ),
    Record("phases.json", write_phase_store, lambda folder: PhaseStore(open_store(folder)).dropped),
    Record(_SCORES_FILE, write_phase_store, lambda folder: PhaseStore(open_store(folder)).scores("bert", Phase(0))),
    Record("trial.json", write_trial, lambda folder: read_trial(open_store(folder))),
    Record("run.json", record_run, record_run),
    Record(
        "projection.safetensors",
        lambda folder: Projection(np.ones((4, 2), dtype=np.float32), "key", 1.0).write(
            open_store(folder) / "projection.safetensors"
        ),
        lambda folder: Projection.read(folder / "projection.safetensors"),
        EmbeddingTableError,
    ),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
@pytest.mark.parametrize("damage", [cut, empty, zeros, flip], ids=lambda damage: damage.__name__)
def test_damaged_records_of_a_run_are_refused_by_name(tmp_path: Path, record: Record, damage: Damage) -> None:
    record.write(tmp_path)
    record.read(tmp_path)
    damage(tmp_path / record.name)
    with fails_with(record.error, *(record.named or [record.name])):
        record.read(tmp_path)


def test_every_flipped_bit_of_a_record_is_detected() -> None:
    content = {"step": 12, "scores": [[1, 0.5], [2, 0.25]], "finished": False}
    original = dump_checked_json(content).encode()
    for position in range(len(original)):
        for bit in range(8):
            flipped = bytearray(original)
            flipped[position] ^= 1 << bit
            with suppress(ValueError):
                assert load_checked_json_bytes(bytes(flipped)) == content


# -- storage that refuses writing -----------------------------------------------------------------------------------------


@pytest.fixture(params=["limited", "read-only"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "disk", request.param) as opened:
        yield opened


def test_a_run_whose_storage_refuses_ends_with_one_line_and_can_be_continued(
    storage: Disk, recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        "training.max_steps=4",
        "evaluation.eval_steps=2",
        "evaluation.final_suites=[]",
        f"storage.runs={storage.path}",
    ]
    run(recipe_with(*overrides, f"storage.runs={tmp_path / 'elsewhere'}"), Reporter())  # fills the cache
    with storage.refusing():
        assert cli.main(["train", str(tmp_path / "recipe.yaml"), *overrides]) in (1, 2)
    shown = capsys.readouterr().err
    assert shown.count("distcse: ") == 1 and shown.splitlines()[-1].startswith("distcse: ")
    assert "Traceback" not in shown
    started = [folder for folder in storage.path.iterdir() if (folder / "recipe.yaml").is_file()]
    arguments = ["--resume", str(started[0])] if started else [str(tmp_path / "recipe.yaml"), *overrides]
    assert cli.main(["train", *arguments]) == 0


def test_a_teacher_that_cannot_store_its_table_is_one_error(storage: Disk, recipe_with: MakeRecipe) -> None:
    recipe = recipe_with(f"storage.cache={storage.path}", "evaluation.final_suites=[]", "training.max_steps=1")
    Corpus.prepare(recipe.corpus, open_store(storage.path))
    error = RunDirectoryError if storage.kind == "read-only" else CorpusCacheError
    with storage.refusing(), fails_with(error, str(storage.path), "storage.cache"):
        run(recipe, Reporter())
    assert not [path for path in storage.path.rglob("*") if path.name.startswith(".")]
    assert run(recipe, Reporter()).train_result.state.finished
