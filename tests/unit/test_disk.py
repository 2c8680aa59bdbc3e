"""Bits that turned, files that were cut, disks that are full or read-only: named, made again, never taken for good."""

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

from distcse import train
from distcse.data import Corpus, TokenTable
from distcse.errors import DistcseError, EncoderError, RunError, TeacherError
from distcse.events import Event, LogMessage, Reporter
from distcse.experiments.distillation.layer_selection import with_chosen_layers
from distcse.experiments.distillation.run import run
from distcse.experiments.mutual.pairs import Pairs
from distcse.experiments.mutual.phase_store import PhaseStore
from distcse.experiments.mutual.phases import Phase
from distcse.files import dump_checked_json, load_checked_json, write_text_atomic
from distcse.models import Encoder
from distcse.recipe import CorpusSection, Recipe
from distcse.runs.directory import RunDirectory
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.targets import read_projection, write_projection
from distcse.trainer.checkpoints import CheckpointStore, ModelState, TrainerState, load_model_state, load_trainer_state
from distcse.tuning.records import Trial, TrialMetric, read_trial
from tests.disks import KINDS, Disk, disk
from tests.jobs import make_spec
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
LINES = [f"Sentence number {number} of the corpus." for number in range(400)]


def flip(file: Path, place: float = 0.7) -> None:
    """Turn one bit, as far into the file as the share says."""
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= 1
    file.write_bytes(bytes(content))


def cut(file: Path, place: float = 0.7) -> None:
    """Keep that share of a file."""
    content = file.read_bytes()
    file.write_bytes(content[: int(place * len(content))])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def zeros(file: Path) -> None:
    """What a power cut leaves of a file that was renamed before it was flushed."""
    file.write_bytes(bytes(file.stat().st_size))


DAMAGES = (flip, cut, empty, zeros, Path.unlink)
Damage = Callable[[Path], None]


@pytest.fixture(params=DAMAGES, ids=lambda damage: damage.__name__)
def damage(request: pytest.FixtureRequest) -> Damage:
    chosen: Damage = request.param
    return chosen


# -- what can be made again is made again ---------------------------------------------------------------------------------


def corpus_of(folder: Path) -> Corpus:
    file = folder / "corpus.jsonl"
    rows = ({"text": text, "of": str(number % 3)} for number, text in enumerate(LINES))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Corpus.prepare(CorpusSection(path=str(file), domain="of"), folder / "cache")


@pytest.mark.parametrize("name", ["values.bin", "offsets.npy", "domains.npy", "corpus.json"])
def test_a_damaged_corpus_is_read_again(tmp_path: Path, damage: Damage, name: str) -> None:
    before = corpus_of(tmp_path)
    assert corpus_of(tmp_path).reused
    damage(before.directory / name)
    after = corpus_of(tmp_path)
    assert not after.reused and after.directory == before.directory
    assert after.texts(range(len(LINES))) == LINES and after.fingerprint == before.fingerprint
    assert corpus_of(tmp_path).reused
    assert [path.name for path in (tmp_path / "cache" / "corpora").iterdir()] == [after.directory.name]


@pytest.mark.parametrize("name", ["values.bin", "offsets.npy", "tokens.json"])
def test_damaged_tokens_are_made_again(tmp_path: Path, tiny: Callable[..., Path], damage: Damage, name: str) -> None:
    corpus = corpus_of(tmp_path)
    tokenizer = Encoder.load(tiny("bert"), pooling="mean").tokenizer
    before = TokenTable.prepare(corpus, tokenizer, 16, tmp_path / "cache")
    rows = [row.tolist() for row in before.rows(range(len(LINES)))]
    damage(before.directory / name)
    after = TokenTable.prepare(corpus, tokenizer, 16, tmp_path / "cache")
    assert not after.reused and [row.tolist() for row in after.rows(range(len(LINES)))] == rows


def table_of(folder: Path) -> EmbeddingTable:
    identity = TableIdentity("m", "c", 250, None, None, "", "fp32", 100)
    return EmbeddingTable.locate(folder, identity)


