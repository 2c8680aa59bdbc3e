"""Folders and object storage: every writer is refused or killed at every point, on disks and on a real server behind a gate."""

from __future__ import annotations

import errno
import itertools
import os
import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from ray import cloudpickle

from distcse.errors import (
    CorpusCacheError,
    InvalidValueError,
    ModelNotFoundError,
    ObjectStorageError,
    RunRecordError,
    RunTakenOverError,
    StorageAddressError,
    StorageWriteError,
)
from distcse.events import Event, LogMessage, Reporter, StepReport
from distcse.models import Encoder
from distcse.preflight.machine import check_location
from distcse.recipe import CorpusSection, MutualRecipe, Recipe, with_values
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.precompute import prepare_tables
from distcse.runs.distillation.preparation import PreparedCorpus
from distcse.runs.lease import Lease, has_local_changes
from distcse.runs.mutual.phase_store import GroupContext, Phase, PhaseStore
from distcse.storage import ArtifactStore, open_store, resolve_path, text_checksum, to_uri
from distcse.storage.bucket_store import list_objects
from distcse.teachers.kinds import open_live
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.teachers.teacher import open_table_teacher
from distcse.text import Corpus, Pairs
from distcse.training.checkpoint_files import ModelState, TrainerState
from distcse.training.checkpoints import CheckpointStore
from distcse.tuning.trial import TrialContext
from tests.backends import run
from tests.disks import KINDS, Killed, before_change, disk, kill
from tests.failures import fails_with
from tests.jobs import make_recipe, rows_embedded
from tests.s3 import BUCKET, CREDENTIALS, Gate, Server, emulating_google, environment, gated, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def gate(server: Server) -> Iterator[Gate]:
    with gated(server) as gate:
        yield gate


