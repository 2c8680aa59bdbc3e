"""Paths and object storage, on a real server behind a gate that refuses requests at every point."""

from __future__ import annotations

import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from distcse import train
from distcse.errors import (
    InvalidValueError,
    ModelNotFoundError,
    ObjectStorageError,
    RunRecordError,
    RunTakenOverError,
    StorageAddressError,
)
from distcse.events import Event, LogMessage, Reporter, StepReport
from distcse.experiments.distillation.run import run
from distcse.files import text_checksum
from distcse.health.storage import check_location
from distcse.models import Encoder
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease, has_local_changes
from distcse.storage import (
    RemotePath,
    delete_dir,
    fetch,
    fetch_folder,
    is_stored,
    list_names,
    probe,
    read,
    remove,
    resolve_path,
    to_uri,
    upload_dir,
    write_text_atomic,
)
from distcse.teachers.table import EmbeddingTable, TableIdentity
from distcse.trainer.checkpoints import CheckpointStore, ModelState, TrainerState
from tests.failures import fails_with
from tests.jobs import make_recipe
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


def fill(folder: Path, **content: str) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in content.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def content_of(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()}


# Paths and addresses


def test_a_name_resolves_to_a_folder_or_an_addresss_mirror(bucket: str, tmp_path: Path) -> None:
    assert type(resolve_path("runs/x")) is type(Path()) and str(resolve_path("runs/x")) == "runs/x" == to_uri(
        Path("runs/x")
    )
    remote = resolve_path("s3://bucket/runs/x/")
    assert isinstance(remote, RemotePath) and to_uri(remote) == "s3://bucket/runs/x"
    assert remote.is_relative_to(tmp_path / "mirror") and remote == resolve_path(str(remote)) == resolve_path(
        Path(str(remote))
    )
    for derived in (remote / "a" / "b", remote.parent, remote.with_name("y"), remote.absolute()):
        assert isinstance(derived, RemotePath)
    assert to_uri(remote / "a") == "s3://bucket/runs/x/a" and to_uri(resolve_path("gs://bucket/k")) == "gs://bucket/k"
    assert to_uri(resolve_path("s3://bucket")) == "s3://bucket"


def test_a_remote_path_is_pickled_as_its_address(bucket: str, machine: Callable[[str], None], tmp_path: Path) -> None:
    packed = pickle.dumps(resolve_path("s3://bucket/runs/x") / "lease")
    machine("other")
    unpacked = pickle.loads(packed)
    assert to_uri(unpacked) == "s3://bucket/runs/x/lease" and unpacked.is_relative_to(tmp_path / "other")