def vectors(rows: range) -> np.ndarray:
    return np.random.default_rng(rows.start).normal(size=(len(rows), 16)).astype(np.float32)


@pytest.mark.parametrize("name", ["shard-00001.npy", "shard-00001.json"])
def test_a_damaged_shard_is_named_and_embedded_again(tmp_path: Path, damage: Damage, name: str) -> None:
    table = table_of(tmp_path)
    for shard in range(3):
        table.write_shard(shard, vectors(table.shard_range(shard)))
    expected = table_of(tmp_path).vectors(np.arange(250))
    damage(table.directory / name)
    again = table_of(tmp_path)
    assert again.missing_shards() == [1]
    again.write_shard(1, vectors(again.shard_range(1)))
    assert again.missing_shards() == []
    np.testing.assert_array_equal(table_of(tmp_path).vectors(np.arange(250)), expected)


def test_a_choice_of_layers_that_was_damaged_is_made_again(recipe_with: MakeRecipe, damage: Damage) -> None:
    recipe = recipe_with("student.layers=auto", "student.num_layers=1")
    corpus = Corpus.prepare(recipe.corpus, Path(recipe.storage.cache))
    chosen = with_chosen_layers(recipe, corpus, Reporter())
    (kept,) = (Path(recipe.storage.cache) / "layers").iterdir()
    damage(kept)
    assert with_chosen_layers(recipe, corpus, Reporter()) == chosen
    assert load_checked_json(kept)["layers"] == chosen.student.layers


# -- what cannot is refused, and the one before is taken ------------------------------------------------------------------


def state_of(value: float) -> ModelState:
    return ModelState({"w": torch.full((500,), value)}, {"w": {"exp_avg": torch.ones(500)}}, int(value))


