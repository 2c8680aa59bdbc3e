"""Flipped bits, truncated files, full and read-only disks: damage is named, repaired if possible, and never used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
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
    StorageWriteError,
)
from distcse.events import Event, LogMessage, Reporter
from distcse.models import Encoder
from distcse.recipe import CorpusSection, Recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.layer_selection import with_chosen_layers
from distcse.runs.mutual.phase_store import PhaseStore
from distcse.runs.mutual.phases import Phase
from distcse.storage import dump_checked_json, load_checked_json, open_store, sha256, write_text_atomic
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.targets import read_projection, write_projection
from distcse.text import Corpus, Pairs, TokenTable
from distcse.training.checkpoint_files import ModelState, TrainerState, load_model_state, load_trainer_state
from distcse.training.checkpoints import CheckpointStore
from distcse.tuning.records import Trial, TrialMetric, read_trial
from tests.backends import run
from tests.disks import KINDS, Disk, disk
from tests.failures import fails_with
from tests.jobs import make_spec
from tests.weights import assert_equal_weights, weights_of

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
    return Corpus.prepare(CorpusSection(path=str(file)), folder / "cache")


@pytest.mark.parametrize("name", ["values.bin", "offsets.npy", "corpus.json"])
def test_a_damaged_corpus_is_prepared_again(tmp_path: Path, damage: Damage, name: str) -> None:
    before = make_corpus(tmp_path)
    assert make_corpus(tmp_path).reused
    damage(before.directory / name)
    after = make_corpus(tmp_path)
    assert not after.reused and after.directory == before.directory
    assert after.texts(range(len(LINES))) == LINES and after.fingerprint == before.fingerprint
    assert make_corpus(tmp_path).reused
    assert [path.name for path in (tmp_path / "cache" / "corpora").iterdir()] == [after.directory.name]


@pytest.mark.parametrize("name", ["values.bin", "offsets.npy", "tokens.json"])
def test_a_damaged_token_table_is_prepared_again(
    tmp_path: Path, tiny: Callable[..., Path], damage: Damage, name: str
) -> None:
    corpus = make_corpus(tmp_path)
    tokenizer = Encoder.load(tiny("bert"), pooling="mean").tokenizer
    before = TokenTable.prepare(corpus, tokenizer, 16, tmp_path / "cache")
    rows = [row.tolist() for row in before.rows(range(len(LINES)))]
    damage(before.directory / name)
    after = TokenTable.prepare(corpus, tokenizer, 16, tmp_path / "cache")
    assert not after.reused and [row.tolist() for row in after.rows(range(len(LINES)))] == rows


def locate_table(folder: Path) -> EmbeddingTable:
    identity = TableIdentity("m", "c", 250, None, None, "", "fp32", 100)
    return EmbeddingTable.locate(folder, identity)


def vectors(rows: range) -> np.ndarray:
    return np.random.default_rng(rows.start).normal(size=(len(rows), 16)).astype(np.float32)


@pytest.mark.parametrize("name", ["shard-00001.npy", "shard-00001.json"])
def test_a_damaged_shard_is_embedded_again(tmp_path: Path, damage: Damage, name: str) -> None:
    table = locate_table(tmp_path)
    for shard in range(3):
        table.write_shard(shard, vectors(table.shard_range(shard)))
    expected = locate_table(tmp_path).vectors(np.arange(250))
    damage(table.directory / name)
    reopened = locate_table(tmp_path)
    assert reopened.missing_shards() == [1]
    reopened.write_shard(1, vectors(reopened.shard_range(1)))
    assert reopened.missing_shards() == []
    np.testing.assert_array_equal(locate_table(tmp_path).vectors(np.arange(250)), expected)


def test_a_damaged_layer_selection_is_computed_again(recipe_with: MakeRecipe, damage: Damage) -> None:
    recipe = recipe_with("student.layers=auto", "student.num_layers=1")
    corpus = Corpus.prepare(recipe.corpus, Path(recipe.storage.cache))
    chosen = with_chosen_layers(recipe, corpus, LocalBackend(), Reporter())
    (file,) = (Path(recipe.storage.cache) / "layers").iterdir()
    damage(file)
    assert with_chosen_layers(recipe, corpus, LocalBackend(), Reporter()) == chosen
    assert load_checked_json(file)["layers"] == chosen.student.layers


# -- other damaged files are refused, and the previous checkpoint is used --------------------------------------------------


def make_state(value: float) -> ModelState:
    return ModelState({"w": torch.full((500,), value)}, {"w": {"exp_avg": torch.ones(500)}}, int(value))


@pytest.mark.parametrize("name", ["weights.safetensors", "exp_avg.safetensors", "trainer_state.json"])
def test_the_previous_checkpoint_is_used_if_the_latest_is_damaged(tmp_path: Path, damage: Damage, name: str) -> None:
    checkpoints = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(make_state(step), TrainerState(step, [(s, float(s)) for s in range(1, step + 1)]))
    latest = checkpoints.latest()
    assert latest is not None and latest == checkpoints.best()
    damage(latest / name)
    with fails_with(CheckpointError, str(latest)):
        load_model_state(latest)
        load_trainer_state(latest)
    events: list[Event] = []
    restored = CheckpointStore(tmp_path).restore(events.append)
    assert restored is not None and restored[0].step == 2 and restored[1].weights["w"][0] == 2.0
    (warning,) = events
    assert isinstance(warning, LogMessage) and warning.warning
    assert str(latest) in warning.text and "step-000002" in warning.text
    damage(tmp_path / "checkpoints" / "step-000002" / name)
    with fails_with(CheckpointError, str(tmp_path / "checkpoints")):
        CheckpointStore(tmp_path).restore()


def test_a_damaged_pointer_is_replaced_by_the_latest_step(tmp_path: Path, damage: Damage) -> None:
    checkpoints = CheckpointStore(tmp_path)
    for step in (1, 2):
        checkpoints.save(make_state(step), TrainerState(step, [(step, 1.0)]))
    damage(tmp_path / "checkpoints" / "latest")
    restored = CheckpointStore(tmp_path).restore()
    assert checkpoints.best() is not None
    assert restored is not None and restored[0].step in (1, 2)
    assert restored[0].step == 2 or damage is flip  # a flipped bit may name another existing step


def test_a_run_with_a_damaged_checkpoint_ends_with_the_same_weights(recipe_with: MakeRecipe) -> None:
    from tests.jobs import train as train_job

    recipe = recipe_with("training.max_steps=18", "evaluation.eval_steps=3")
    reference, tables = make_spec(recipe)
    train_job(reference, tables)
    spec, tables = make_spec(recipe)
    assert train_job(spec, tables, stop_after=8).interrupted
    latest = CheckpointStore(spec.run.path).latest()
    assert latest is not None and load_trainer_state(latest).step > 3
    flip(latest / "exp_avg.safetensors")
    events: list[Event] = []
    train_job(spec, tables, events)
    assert any(isinstance(event, LogMessage) and event.warning and str(latest) in event.text for event in events)
    assert_equal_weights(weights_of(reference.run.path), weights_of(spec.run.path))


def test_a_model_damaged_after_its_export_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    Encoder.load(tiny("bert"), pooling="mean").save(tmp_path / "good")
    for damage in (flip, cut, empty, zeros):
        folder = shutil.copytree(tmp_path / "good", tmp_path / damage.__name__)
        damage(folder / "model.safetensors")
        with fails_with(ModelFormatError, str(folder / "model.safetensors"), "distcse/checksums.json"):
            Encoder.load(folder)
    for name in (
        "config.json",
        "modules.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "1_Pooling/config.json",
        "sentence_bert_config.json",
        "distcse/checksums.json",
    ):
        folder = shutil.copytree(tmp_path / "good", tmp_path / name.replace("/", "-"))
        cut(folder / name, 0.5)
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


def write_phase_store(folder: Path) -> None:
    store = PhaseStore(folder)
    store.record_pairs("pairs")
    store.post("bert", Phase(0), _SCORES, None)


_SCORES = np.zeros(4, dtype=np.float32)
_SCORES_FILE = f"labels/start-bert.{sha256([_SCORES.data])[:12]}.npy"
RECORDS = (
    Record("phases.json", write_phase_store, lambda folder: PhaseStore(folder).dropped),
    Record(_SCORES_FILE, write_phase_store, lambda folder: PhaseStore(folder).scores("bert", Phase(0))),
    Record("trial.json", Trial("t", {"lr": 1.0}, metrics=[TrialMetric(1, 2.0, 3.0, 4.0)]).write, read_trial),
    Record(
        "run.json",
        lambda folder: RunDirectory(folder).record(1, {"corpus": "c"}),
        lambda folder: RunDirectory(folder).record(1, {"corpus": "c"}),
    ),
    Record(
        "projection.safetensors",
        lambda folder: write_projection(
            np.ones((4, 2), dtype=np.float32), "key", open_store(folder) / "projection.safetensors", 1.0
        ),
        lambda folder: read_projection(folder / "projection.safetensors"),
        EmbeddingTableError,
    ),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.name)
@pytest.mark.parametrize("damage", [cut, empty, zeros, flip], ids=lambda damage: damage.__name__)
def test_damaged_records_of_a_run_are_refused_by_name(tmp_path: Path, record: Record, damage: Damage) -> None:
    record.write(tmp_path)
    record.read(tmp_path)
    damage(tmp_path / record.name)
    with fails_with(record.error, record.name):
        record.read(tmp_path)


@pytest.mark.parametrize("file", ["values.bin", "offsets.npy", "rows.npy", "pairs.json"])
@pytest.mark.parametrize("damage", [cut, empty, zeros, flip, Path.unlink], ids=lambda damage: damage.__name__)
def test_damaged_pairs_of_a_run_are_refused(tmp_path: Path, file: str, damage: Damage) -> None:
    Pairs.write(tmp_path / "pairs", [(f"a {n}", f"b {n}") for n in range(99)])
    Pairs.open_verified(tmp_path / "pairs")
    damage(tmp_path / "pairs" / file)
    with fails_with(CorpusCacheError, f"{tmp_path / 'pairs'} is incomplete or damaged", "delete it and --resume"):
        Pairs.open_verified(tmp_path / "pairs")


def test_every_flipped_bit_of_a_record_is_detected(tmp_path: Path) -> None:
    file, content = tmp_path / "record.json", {"step": 12, "scores": [[1, 0.5], [2, 0.25]], "finished": False}
    file.write_text(dump_checked_json(content))
    original = file.read_bytes()
    for position in range(len(original)):
        for bit in range(8):
            flipped = bytearray(original)
            flipped[position] ^= 1 << bit
            file.write_bytes(bytes(flipped))
            try:
                assert load_checked_json(file) == content
            except ValueError:
                continue


# -- storage that refuses writing -----------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "disk", request.param) as opened:
        yield opened


def content_of(folder: Path) -> dict[str, bytes]:
    """Read all files of a folder, including hidden ones."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if path.name != "filling"
    }