def test_equal_buckets_of_two_servers_have_separate_mirrors(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = resolve_path("s3://bucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other:9000")
    assert resolve_path("s3://bucket/x") != first


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


def test_files_are_uploaded_and_downloaded(bucket: str, machine: Callable[[str], None], server: Server) -> None:
    file = resolve_path(f"{bucket}/run/recipe.yaml")
    assert not fetch(file) and read(file) is None
    file.parent.mkdir(parents=True)
    write_text_atomic(file, "one")
    assert server.read(key_of(to_uri(file))) == b"one"
    machine("other")
    file = resolve_path(f"{bucket}/run/recipe.yaml")
    assert fetch(file) and file.read_text() == "one" and list_names(file.parent) == {"recipe.yaml"}
    write_text_atomic(file, "")
    assert read(file) == b""


def test_folders_are_uploaded_and_downloaded_as_a_unit(
    bucket: str, machine: Callable[[str], None], server: Server
) -> None:
    model = fill(resolve_path(f"{bucket}/model"), config="1", weights="w", sub__deep="d")
    assert not is_stored(model) and not fetch_folder(model)
    upload_dir(model)
    machine("other")
    remote = resolve_path(f"{bucket}/model")
    assert is_stored(remote) and not remote.exists()
    assert fetch_folder(remote) and content_of(remote) == {"config": "1", "weights": "w", "sub/deep": "d"}
    fill(remote, config="2", weights="w")
    upload_dir(remote)
    # Objects that the new record doesn't name are deleted.
    assert len([key for key in server.stored() if key.startswith(key_of(bucket))]) == 3
    machine("mirror")
    assert fetch_folder(model) and content_of(model) == {"config": "2", "weights": "w"}
    delete_dir(model)
    assert not is_stored(model) and not model.exists()
    assert not [key for key in server.stored() if key.startswith(key_of(bucket))]


def test_unchanged_files_are_not_uploaded_again(bucket: str, gate: Gate) -> None:
    model = fill(resolve_path(f"{bucket}/model"), config="1", weights="w" * 1000)
    upload_dir(model)
    gate.changes.clear()
    upload_dir(model)
    assert gate.changes == []
    (model / "card").write_text("new")
    upload_dir(model)
    uploads = [change for change in gate.changes if change.startswith("PUT") and not change.endswith("/")]
    assert len(uploads) == 4  # card and record; config and weights are copied within the storage


def test_nothing_is_copied_in_a_shared_folder(tmp_path: Path) -> None:
    folder = fill(tmp_path / "x", a="1")
    upload_dir(folder)
    assert fetch_folder(folder) and is_stored(folder) and content_of(folder) == {"a": "1"}
    assert not fetch(folder / "b") and list_names(folder) == {"a"}
    delete_dir(folder)
    assert not folder.exists()


def test_damaged_objects_are_an_error(bucket: str, machine: Callable[[str], None], server: Server) -> None:
    upload_dir(fill(resolve_path(f"{bucket}/x"), a="1"))
    (data,) = [key for key in server.stored() if key.startswith(key_of(bucket)) and key.endswith("/a")]
    machine("other")
    server.write(data, b"2")
    with fails_with(RunRecordError, f"{data.rpartition('/')[2]}", bucket):
        fetch_folder(resolve_path(f"{bucket}/x"))
    server.delete(data)
    with fails_with(RunRecordError, f"{bucket}/x", "record.json"):
        fetch_folder(resolve_path(f"{bucket}/x"))
    server.write(f"{key_of(bucket)}/x/record.json", b"{}")
    with fails_with(RunRecordError, f"{bucket}/x/record.json"):
        fetch_folder(resolve_path(f"{bucket}/x"))


def test_a_model_is_saved_to_and_loaded_from_object_storage(
    bucket: str, machine: Callable[[str], None], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    encoder.save(f"{bucket}/model")
    machine("other")
    loaded = Encoder.load(f"{bucket}/model").state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in encoder.state_dict().items())
    assert train.main(["--resume", "s3://KEY:SECRET@bucket/x"]) == 1
    shown = capsys.readouterr().err
    assert f"[{StorageAddressError.code}]" in shown and "SECRET" not in shown


def test_the_doctor_tests_object_storage(bucket: str, gate: Gate) -> None:
    checks = check_location("storage.runs", resolve_path(f"{bucket}/runs"))
    assert [check.name for check in checks] == ["storage.runs", "DISTCSE_MIRROR"]
    assert checks[0].line.endswith(f"{bucket}/runs: written, read and deleted")
    gate.refuse_from(0)
    (refused,) = check_location("storage.runs", resolve_path(f"{bucket}/runs"))
    assert refused.verdict == "fail" and BUCKET in refused.found


def test_a_damaged_mirror_is_repaired(bucket: str) -> None:
    folder = fill(resolve_path(f"{bucket}/x"), a="111", b="222")
    upload_dir(folder)
    (folder / "a").unlink()
    (folder / "b").write_text("22")
    assert fetch_folder(folder) and content_of(folder) == {"a": "111", "b": "222"}


# Every point at which a writer may fail


def fail_at_every_point(gate: Gate, work: Callable[[], None], check: Callable[[bool], None]) -> int:
    """Repeat some work with the storage refusing after 0, 1, 2, … changes, until it succeeds; check after each attempt.

    Args:
        gate: The gate before the storage.
        work: Uploads something.
        check: Called with whether the work succeeded.

    Returns:
        The number of changes of the work.
    """
    for number in range(200):
        gate.refuse_from(number)
        try:
            work()
        except ObjectStorageError:
            gate.open()
            check(False)
        else:
            gate.open()
            check(True)
            return number
    raise AssertionError("the work never succeeded")


def test_a_reader_sees_the_old_folder_or_the_new_one(
    bucket: str, gate: Gate, machine: Callable[[str], None], tmp_path: Path
) -> None:
    old, new = {"config": "1", "weights": "old"}, {"config": "1", "weights": "new", "card": "c"}
    number = 0

    def replace() -> None:
        machine("writer")
        nonlocal number
        number += 1
        gate_refuses, gate.refuses = gate.refuses, lambda method, path: None
        upload_dir(fill(resolve_path(f"{bucket}/{number}/model"), **old))
        gate.refuses = gate_refuses
        gate.changes.clear()
        upload_dir(fill(resolve_path(f"{bucket}/{number}/model"), **new))

    def check_reader(succeeded: bool) -> None:
        machine(f"reader{number}")
        folder = resolve_path(f"{bucket}/{number}/model")
        assert fetch_folder(folder)
        assert content_of(folder) == new or (not succeeded and content_of(folder) == old)

    assert fail_at_every_point(gate, replace, check_reader) >= 4


def test_a_reader_sees_all_of_a_new_or_deleted_folder_or_none(
    bucket: str, gate: Gate, machine: Callable[[str], None]
) -> None:
    content = {"a": "1", "b": "2"}

    def check_reader(succeeded: bool) -> None:
        machine("reader")
        folder = resolve_path(f"{bucket}/x")
        assert fetch_folder(folder) == (folder.exists() and content_of(folder) == content)
        shutil.rmtree(folder, ignore_errors=True)
        machine("writer")

    machine("writer")
    points = fail_at_every_point(gate, lambda: upload_dir(fill(resolve_path(f"{bucket}/x"), **content)), check_reader)
    assert points == 3
    fail_at_every_point(gate, lambda: delete_dir(resolve_path(f"{bucket}/x")), check_reader)
    assert not is_stored(resolve_path(f"{bucket}/x"))
    upload_dir(fill(resolve_path(f"{bucket}/x"), **content))
    fail_at_every_point(gate, lambda: remove(resolve_path(f"{bucket}")), check_reader)
    assert not list_names(resolve_path(bucket)) - {"x"}


def make_state(step: int) -> ModelState:
    return ModelState({"w": torch.full((3,), float(step))}, {}, step)


def make_position(step: int, best: int = 0) -> TrainerState:
    return TrainerState(step, [(s, 50.0 if s == best else 10.0) for s in range(0, step + 1, 10)])


def test_a_reader_sees_the_old_checkpoint_or_the_new_one(
    bucket: str, gate: Gate, machine: Callable[[str], None]
) -> None:
    seen_steps: list[int] = []
    number = 0

    def save() -> None:
        nonlocal number
        number += 1
        machine("writer")
        checkpoints = CheckpointStore(resolve_path(f"{bucket}/{number}"))
        refuses, gate.refuses = gate.refuses, lambda method, path: None
        checkpoints.save(make_state(0), make_position(0))
        checkpoints.save(make_state(10), make_position(10))
        gate.refuses = refuses
        gate.changes.clear()
        checkpoints.save(make_state(20), make_position(20, best=20))

    def check_reader(succeeded: bool) -> None:
        machine(f"reader{number}")
        checkpoints = CheckpointStore(resolve_path(f"{bucket}/{number}"))
        found = checkpoints.restore()
        best = checkpoints.best()
        assert found is not None and best is not None
        assert float(found[1].weights["w"][0]) == found[0].step and found[0].step in (10, 20)
        assert best.name in ("step-000000", "step-000020")
        seen_steps.append(found[0].step)

    assert fail_at_every_point(gate, save, check_reader) >= 5
    assert seen_steps[0] == 10 and seen_steps[-1] == 20 and seen_steps == sorted(seen_steps)


def test_a_table_has_all_of_a_shard_or_none(bucket: str, gate: Gate, machine: Callable[[str], None]) -> None:
    identity = TableIdentity("m", "c", 8, "mean", 16, "", "fp32", shard_rows=4)
    vectors = torch.eye(4).numpy()
    cache = f"{bucket}/cache"
    EmbeddingTable.locate(resolve_path(cache), identity).write_shard(0, vectors)

    def embed() -> None:
        machine("builder")
        EmbeddingTable.locate(resolve_path(cache), identity).write_shard(1, vectors)

    def check_reader(succeeded: bool) -> None:
        machine("server")
        table = EmbeddingTable.locate(resolve_path(cache), identity)
        if missing := table.missing_shards():
            assert missing == [1] and not succeeded
        else:
            assert succeeded or gate.changes
            assert table.vectors([5]).tolist() == [[0, 1, 0, 0]]
        assert table.vectors([2]).tolist() == [[0, 0, 1, 0]]

    assert fail_at_every_point(gate, embed, check_reader) >= 4  # table.json, two files and the record


def test_a_shard_that_was_not_stored_is_not_embedded_again(bucket: str, gate: Gate) -> None:
    identity = TableIdentity("m", "c", 4, "mean", 16, "", "fp32", shard_rows=4)
    table = EmbeddingTable.locate(resolve_path(f"{bucket}/cache"), identity)
    gate.refuse_from(0)
    with fails_with(ObjectStorageError, f"{bucket}/cache"):
        table.write_shard(0, torch.eye(4).numpy())
    gate.open()
    assert table.missing_shards() == [] and is_stored(table.directory / "shard-00000")


# Runs


@pytest.fixture
def recipe(bucket: str, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Recipe:
    overrides = (
        f"storage.runs={bucket}/runs",
        f"storage.cache={bucket}/cache",
        "training.max_steps=12",
        "evaluation.final_suites=[]",
    )
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, *overrides)


def test_a_run_continues_on_another_machine_and_ends_with_the_same_weights(
    recipe: Recipe, machine: Callable[[str], None], server: Server, tmp_path: Path
) -> None:
    on_disk = recipe.model_copy(
        update={
            "storage": recipe.storage.model_copy(update={"runs": str(tmp_path / "r"), "cache": str(tmp_path / "c")})
        }
    )
    expected = run(on_disk, Reporter()).directory.model / "model.safetensors"
    events: list[Event] = []
    stopped = run(recipe, Reporter(events.append, lambda: any(isinstance(event, StepReport) for event in events)))
    assert stopped.train_result.interrupted and 0 < stopped.train_result.state.step < 12
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
    def refuse_after_step_6(event: object) -> None:
        if getattr(event, "step", None) == 6 and type(event).__name__ == "DevScore":
            gate.refuses = lambda method, path: (0, "")

    with fails_with(ObjectStorageError, recipe.storage.runs, "http://127.0.0.1", "--resume") as lost:
        run(recipe, Reporter(refuse_after_step_6))
    assert "Sentinel" not in str(lost.value)
    gate.open()
    (name,) = list_names(resolve_path(recipe.storage.runs))
    address = f"{recipe.storage.runs}/{name}"
    assert CheckpointStore(resolve_path(address)).latest() == resolve_path(address) / "checkpoints" / "step-000000"
    assert (resolve_path(address) / "checkpoints" / "step-000006").is_dir()
    notes: list[str] = []
    directory, reopened = RunDirectory.reopen(resolve_path(address), [])
    result = run(
        reopened, Reporter(lambda event: notes.append(event.text) if isinstance(event, LogMessage) else None), directory
    )
    assert any("step-000006" in note for note in notes)
    assert result.train_result.state.finished


def test_the_local_checkpoint_of_a_run_that_was_taken_over_is_ignored(
    bucket: str, machine: Callable[[str], None]
) -> None:
    run_path = resolve_path(f"{bucket}/run")
    run_path.mkdir(parents=True)
    lease = Lease.acquire(run_path)
    CheckpointStore(run_path, lease).save(make_state(0), make_position(0))
    assert has_local_changes(run_path)
    machine("other")
    remote = resolve_path(f"{bucket}/run")
    assert not has_local_changes(remote)
    remote.mkdir(parents=True)
    later = Lease.acquire(remote)
    CheckpointStore(remote, later).save(make_state(10), make_position(10))
    machine("mirror")
    assert not has_local_changes(run_path)
    with fails_with(RunTakenOverError, f"{bucket}/run"):
        CheckpointStore(run_path, lease).save(make_state(20), make_position(20))
    found = CheckpointStore(run_path).restore()
    assert found is not None and found[0].step == 10


# Google Cloud


def test_google_cloud_storage_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Callable[[str], None]
) -> None:
    with emulating_google(tmp_path / "log") as port:
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", f"http://127.0.0.1:{port}")
        machine("writer")
        address = f"gs://{BUCKET}/model"
        upload_dir(fill(resolve_path(address), config="1", weights="old"))
        upload_dir(fill(resolve_path(address), config="1", weights="new"))
        machine("reader")
        assert fetch_folder(resolve_path(address)) and content_of(resolve_path(address)) == {
            "config": "1",
            "weights": "new",
        }
        write_text_atomic(resolve_path(f"{address}.yaml"), "x")
        assert read(resolve_path(f"{address}.yaml")) == b"x" and read(resolve_path(f"{address}.other")) is None
        assert list_names(resolve_path(f"gs://{BUCKET}")) == {"model", "model.yaml"}
        delete_dir(resolve_path(address))
        assert not is_stored(resolve_path(address))
        with fails_with(ObjectStorageError, "bucket elsewhere", "http://127.0.0.1"):
            probe(resolve_path("gs://elsewhere/x"))  # type: ignore[arg-type]


# Refused requests


def test_each_refusal_is_one_line_without_credentials(
    bucket: str, gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def probe_fails(address: str, *named: str) -> None:
        with fails_with(ObjectStorageError, *named) as refused:
            probe(resolve_path(address))  # type: ignore[arg-type]
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
    probe_fails(bucket, "http://127.0.0.1", "export AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        probe_fails(bucket, endpoint, "network")


def test_temporary_refusals_are_retried(bucket: str, gate: Gate) -> None:
    refusals_left = [1]

    def refuses(method: str, path: str) -> tuple[int, str] | None:
        if method == "PUT" and refusals_left:
            refusals_left.pop()
            return 503, "SlowDown"
        return None

    gate.refuses = refuses
    file = resolve_path(f"{bucket}/x")
    file.parent.mkdir(parents=True)
    write_text_atomic(file, "one")
    assert not refusals_left and read(file) == b"one"


def test_a_run_that_cannot_be_stored_is_refused_when_it_starts(recipe: Recipe, gate: Gate) -> None:
    gate.refuse_from(0)
    with fails_with(ObjectStorageError, BUCKET):
        run(recipe, Reporter())