@pytest.mark.parametrize("name", ["state.safetensors", "position.json"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path, damage: Damage, name: str) -> None:
    checkpoints = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(state_of(step), TrainerState(step, [(s, float(s)) for s in range(1, step + 1)]))
    latest = checkpoints.latest()
    assert latest is not None and latest == checkpoints.best()
    damage(latest / name)
    with pytest.raises(RunError, match=rf"checkpoint {latest} cannot be read"):
        load_model_state(latest)
        load_trainer_state(latest)
    events: list[Event] = []
    restored = CheckpointStore(tmp_path).restore(events.append)
    assert restored is not None and restored[0].step == 2 and restored[1].weights["w"][0] == 2.0
    (told,) = events
    assert isinstance(told, LogMessage) and told.warning and f"{latest} cannot be read" in told.text
    assert told.text.endswith("going on from step-000002")
    damage(tmp_path / "checkpoints" / "step-000002" / name)
    with pytest.raises(RunError, match=r"no other is whole\. Remove .* to start from the beginning"):
        CheckpointStore(tmp_path).restore()


@pytest.mark.parametrize("pointer", ["latest", "best"])
def test_a_damaged_pointer_costs_nothing(tmp_path: Path, damage: Damage, pointer: str) -> None:
    checkpoints = CheckpointStore(tmp_path)
    for step in (1, 2):
        checkpoints.save(state_of(step), TrainerState(step, [(step, 1.0)]))
    damage(tmp_path / "checkpoints" / pointer)
    restored = CheckpointStore(tmp_path).restore()
    assert restored is not None and restored[0].step in (1, 2)
    assert restored[0].step == 2 or damage is flip  # one bit makes 2 of 3 and of 1: a name may still be one


def test_a_run_whose_checkpoint_was_damaged_ends_at_the_same_weights(recipe_with: MakeRecipe) -> None:
    from tests.jobs import train as learn

    recipe = recipe_with("training.max_steps=18", "evaluation.eval_steps=3")
    undisturbed, tables = make_spec(recipe)
    learn(undisturbed, tables)
    spec, tables = make_spec(recipe)
    assert learn(spec, tables, stop_after=8).interrupted
    latest = CheckpointStore(spec.run).latest()
    assert latest is not None and load_trainer_state(latest).step > 3
    flip(latest / "state.safetensors")
    events: list[Event] = []
    learn(spec, tables, events)
    assert any(isinstance(event, LogMessage) and "going on from" in event.text for event in events)
    assert_equal_weights(weights_of(undisturbed.run), weights_of(spec.run))


def test_a_model_that_was_damaged_after_its_export_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    Encoder.load(tiny("bert"), pooling="mean").save(tmp_path / "good")
    for damage in (flip, cut, empty, zeros):
        folder = shutil.copytree(tmp_path / "good", tmp_path / damage.__name__)
        damage(folder / "model.safetensors")
        with pytest.raises(EncoderError, match=r"model\.safetensors is not what was written: its checksum differs"):
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
class Kept:
    """A small file of a run: how it is written, and read."""

    name: str
    write: Callable[[Path], Any]
    read: Callable[[Path], Any]


def write_ledger(folder: Path) -> None:
    ledger = PhaseStore(folder)
    ledger.begin("pairs")
    ledger.post("bert", Phase(0), np.zeros(4, dtype=np.float32), None)


KEPT = (
    Kept("ledger.json", write_ledger, lambda folder: PhaseStore(folder).dropped),
    Kept("labels/start-bert.npy", write_ledger, lambda folder: PhaseStore(folder).scores("bert", Phase(0))),
    Kept("trial.json", Trial("t", {"lr": 1.0}, reported=[TrialMetric(1, 2.0, 3.0, 4.0)]).write, read_trial),
    Kept(
        "run.json",
        lambda folder: RunDirectory(folder).record(1, {"corpus": "c"}),
        lambda folder: RunDirectory(folder).record(1, {"corpus": "c"}),
    ),
    Kept(
        "pairs.parquet",
        lambda folder: Pairs(["a"] * 99, ["b"] * 99).write(folder / "pairs.parquet"),
        lambda folder: Pairs.read(folder / "pairs.parquet"),
    ),
    Kept(
        "projection.safetensors",
        lambda folder: write_projection(np.ones((4, 2), dtype=np.float32), "key", folder / "projection.safetensors"),
        lambda folder: read_projection(folder / "projection.safetensors"),
    ),
)


@pytest.mark.parametrize("kept", KEPT, ids=lambda kept: kept.name)
@pytest.mark.parametrize("damage", [cut, empty, zeros, flip], ids=lambda damage: damage.__name__)
def test_records_of_a_run_are_whole_or_refused_by_name(tmp_path: Path, kept: Kept, damage: Damage) -> None:
    kept.write(tmp_path)
    kept.read(tmp_path)
    if (kept.name, damage) == ("pairs.parquet", flip):
        pytest.skip("a bit of text in Parquet is still text: the ledger's fingerprint of the pairs refuses it")
    damage(tmp_path / kept.name)
    with pytest.raises(DistcseError, match=kept.name.replace(".", r"\.")):
        kept.read(tmp_path)


def test_no_flipped_bit_of_a_record_goes_unseen(tmp_path: Path) -> None:
    file, content = tmp_path / "record.json", {"step": 12, "scores": [[1, 0.5], [2, 0.25]], "finished": False}
    file.write_text(dump_checked_json(content))
    whole = file.read_bytes()
    for place in range(len(whole)):
        for bit in range(8):
            turned = bytearray(whole)
            turned[place] ^= 1 << bit
            file.write_bytes(bytes(turned))
            try:
                assert load_checked_json(file) == content
            except ValueError:
                continue


# -- storage that refuses -------------------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    with disk(tmp_path / "disk", request.param) as made:
        yield made


def content_of(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, hidden files too."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else b""
        for path in sorted(folder.rglob("*"))
        if path.name != "filling"
    }


def save_checkpoint(folder: Path, step: int) -> None:
    state = ModelState({"w": torch.full((5000,), float(step))}, {}, step)
    CheckpointStore(folder).save(state, TrainerState(step, [(step, float(step))]))


def write_shards(folder: Path, step: int) -> None:
    table = table_of(folder)
    table.write_shard(step, vectors(table.shard_range(step)).repeat(16, axis=1))


def write_corpus(folder: Path, step: int) -> None:
    source = folder.parent / f"source-{step}.txt"
    if not source.exists():
        source.write_text("\n".join(f"{step} {line}" for line in LINES))
    Corpus.prepare(CorpusSection(path=str(source)), folder)


def write_labels(folder: Path, step: int) -> None:
    ledger = PhaseStore(folder)
    ledger.post(f"group-{step}", Phase(0), np.zeros(5000, dtype=np.float32), None)


@pytest.mark.parametrize(
    "write",
    [
        save_checkpoint,
        write_shards,
        write_corpus,
        write_labels,
        lambda folder, step: write_text_atomic(folder / "report.html", f"{step}" * 10_000),
        lambda folder, step: Pairs([f"{n} {step}" for n in range(999)], ["b"] * 999).write(folder / "pairs.parquet"),
        lambda folder, step: write_projection(np.full((99, 99), step, np.float32), "key", folder / "p.safetensors"),
    ],
    ids=["checkpoint", "table", "corpus", "labels", "report", "pairs", "projection"],
)
def test_storage_that_refuses_is_one_error_and_leaves_what_was_there(
    storage: Disk, tmp_path: Path, write: Callable[[Path, int], None]
) -> None:
    (tmp_path / "source-1.txt").write_text("\n".join(f"1 {line}" for line in LINES))
    write(storage.path, 0)
    before = content_of(storage.path)
    with (
        storage.refusing(),
        pytest.raises(DistcseError, match="cannot be written: "),
    ):
        write(storage.path, 1)
    assert content_of(storage.path) == before
    write(storage.path, 1)
    assert content_of(storage.path) != before


def test_an_export_that_storage_refuses_leaves_the_model_before(storage: Disk, tiny: Callable[..., Path]) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    encoder.save(storage.path / "model")
    before = content_of(storage.path)
    with torch.no_grad():
        next(encoder.parameters()).mul_(2)
    with storage.refusing(), pytest.raises(DistcseError, match=r"model cannot be written: "):
        encoder.save(storage.path / "model")
    assert content_of(storage.path) == before
    assert Encoder.load(storage.path / "model").encode(["One."]).shape == (1, 32)


def test_a_run_on_storage_that_refuses_ends_in_one_line_and_goes_on_when_there_is_room(
    storage: Disk, recipe_with: MakeRecipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        "training.max_steps=4",
        "evaluation.eval_steps=2",
        "evaluation.final_suites=[]",
        f"storage.runs={storage.path}",
    ]
    run(recipe_with(*overrides, f"storage.runs={tmp_path / 'elsewhere'}"), Reporter())  # the cache is filled
    with storage.refusing():
        assert train.main([str(tmp_path / "recipe.yaml"), *overrides]) in (1, 2)
    told = capsys.readouterr().err
    assert told.count("distcse: ") == 1 and told.splitlines()[-1].startswith("distcse: ") and "Traceback" not in told
    begun = [folder for folder in storage.path.iterdir() if (folder / "recipe.yaml").is_file()]
    again = ["--resume", str(begun[0])] if begun else [str(tmp_path / "recipe.yaml"), *overrides]
    assert train.main(again) == 0


def test_a_teacher_that_cannot_store_is_told_once(storage: Disk, recipe_with: MakeRecipe) -> None:
    recipe = recipe_with(f"storage.cache={storage.path}", "evaluation.final_suites=[]", "training.max_steps=1")
    Corpus.prepare(recipe.corpus, storage.path)
    with storage.refusing(), pytest.raises(DistcseError, match=r"cannot be written|cannot write in"):
        run(recipe, Reporter())
    assert not [path for path in storage.path.rglob("*") if path.name.startswith(".")]
    assert run(recipe, Reporter()).outcome.state.finished


def test_a_damaged_table_is_told_by_whoever_opens_it(tmp_path: Path) -> None:
    table = table_of(tmp_path)
    table.write_shard(0, vectors(table.shard_range(0)))
    cut(table.directory / "shard-00000.npy", 0.2)
    with pytest.raises(TeacherError, match=r"shard-00000\.npy cannot be read .*; start the run again"):
        table_of(tmp_path).vectors([1])