@pytest.fixture
def bucket(gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Return an unused address behind the gate, with this machine's mirrors in the test's folder."""
    gate.open()
    for name, value in environment(gate.port, tmp_path / "mirror").items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{text_checksum(request.node.nodeid)[:8]}"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that simulates another machine by moving the mirrors."""
    return lambda name: monkeypatch.setenv("DISTCSE_MIRROR", str(tmp_path / name))


def key_of(path: str) -> str:
    return path.removeprefix(f"s3://{BUCKET}/")


def fill(store: ArtifactStore, **content: str) -> ArtifactStore:
    shutil.rmtree(store.path, ignore_errors=True)
    for name, text in content.items():
        file = store.path / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return store


def content_of(store: ArtifactStore) -> dict[str, str]:
    files = [file for file in store.path.rglob("*") if file.is_file()]
    return {file.relative_to(store.path).as_posix(): file.read_text() for file in files}


# Paths and addresses


def test_a_name_resolves_to_a_folder_or_an_addresss_mirror(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = open_store("runs/x")
    assert not local.is_remote and str(local.path) == "runs/x" == str(local) == to_uri(Path("runs/x"))
    remote = open_store("s3://bucket/runs/x/")
    assert remote.is_remote and str(remote) == to_uri(remote.path) == "s3://bucket/runs/x"
    assert remote.path.is_relative_to(tmp_path / "mirror")
    assert remote == open_store(remote.path) == open_store(str(remote.path))
    for derived in (remote / "a" / "b", remote.parent, open_store(remote.path.with_name("y"))):
        assert derived.is_remote
    assert str(remote / "a") == "s3://bucket/runs/x/a" and str(open_store("gs://bucket/k")) == "gs://bucket/k"
    assert str(open_store("s3://bucket")) == "s3://bucket"
    assert not open_store(tmp_path / "mirror" / "s3").is_remote
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other:9000")
    assert open_store("s3://bucket/runs/x") != remote, "two servers may have buckets of one name"


@pytest.mark.parametrize(
    "name",
    ["http://host/x", "s3://", "s3://bucket/../other", "s3://KEY:SECRET@bucket/x", "s3://bucket/x?secret_key=SECRET"],
)
def test_malformed_addresses_are_refused_and_not_repeated(
    name: str, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    with fails_with(InvalidValueError, "storage.runs", "s3://BUCKET/PREFIX") as refused:
        make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, f"storage.runs={name}")
    assert "SECRET" not in str(refused.value)
    with fails_with(StorageAddressError, "s3://BUCKET/PREFIX") as refused:
        resolve_path(name)
    assert "SECRET" not in str(refused.value)


# Files and folders


@pytest.mark.parametrize("kind", ["folder", "bucket"])
def test_a_location_has_files_and_folders_that_another_machine_finds(
    kind: str, bucket: str, machine: Callable[[str], None], tmp_path: Path
) -> None:
    address = f"{bucket}/run" if kind == "bucket" else str(tmp_path / "run")
    store = open_store(address)
    store.path.mkdir(parents=True)
    assert not store.fetch("recipe.yaml") and store.read("recipe.yaml") is None and store.read_json("none") is None
    store.write_text("recipe.yaml", "one")
    store.write_json("a/b.json", {"x": [1]})
    with (store / "m").write_folder() as folder:
        (folder / "w").write_text("1")
    (store / "m").publish()
    packed = pickle.dumps(store)
    machine("other")
    found = pickle.loads(packed)
    assert found == open_store(address) and str(found) == address and found.name == "run"
    assert (found / "a").parent == found and found.is_remote == found.path.is_relative_to(tmp_path / "other")
    assert found.list_names() == {"recipe.yaml", "a", "m"} and found.read("a/b.json/c") is None
    assert found.fetch("recipe.yaml") and (found.path / "recipe.yaml").read_text() == "one"
    assert found.read_json("a/b.json") == {"x": [1]} == (found / "a").read_json("b.json")
    assert (found / "m").has_folder() and (found / "m").fetch_folder() and content_of(found / "m") == {"w": "1"}
    found.write_text("a/b.json", '{"x": [2]}')
    with pytest.raises(ValueError, match="checksum"):
        found.read_json("a/b.json")
    found.write_text("recipe.yaml", "")
    assert found.read("recipe.yaml") == b""
    found.probe()
    (found / "m").delete_folder()
    assert not (found / "m").has_folder() and found.list_names() == {"recipe.yaml", "a"}
    found.delete_all()
    assert not found.path.exists() and not found.list_names()


def test_folders_are_uploaded_and_downloaded_as_a_unit(
    bucket: str, machine: Callable[[str], None], server: Server
) -> None:
    model = fill(open_store(f"{bucket}/model"), config="1", weights="w", sub__deep="d")
    assert not model.has_folder() and not model.fetch_folder()
    model.publish()
    machine("other")
    remote = open_store(f"{bucket}/model")
    assert remote.has_folder() and not remote.path.exists()
    assert remote.fetch_folder() and content_of(remote) == {"config": "1", "weights": "w", "sub/deep": "d"}
    fill(remote, config="2", weights="w")
    remote.publish()
    # Objects that the new record doesn't name are deleted.
    assert len([key for key in server.stored() if key.startswith(key_of(bucket))]) == 3
    machine("mirror")
    for _ in range(2):
        assert model.fetch_folder() and content_of(model) == {"config": "2", "weights": "w"}
        (model.path / "config").unlink()  # a damaged mirror is repaired
        (model.path / "weights").write_text("ww")
    model.delete_folder()
    assert not model.has_folder() and not model.path.exists()
    assert not [key for key in server.stored() if key.startswith(key_of(bucket))]


def test_damaged_objects_are_an_error(bucket: str, machine: Callable[[str], None], server: Server) -> None:
    fill(open_store(f"{bucket}/x"), a="1").publish()
    (data,) = [key for key in server.stored() if key.startswith(key_of(bucket)) and key.endswith("/a")]
    machine("other")
    server.write(data, b"2")
    with fails_with(RunRecordError, f"{data.rpartition('/')[2]}", bucket):
        open_store(f"{bucket}/x").fetch_folder()
    server.delete(data)
    with fails_with(RunRecordError, f"{bucket}/x", "record.json"):
        open_store(f"{bucket}/x").fetch_folder()
    server.write(f"{key_of(bucket)}/x/record.json", b"{}")
    with fails_with(RunRecordError, f"{bucket}/x/record.json"):
        open_store(f"{bucket}/x").fetch_folder()


def test_the_doctor_tests_object_storage(bucket: str, gate: Gate) -> None:
    checks = check_location("storage.runs", resolve_path(f"{bucket}/runs"))
    assert [check.name for check in checks] == ["storage.runs", "DISTCSE_MIRROR"]
    assert checks[0].line.endswith(f"{bucket}/runs: written, read and deleted")
    gate.refuse_from(0)
    (refused,) = check_location("storage.runs", resolve_path(f"{bucket}/runs"))
    assert refused.verdict == "fail" and BUCKET in refused.found


# Every point at which a writer may fail


def refuse() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


class Writer(NamedTuple):
    """Writes the versions 0 and 1 of something into a location; its files have more than 4 KiB."""

    write: Callable[[ArtifactStore, int], None]
    read: Callable[[ArtifactStore], Any]
    """Returns what a reader of the location finds: equal values for equal versions."""


def write_model(location: ArtifactStore, version: int) -> None:
    """Of three files, one is the same in both versions, one is another, and one is new."""
    names = {"config": "same", "weights": f"{version}", **({"card": "new"} if version else {})}
    model = location / "model"
    with model.write_folder() as folder:
        for name, text in names.items():
            (folder / name).write_text(text * 5000)
    model.publish()


def read_model(location: ArtifactStore) -> dict[str, str] | None:
    model = location / "model"
    return content_of(model) if model.fetch_folder() else None


def changing(change: Callable[[ArtifactStore], object], first: int | None = 0) -> Writer:
    """Return a writer whose version 0 is a version of the model, or nothing, and whose version 1 is a change of it."""

    def write(location: ArtifactStore, version: int) -> None:
        if version:
            change(location)
        elif first is not None:
            write_model(location, first)

    return Writer(write, read_model)


def make_state(step: int) -> ModelState:
    return ModelState({"w": torch.full((5000,), float(step))}, {"w": {"exp_avg": torch.ones(5000)}}, step)


def make_position(step: int, best: int = 0) -> TrainerState:
    return TrainerState(step, [(s, 50.0 if s == best else 10.0) for s in range(0, step + 1, 10)])


def save_checkpoint(location: ArtifactStore, version: int) -> None:
    for step in (20,) if version else (0, 10):
        CheckpointStore(location).save(make_state(step), make_position(step, best=20 * version))


def read_checkpoint(location: ArtifactStore) -> tuple[int, float, str]:
    checkpoints = CheckpointStore(location)
    restored, best = checkpoints.restore(), checkpoints.best()
    assert restored is not None and best is not None
    return restored[0].step, float(restored[1].weights["w"][0]), best.name


def open_table(location: ArtifactStore) -> EmbeddingTable:
    return EmbeddingTable.locate(location, TableIdentity("m", "c", 8, "mean", 16, "", "fp32", shard_rows=4))


def write_shard(location: ArtifactStore, version: int) -> None:
    open_table(location).write_shard(version, np.eye(4, 2000, dtype=np.float32))


def read_shards(location: ArtifactStore) -> Any:
    missing = open_table(location).missing_shards()
    rows = [row for row in range(8) if row // 4 not in missing]
    return missing, open_table(location).vectors(rows).tolist()


def post_scores(location: ArtifactStore, version: int) -> None:
    PhaseStore(location).post(f"group {version}", Phase(0), np.full(5000, version, dtype=np.float32), None)


def read_scores(location: ArtifactStore) -> dict[str, list[float]]:
    store = PhaseStore(location)
    return {group: store.scores(group, Phase(0)).tolist() for group in store.posted(Phase(0))}


def source_of(location: ArtifactStore, version: int) -> CorpusSection:
    file = location.path.parent / f"source-{version}.txt"
    if not file.exists():
        file.write_text("\n".join(f"sentence {number} of {version}" for number in range(400)))
    return CorpusSection(path=str(file))


def prepare_corpus(location: ArtifactStore, version: int) -> None:
    Corpus.prepare(source_of(location, version), location)


def find_corpora(location: ArtifactStore) -> list[list[str] | None]:
    found = [Corpus.find(source_of(location, version), location) for version in (0, 1)]
    return [None if corpus is None else corpus.texts(range(len(corpus))) for corpus in found]


def write_pairs(location: ArtifactStore, version: int) -> None:
    Pairs.write(location / f"pairs-{version}", [(f"{number} of {version}", "b") for number in range(999)])


def read_pairs(location: ArtifactStore) -> list[list[tuple[str, str]]]:
    return [list(Pairs.open_verified(open_store(folder)).both()) for folder in sorted(location.path.glob("pairs-*"))]


IN_BOTH = {
    "file": Writer(
        lambda location, version: location.write_text("a/x.yaml", f"{version}" * 5000),
        lambda location: location.read("a/x.yaml"),
    ),
    "folder": Writer(write_model, read_model),
    "new folder": changing(lambda location: write_model(location, 1), first=None),
    "checkpoint": Writer(save_checkpoint, read_checkpoint),
    "shard": Writer(write_shard, read_shards),
    "labels": Writer(post_scores, read_scores),
}
IN_FOLDERS = {
    **IN_BOTH,
    "corpus": Writer(prepare_corpus, find_corpora),
    "pairs": Writer(write_pairs, read_pairs),
}
IN_BUCKETS = {
    **IN_BOTH,
    "fewer files": changing(lambda location: (location / "model").keep_only({"config", "absent"}), first=1),
    "deleted folder": changing(lambda location: (location / "model").delete_folder()),
    "deleted location": changing(lambda location: location.delete_all()),
}


def writes(writer: Writer, location: ArtifactStore) -> bool:
    """Write the new version, and return whether it succeeded. A refusal is one error that names the location."""
    try:
        writer.write(location, 1)
    except Killed:
        return False
    except (StorageWriteError, CorpusCacheError, ObjectStorageError) as refused:
        assert str(location) in str(refused)
        return False
    return True


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_a_reader_of_a_folder_sees_the_old_content_or_the_new_one_at_every_point(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses one change, or the writer is killed before it."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # no power failure here
    writer = IN_FOLDERS[name]

    def start(folder: str) -> ArtifactStore:
        location = open_store(tmp_path / folder / "location")
        location.path.mkdir(parents=True)
        writer.write(location, 0)
        return location

    undisturbed = start("undisturbed")
    old = writer.read(undisturbed)
    with before_change(undisturbed.path, 0, kill) as changes:
        writer.write(undisturbed, 1)
    new = writer.read(undisturbed)
    assert old != new
    for number, change in enumerate(changes, start=1):
        for act in (refuse, kill) if "rmtree" not in change else (kill,):
            location = start(f"{number} {act.__name__}")
            with before_change(location.path, number, act, from_then_on=act is kill):
                succeeded = writes(writer, location)
            seen = writer.read(location)
            # A folder is renamed before another one takes its name; a killed process cannot rename it back.
            is_between = name == "folder" and act is kill and seen is None
            assert seen == new or (not succeeded and (seen == old or is_between)), f"{act.__name__} before {change}"
            writer.write(location, 1)
            assert writer.read(location) == new


@pytest.mark.parametrize("name", IN_BUCKETS)
def test_a_reader_of_a_bucket_sees_the_old_content_or_the_new_one_at_every_point(
    name: str, bucket: str, gate: Gate, machine: Callable[[str], None]
) -> None:
    """The storage refuses after 0, 1, 2, … changes; each reader is another machine."""
    writer, readers = IN_BUCKETS[name], itertools.count()

    def open_on(computer: str, folder: object) -> ArtifactStore:
        machine(computer)
        location = open_store(f"{bucket}/{folder}")
        location.path.mkdir(parents=True, exist_ok=True)
        return location

    def read(folder: object) -> Any:
        found = writer.read(open_on(f"reader {next(readers)}", folder))
        machine("writer")
        return found

    location, contents = open_on("writer", "undisturbed"), list[Any]()
    for version in (0, 1, 0, 1):  # also where files of this content are stored already
        writer.write(location, version)
        contents.append(read("undisturbed"))
    old, new, _, again = contents
    assert old != new == again
    for number in itertools.count():
        location = open_on("writer", number)
        writer.write(location, 0)
        gate.refuse_from(number)
        succeeded = writes(writer, location)
        gate.open()
        seen = read(number)
        assert seen == new or (seen == old and not succeeded), f"{number} changes"
        if succeeded:
            break
    assert number > 0


@pytest.mark.parametrize("name", IN_FOLDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_refuses_content_is_one_error_and_changes_nothing(kind: str, name: str, tmp_path: Path) -> None:
    writer = IN_FOLDERS[name]
    with disk(tmp_path / "disk", kind) as storage:
        location = open_store(storage.path / "location")
        location.path.mkdir()
        writer.write(location, 0)
        source_of(location, 1)
        before = files_of(location.path)
        with storage.refusing():
            assert not writes(writer, location)
        assert files_of(location.path) == before
        writer.write(location, 1)
        assert files_of(location.path) != before


def files_of(folder: Path) -> dict[Path, bytes]:
    """Read all files of a folder, including hidden ones."""
    return {path: path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


# Storage that refuses to delete, and what is not made again


def refuse_to_delete(gate: Gate) -> None:
    gate.refuses = lambda method, path: (
        (403, "AccessDenied") if method == "DELETE" and "record.json" not in path else None
    )


def test_files_that_a_killed_process_did_not_delete_are_deleted_later(
    bucket: str, gate: Gate, machine: Callable[[str], None]
) -> None:
    machine("writer")
    folder = fill(open_store(f"{bucket}/x"), a="1", b="2", c="3")
    folder.publish()
    refuse_to_delete(gate)  # the record is replaced or deleted first
    with fails_with(ObjectStorageError, "deleted"):
        folder.keep_only({"a"})
    gate.open()
    assert content_of(folder) == {"a": "1", "b": "2", "c": "3"} and len(list_objects(folder.uri)) == 4
    folder.keep_only({"a"})
    assert content_of(folder) == {"a": "1"} and len(list_objects(folder.uri)) == 2
    refuse_to_delete(gate)
    with fails_with(ObjectStorageError, "deleted"):
        folder.delete_folder()
    gate.open()
    assert not folder.has_folder() and len(list_objects(folder.uri)) == 1
    folder.delete_folder()
    assert not list_objects(folder.uri)


def test_a_checkpoint_is_complete_if_the_storage_refuses_to_delete_earlier_ones(
    bucket: str, gate: Gate, machine: Callable[[str], None]
) -> None:
    machine("writer")
    checkpoints, events = CheckpointStore(open_store(f"{bucket}/run")), list[Event]()
    for step in (0, 10, 20, 30):
        checkpoints.save(make_state(step), make_position(step), events.append)
        if step == 10:
            refuse_to_delete(gate)
    gate.open()
    texts = [event.text for event in events if isinstance(event, LogMessage) and event.warning]
    assert len(texts) == 2 and "step-000020 is complete" in texts[0]
    checkpoints.save(make_state(40), make_position(40), events.append)
    assert len(events) == 2
    names = {uri.partition("/checkpoints/")[2] for uri in list_objects(f"{bucket}/run/checkpoints")}
    steps = sorted(name.partition("/")[0] for name in names if name.endswith(".safetensors"))
    assert steps == ["step-000000", *["step-000030"] * 2, *["step-000040"] * 2]  # the best keeps its weights only


def test_a_grown_corpus_reuses_a_table_that_another_machine_stored(
    bucket: str, machine: Callable[[str], None], tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, f"storage.cache={bucket}/cache")
    vectors = []
    for name, rows, embedded in (("first", 250, 250), ("second", 260, 10), ("third", 260, 0)):
        machine(name)
        (tmp_path / "corpus.txt").write_text("\n".join(sentences[:rows]) + "\n")
        events: list[Event] = []
        (table,) = prepare_tables(recipe, read_corpus(recipe, Reporter()), LocalBackend(), Reporter(events.append))
        assert table is not None and rows_embedded(events) == [embedded]
        vectors.append(table.stored_vectors(np.arange(250)))
        assert not (table.store / "reuse").has_folder()
    assert all((each == vectors[0]).all() for each in vectors)


# Runs


@pytest.fixture
def recipe(bucket: str, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Recipe:
    storage = (f"storage.runs={bucket}/runs", f"storage.cache={bucket}/cache")
    short = ("training.max_steps=6", "training.log_every=2", "evaluation.eval_steps=3", "evaluation.final_suites=[]")
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences[:150], *storage, *short)


def test_a_run_continues_on_another_machine_and_ends_with_the_same_weights(
    recipe: Recipe, machine: Callable[[str], None], server: Server, tmp_path: Path
) -> None:
    on_disk = with_values(recipe, {"storage.runs": str(tmp_path / "r"), "storage.cache": str(tmp_path / "c")})
    expected = run(on_disk, Reporter()).directory.model / "model.safetensors"
    events: list[Event] = []
    stopped = run(recipe, Reporter(events.append, lambda: any(isinstance(event, StepReport) for event in events)))
    assert stopped.train_result.interrupted and 0 < stopped.train_result.state.step < 6
    address = to_uri(stopped.directory.path)
    machine("other")
    directory, reopened = RunDirectory.reopen(resolve_path(address), [])
    result = run(reopened, Reporter(), directory)
    assert not result.train_result.interrupted
    machine("third")
    encoder = Encoder.load(f"{address}/model")
    loaded = Encoder.load(expected.parent).state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in encoder.state_dict().items())
    with fails_with(ModelNotFoundError, f"{address}/model"):
        Encoder.load(address)
    with fails_with(ModelNotFoundError, f"{address}/nothing"):
        Encoder.load(f"{address}/nothing")
    stored = server.objects()
    assert not any(secret.encode() in content for secret in CREDENTIALS.values() for content in stored.values())
    events_json = server.read(f"{key_of(address)}/events.jsonl").decode()
    assert events_json.count('"event": "CheckpointSaved"') == 4 and events_json.count("run directory s3://") == 2


def test_a_run_without_storage_ends_and_continues_from_its_local_checkpoint(
    recipe: Recipe, gate: Gate, machine: Callable[[str], None]
) -> None:
    def refuse_after_step_3(event: object) -> None:
        if getattr(event, "step", None) == 3 and type(event).__name__ == "DevScore":
            gate.refuses = lambda method, path: (0, "")

    with fails_with(ObjectStorageError, recipe.storage.runs, "http://127.0.0.1", "--resume") as lost:
        run(recipe, Reporter(refuse_after_step_3))
    assert "Sentinel" not in str(lost.value)
    gate.open()
    (name,) = open_store(recipe.storage.runs).list_names()
    address = f"{recipe.storage.runs}/{name}"
    assert CheckpointStore(open_store(address)).latest() == resolve_path(address) / "checkpoints" / "step-000000"
    assert (resolve_path(address) / "checkpoints" / "step-000003").is_dir()
    events = list[Event]()
    directory, reopened = RunDirectory.reopen(resolve_path(address), [])
    assert run(reopened, Reporter(events.append), directory).train_result.state.finished
    assert any("step-000003" in event.text for event in events if isinstance(event, LogMessage))


def test_the_local_checkpoint_of_a_run_that_was_taken_over_is_ignored(
    bucket: str, machine: Callable[[str], None]
) -> None:
    run_path = resolve_path(f"{bucket}/run")
    run_path.mkdir(parents=True)
    lease = Lease.acquire(open_store(run_path))
    CheckpointStore(open_store(run_path, lease)).save(make_state(0), make_position(0))
    assert has_local_changes(open_store(run_path))
    machine("other")
    remote = resolve_path(f"{bucket}/run")
    assert not has_local_changes(open_store(remote))
    remote.mkdir(parents=True)
    later = Lease.acquire(open_store(remote))
    CheckpointStore(open_store(remote, later)).save(make_state(10), make_position(10))
    machine("mirror")
    assert not has_local_changes(open_store(run_path))
    with fails_with(RunTakenOverError, f"{bucket}/run"):
        CheckpointStore(open_store(run_path, lease)).save(make_state(20), make_position(20))
    found = CheckpointStore(open_store(run_path)).restore()
    assert found is not None and found[0].step == 10


# Google Cloud


def test_google_cloud_storage_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Callable[[str], None]
) -> None:
    with emulating_google(tmp_path / "log") as port:
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", f"http://127.0.0.1:{port}")
        machine("writer")
        address = f"gs://{BUCKET}/model"
        fill(open_store(address), config="1", weights="old").publish()
        fill(open_store(address), config="1", weights="new").publish()
        machine("reader")
        assert open_store(address).fetch_folder()
        assert content_of(open_store(address)) == {"config": "1", "weights": "new"}
        parent = open_store(f"gs://{BUCKET}")
        parent.write_text("model.yaml", "x")
        assert parent.read("model.yaml") == b"x" and parent.read("model.other") is None
        assert open_store(f"gs://{BUCKET}").list_names() == {"model", "model.yaml"}
        open_store(address).delete_folder()
        assert not open_store(address).has_folder()
        with fails_with(ObjectStorageError, "bucket elsewhere", "http://127.0.0.1"):
            open_store("gs://elsewhere/x").probe()


# Refused requests


def test_each_refusal_is_one_line_without_credentials(
    bucket: str, gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def probe_fails(address: str, *named: str) -> None:
        with fails_with(ObjectStorageError, *named) as refused:
            open_store(address).probe()
        assert "\n" not in str(refused.value) and "Sentinel" not in str(refused.value)

    probe_fails("s3://elsewhere/x", "bucket elsewhere", "http://127.0.0.1")
    gate.refuse_from(0, 403, "AccessDenied")
    probe_fails(bucket, "get, put, delete and list", BUCKET)
    gate.refuse_from(0, 403, "InvalidAccessKeyId")
    probe_fails(bucket, "INVALID_ACCESS_KEY_ID", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    gate.refuse_from(0, 403, "AccessDenied")
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    probe_fails(bucket, "http://127.0.0.1", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        probe_fails(bucket, endpoint, "network")


def test_temporary_refusals_are_retried(bucket: str, gate: Gate) -> None:
    refusals = [(503, "SlowDown")]
    gate.refuses = lambda method, path: refusals.pop() if method == "PUT" and refusals else None
    store = open_store(bucket)
    store.write_text("x", "one")
    assert not refusals and store.read("x") == b"one"


def test_a_run_that_cannot_be_stored_is_refused_when_it_starts(recipe: Recipe, gate: Gate) -> None:
    gate.refuse_from(0)
    with fails_with(ObjectStorageError, BUCKET):
        run(recipe, Reporter())


def test_messages_to_other_machines_contain_no_path_of_a_mirror(
    bucket: str, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    storage = (f"storage.runs={bucket}/runs", f"storage.cache={bucket}/cache")
    overrides = ("objective.regression={}", "student.projection=none")
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, *storage, *overrides)
    prepared = PreparedCorpus.prepare(recipe, LocalBackend(), Reporter())
    (table,) = prepared.tables(LocalBackend(), Reporter())
    run_path = RunDirectory.create(recipe).path
    leased = RunDirectory(run_path, Lease.acquire(open_store(run_path)))
    spec = prepared.spec(leased, [table], LocalBackend(), Reporter())
    assert table is not None and spec.run.guard is not None
    assert spec.targets is not None and spec.targets.projection is not None
    teacher, corpus = recipe.teachers.encoders[0], prepared.corpus.store
    for sent in (
        spec,
        table,
        partial(open_table_teacher, teacher, table),
        partial(open_live, teacher, corpus, 64),
        GroupContext(MutualRecipe.model_construct(), 0, spec.run, {"bi": spec.tokens}),  # type: ignore[call-arg]
        TrialContext(recipe, spec.run / "trials"),
    ):
        assert str(tmp_path / "mirror").encode() not in cloudpickle.dumps(sent)