def save_checkpoint(folder: Path, step: int) -> None:
    state = ModelState({"w": torch.full((5000,), float(step))}, {}, step)
    CheckpointStore(folder).save(state, TrainerState(step, [(step, float(step))]))


def write_shards(folder: Path, step: int) -> None:
    table = locate_table(folder)
    table.write_shard(step, vectors(table.shard_range(step)).repeat(16, axis=1))


def write_corpus(folder: Path, step: int) -> None:
    source = folder.parent / f"source-{step}.txt"
    if not source.exists():
        source.write_text("\n".join(f"{step} {line}" for line in LINES))
    Corpus.prepare(CorpusSection(path=str(source)), folder)


def write_pairs(folder: Path, step: int) -> None:
    Pairs.write(folder / f"pairs-{step}", [(f"{n} {step}", "b") for n in range(999)])


def write_labels(folder: Path, step: int) -> None:
    store = PhaseStore(folder)
    store.post(f"group-{step}", Phase(0), np.zeros(5000, dtype=np.float32), None)


@pytest.mark.parametrize(
    "write",
    [
        save_checkpoint,
        write_shards,
        write_corpus,
        write_labels,
        lambda folder, step: write_text_atomic(folder / "report.html", f"{step}" * 10_000),
        write_pairs,
        lambda folder, step: write_projection(
            np.full((99, 99), step, np.float32), "key", open_store(folder) / "p.safetensors", 1.0
        ),
    ],
    ids=["checkpoint", "table", "corpus", "labels", "report", "pairs", "projection"],
)
def test_a_refused_write_is_one_error_and_changes_nothing(
    storage: Disk, tmp_path: Path, write: Callable[[Path, int], None]
) -> None:
    (tmp_path / "source-1.txt").write_text("\n".join(f"1 {line}" for line in LINES))
    write(storage.path, 0)
    before = content_of(storage.path)
    with (
        storage.refusing(),
        fails_with(CorpusCacheError if write in (write_corpus, write_pairs) else StorageWriteError, str(storage.path)),
    ):
        write(storage.path, 1)
    assert content_of(storage.path) == before
    write(storage.path, 1)
    assert content_of(storage.path) != before


def test_a_refused_export_keeps_the_previous_model(storage: Disk, tiny: Callable[..., Path]) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    encoder.save(storage.path / "model")
    before = content_of(storage.path)
    with torch.no_grad():
        next(encoder.parameters()).mul_(2)
    with storage.refusing(), fails_with(StorageWriteError, str(storage.path / "model")):
        encoder.save(storage.path / "model")
    assert content_of(storage.path) == before
    assert Encoder.load(storage.path / "model").encode(["One."]).shape == (1, 32)


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
    Corpus.prepare(recipe.corpus, storage.path)
    error = RunDirectoryError if storage.kind == "read-only" else CorpusCacheError
    with storage.refusing(), fails_with(error, str(storage.path), "storage.cache"):
        run(recipe, Reporter())
    assert not [path for path in storage.path.rglob("*") if path.name.startswith(".")]
    assert run(recipe, Reporter()).train_result.state.finished


def test_reading_a_damaged_table_names_the_file(tmp_path: Path) -> None:
    table = locate_table(tmp_path)
    table.write_shard(0, vectors(table.shard_range(0)))
    cut(table.directory / "shard-00000.npy", 0.2)
    with fails_with(EmbeddingTableError, "shard-00000.npy"):
        locate_table(tmp_path).vectors([1])
