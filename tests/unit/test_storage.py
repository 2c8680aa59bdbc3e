"""Places, and what is kept in object storage: on a real server, with a gate before it that fails at every point."""

from __future__ import annotations

import pickle
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from distcse import train
from distcse.errors import DistcseError, EncoderError, RecipeError, RunError, StorageError
from distcse.events import Event, LogMessage, Reporter, StepReport
from distcse.experiments.distillation.run import run
from distcse.files import text_checksum
from distcse.health.storage import kept
from distcse.models import Encoder
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease, was_left_here
from distcse.storage import (
    RemotePath,
    delete_dir,
    fetch,
    fetch_folder,
    is_stored,
    names,
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
    """An address of one's own behind the gate; this machine's mirrors are in the test's folder."""
    gate.open()
    for name, value in environment(gate.port, tmp_path / "mirror").items():
        monkeypatch.setenv(name, value)
    return f"s3://{BUCKET}/{text_checksum(request.node.nodeid)[:8]}"


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """To go on as on another machine: its mirrors are elsewhere."""
    return lambda name: monkeypatch.setenv("DISTCSE_MIRROR", str(tmp_path / name))


def key_of(path: str) -> str:
    return path.removeprefix(f"s3://{BUCKET}/")


def filled(folder: Path, **content: str) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in content.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return folder


def content_of(folder: Path) -> dict[str, str]:
    return {file.relative_to(folder).as_posix(): file.read_text() for file in folder.rglob("*") if file.is_file()}


# Places


def test_a_place_is_a_folder_or_the_mirror_of_an_address(bucket: str, tmp_path: Path) -> None:
    assert type(resolve_path("runs/x")) is type(Path()) and str(resolve_path("runs/x")) == "runs/x" == to_uri(
        Path("runs/x")
    )
    there = resolve_path("s3://bucket/runs/x/")
    assert isinstance(there, RemotePath) and to_uri(there) == "s3://bucket/runs/x"
    assert there.is_relative_to(tmp_path / "mirror") and there == resolve_path(str(there)) == resolve_path(
        Path(str(there))
    )
    for inside in (there / "a" / "b", there.parent, there.with_name("y"), there.absolute()):
        assert isinstance(inside, RemotePath)
    assert to_uri(there / "a") == "s3://bucket/runs/x/a" and to_uri(resolve_path("gs://bucket/k")) == "gs://bucket/k"
    assert to_uri(resolve_path("s3://bucket")) == "s3://bucket"


def test_a_place_travels_as_its_address(bucket: str, machine: Callable[[str], None], tmp_path: Path) -> None:
    packed = pickle.dumps(resolve_path("s3://bucket/runs/x") / "claim")
    machine("other")
    unpacked = pickle.loads(packed)
    assert to_uri(unpacked) == "s3://bucket/runs/x/claim" and unpacked.is_relative_to(tmp_path / "other")


def test_buckets_of_one_name_on_two_servers_have_two_mirrors(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = resolve_path("s3://bucket/x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other:9000")
    assert resolve_path("s3://bucket/x") != here


@pytest.mark.parametrize(
    "name",
    ["http://host/x", "s3://", "s3://bucket/../other", "s3://KEY:SECRET@bucket/x", "s3://bucket/x?secret_key=SECRET"],
)
def test_other_addresses_are_refused_and_not_repeated(
    name: str, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    with pytest.raises(RecipeError, match=r"storage.runs.*s3://BUCKET/PREFIX") as refused:
        make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, f"storage.runs={name}")
    assert "SECRET" not in str(refused.value)
    with pytest.raises(StorageError) as refused_too:
        resolve_path(name)
    assert "SECRET" not in str(refused_too.value)


# Files and folders


def test_files_are_put_and_fetched(bucket: str, machine: Callable[[str], None], server: Server) -> None:
    file = resolve_path(f"{bucket}/run/recipe.yaml")
    assert not fetch(file) and read(file) is None
    file.parent.mkdir(parents=True)
    write_text_atomic(file, "one")
    assert server.read(key_of(to_uri(file))) == b"one"
    machine("other")
    file = resolve_path(f"{bucket}/run/recipe.yaml")
    assert fetch(file) and file.read_text() == "one" and names(file.parent) == {"recipe.yaml"}
    write_text_atomic(file, "")
    assert read(file) == b""


def test_folders_are_stored_and_fetched_whole(bucket: str, machine: Callable[[str], None], server: Server) -> None:
    model = filled(resolve_path(f"{bucket}/model"), config="1", weights="w", sub__deep="d")
    assert not is_stored(model) and not fetch_folder(model)
    upload_dir(model)
    machine("other")
    there = resolve_path(f"{bucket}/model")
    assert is_stored(there) and not there.exists()
    assert fetch_folder(there) and content_of(there) == {"config": "1", "weights": "w", "sub/deep": "d"}
    filled(there, config="2", weights="w")
    upload_dir(there)
    # What is not named any more is deleted.
    assert len([key for key in server.stored() if key.startswith(key_of(bucket))]) == 3
    machine("mirror")
    assert fetch_folder(model) and content_of(model) == {"config": "2", "weights": "w"}
    delete_dir(model)
    assert not is_stored(model) and not model.exists()
    assert not [key for key in server.stored() if key.startswith(key_of(bucket))]


def test_what_has_not_changed_is_not_uploaded_again(bucket: str, gate: Gate) -> None:
    model = filled(resolve_path(f"{bucket}/model"), config="1", weights="w" * 1000)
    upload_dir(model)
    gate.changes.clear()
    upload_dir(model)
    assert gate.changes == []
    (model / "card").write_text("new")
    upload_dir(model)
    uploads = [change for change in gate.changes if change.startswith("PUT") and not change.endswith("/")]
    assert len(uploads) == 4  # the card, the record; config and weights are copied where they lie


def test_a_folder_that_all_share_is_left_alone(tmp_path: Path) -> None:
    folder = filled(tmp_path / "x", a="1")
    upload_dir(folder)
    assert fetch_folder(folder) and is_stored(folder) and content_of(folder) == {"a": "1"}
    assert not fetch(folder / "b") and names(folder) == {"a"}
    delete_dir(folder)
    assert not folder.exists()


def test_damage_in_the_storage_is_told(bucket: str, machine: Callable[[str], None], server: Server) -> None:
    upload_dir(filled(resolve_path(f"{bucket}/x"), a="1"))
    (data,) = [key for key in server.stored() if key.startswith(key_of(bucket)) and key.endswith("/a")]
    machine("other")
    server.write(data, b"2")
    with pytest.raises(RunError, match="not what was stored: its checksum differs"):
        fetch_folder(resolve_path(f"{bucket}/x"))
    server.delete(data)
    with pytest.raises(RunError, match=r"lacks files that its record.json names; remove it"):
        fetch_folder(resolve_path(f"{bucket}/x"))
    server.write(f"{key_of(bucket)}/x/record.json", b"{}")
    with pytest.raises(RunError, match=r"record.json is not what was written"):
        fetch_folder(resolve_path(f"{bucket}/x"))


def test_a_model_is_saved_at_an_address_and_loaded_from_it(
    bucket: str, machine: Callable[[str], None], tiny: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    encoder.save(f"{bucket}/model")
    machine("other")
    loaded = Encoder.load(f"{bucket}/model").state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in encoder.state_dict().items())
    assert train.main(["--resume", "s3://KEY:SECRET@bucket/x"]) == 1
    told = capsys.readouterr().err
    assert "that is no address of object storage" in told and "SECRET" not in told


def test_the_doctor_tries_to_write(bucket: str, gate: Gate) -> None:
    checks = kept("storage.runs", resolve_path(f"{bucket}/runs"))
    assert [check.name for check in checks] == ["storage.runs", "DISTCSE_MIRROR"]
    assert checks[0].line.endswith(f"{bucket}/runs: written, read and deleted")
    gate.refuse_from(0)
    (refused,) = kept("storage.runs", resolve_path(f"{bucket}/runs"))
    assert refused.verdict == "fail" and "lack the permission" in refused.found


def test_damage_of_a_mirror_is_mended(bucket: str) -> None:
    folder = filled(resolve_path(f"{bucket}/x"), a="111", b="222")
    upload_dir(folder)
    (folder / "a").unlink()
    (folder / "b").write_text("22")
    assert fetch_folder(folder) and content_of(folder) == {"a": "111", "b": "222"}


# Every point at which a writer may be lost


def every_point(gate: Gate, work: Callable[[], None], check: Callable[[bool], None]) -> int:
    """Do some work with the storage failing after 0, 1, 2, … changes, until it comes through; check after each."""
    for number in range(200):
        gate.refuse_from(number)
        try:
            work()
        except StorageError:
            gate.open()
            check(False)
        else:
            gate.open()
            check(True)
            return number
    raise AssertionError("it never came through")


def test_a_reader_sees_the_old_folder_or_the_new_one(
    bucket: str, gate: Gate, machine: Callable[[str], None], tmp_path: Path
) -> None:
    old, new = {"config": "1", "weights": "old"}, {"config": "1", "weights": "new", "card": "c"}
    number = 0

    def replace() -> None:
        machine("writer")
        nonlocal number
        number += 1
        gate_was, gate.refuses = gate.refuses, lambda method, path: None
        upload_dir(filled(resolve_path(f"{bucket}/{number}/model"), **old))
        gate.refuses = gate_was
        gate.changes.clear()
        upload_dir(filled(resolve_path(f"{bucket}/{number}/model"), **new))

    def seen(through: bool) -> None:
        machine(f"reader{number}")
        folder = resolve_path(f"{bucket}/{number}/model")
        assert fetch_folder(folder)
        assert content_of(folder) == new or (not through and content_of(folder) == old)

    assert every_point(gate, replace, seen) >= 4


def test_a_reader_sees_a_new_folder_or_none_and_a_removed_one_or_none(
    bucket: str, gate: Gate, machine: Callable[[str], None]
) -> None:
    content = {"a": "1", "b": "2"}

    def seen(through: bool) -> None:
        machine("reader")
        folder = resolve_path(f"{bucket}/x")
        assert fetch_folder(folder) == (folder.exists() and content_of(folder) == content)
        shutil.rmtree(folder, ignore_errors=True)
        machine("writer")

    machine("writer")
    points = every_point(gate, lambda: upload_dir(filled(resolve_path(f"{bucket}/x"), **content)), seen)
    assert points == 3
    every_point(gate, lambda: delete_dir(resolve_path(f"{bucket}/x")), seen)
    assert not is_stored(resolve_path(f"{bucket}/x"))
    upload_dir(filled(resolve_path(f"{bucket}/x"), **content))
    every_point(gate, lambda: remove(resolve_path(f"{bucket}")), seen)
    assert not names(resolve_path(bucket)) - {"x"}


def state(step: int) -> ModelState:
    return ModelState({"w": torch.full((3,), float(step))}, {}, step)


def position(step: int, best: int = 0) -> TrainerState:
    return TrainerState(step, [(s, 50.0 if s == best else 10.0) for s in range(0, step + 1, 10)])


def test_a_reader_sees_the_checkpoint_before_or_the_new_one(
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
        checkpoints.save(state(0), position(0))
        checkpoints.save(state(10), position(10))
        gate.refuses = refuses
        gate.changes.clear()
        checkpoints.save(state(20), position(20, best=20))

    def look(through: bool) -> None:
        machine(f"reader{number}")
        checkpoints = CheckpointStore(resolve_path(f"{bucket}/{number}"))
        found = checkpoints.restore()
        best = checkpoints.best()
        assert found is not None and best is not None
        assert float(found[1].weights["w"][0]) == found[0].step and found[0].step in (10, 20)
        assert best.name in ("step-000000", "step-000020")
        seen_steps.append(found[0].step)

    assert every_point(gate, save, look) >= 5
    assert seen_steps[0] == 10 and seen_steps[-1] == 20 and seen_steps == sorted(seen_steps)


def test_a_table_has_a_shard_whole_or_not_at_all(bucket: str, gate: Gate, machine: Callable[[str], None]) -> None:
    identity = TableIdentity("m", "c", 8, "mean", 16, "", "fp32", shard_rows=4)
    vectors = torch.eye(4).numpy()
    cache = f"{bucket}/cache"
    EmbeddingTable.locate(resolve_path(cache), identity).write_shard(0, vectors)

    def embed() -> None:
        machine("builder")
        EmbeddingTable.locate(resolve_path(cache), identity).write_shard(1, vectors)

    def look(through: bool) -> None:
        machine("server")
        table = EmbeddingTable.locate(resolve_path(cache), identity)
        if missing := table.missing_shards():
            assert missing == [1] and not through
        else:
            assert through or gate.changes
            assert table.vectors([5]).tolist() == [[0, 1, 0, 0]]
        assert table.vectors([2]).tolist() == [[0, 0, 1, 0]]

    assert every_point(gate, embed, look) >= 4  # table.json, two files, the record


def test_a_shard_that_could_not_be_stored_is_not_embedded_again(bucket: str, gate: Gate) -> None:
    identity = TableIdentity("m", "c", 4, "mean", 16, "", "fp32", shard_rows=4)
    table = EmbeddingTable.locate(resolve_path(f"{bucket}/cache"), identity)
    gate.refuse_from(0)
    with pytest.raises(StorageError):
        table.write_shard(0, torch.eye(4).numpy())
    gate.open()
    assert table.missing_shards() == [] and is_stored(table.directory / "shard-00000")


# Runs


@pytest.fixture
def recipe(bucket: str, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Recipe:
    more = (
        f"storage.runs={bucket}/runs",
        f"storage.cache={bucket}/cache",
        "training.max_steps=12",
        "evaluation.final_suites=[]",
    )
    return make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, *more)


def test_a_run_goes_on_elsewhere_and_comes_to_the_same_weights(
    recipe: Recipe, machine: Callable[[str], None], server: Server, tmp_path: Path
) -> None:
    here = recipe.model_copy(
        update={
            "storage": recipe.storage.model_copy(update={"runs": str(tmp_path / "r"), "cache": str(tmp_path / "c")})
        }
    )
    expected = run(here, Reporter()).directory.model / "model.safetensors"
    events: list[Event] = []
    stopped = run(recipe, Reporter(events.append, lambda: any(isinstance(event, StepReport) for event in events)))
    assert stopped.outcome.interrupted and 0 < stopped.outcome.state.step < 12
    where = to_uri(stopped.directory.path)
    machine("other")
    directory, again = RunDirectory.reopen(resolve_path(where), [])
    done = run(again, Reporter(), directory)
    assert not done.outcome.interrupted
    machine("third")
    encoder = Encoder.load(f"{where}/model")
    loaded = Encoder.load(expected.parent).state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in encoder.state_dict().items())
    with pytest.raises(EncoderError, match=f"{where} is a run's folder; its model is {where}/model: name that"):
        Encoder.load(where)
    with pytest.raises(EncoderError, match="holds no model that distcse stored"):
        Encoder.load(f"{where}/nothing")
    stored = server.objects()
    assert not any(secret.encode() in content for secret in CREDENTIALS.values() for content in stored.values())
    told = server.read(f"{key_of(where)}/events.jsonl").decode()
    assert told.count('"event": "Saved"') == 4 and told.count("run directory s3://") == 2


def test_a_run_ends_where_storage_goes_away_and_goes_on_from_its_own_copy(
    recipe: Recipe, gate: Gate, machine: Callable[[str], None]
) -> None:
    def hear(event: object) -> None:
        if getattr(event, "step", None) == 6 and type(event).__name__ == "DevScore":
            gate.refuses = lambda method, path: (0, "")

    with pytest.raises(
        StorageError, match=r"was not reached, tried again and again; .* --resume goes on from it"
    ) as lost:
        run(recipe, Reporter(hear))
    assert "Sentinel" not in str(lost.value)
    gate.open()
    (name,) = names(resolve_path(recipe.storage.runs))
    where = f"{recipe.storage.runs}/{name}"
    assert CheckpointStore(resolve_path(where)).latest() == resolve_path(where) / "checkpoints" / "step-000000"
    assert (resolve_path(where) / "checkpoints" / "step-000006").is_dir()
    notes: list[str] = []
    directory, again = RunDirectory.reopen(resolve_path(where), [])
    done = run(
        again, Reporter(lambda event: notes.append(event.text) if isinstance(event, LogMessage) else None), directory
    )
    assert any("step-000006 was on this machine alone, and is stored now" in note for note in notes)
    assert done.outcome.state.finished


def test_the_copy_of_a_start_that_was_overtaken_is_passed_over(bucket: str, machine: Callable[[str], None]) -> None:
    run_ = resolve_path(f"{bucket}/run")
    run_.mkdir(parents=True)
    lease = Lease.acquire(run_)
    CheckpointStore(run_, lease).save(state(0), position(0))
    assert was_left_here(run_)
    machine("other")
    there = resolve_path(f"{bucket}/run")
    assert not was_left_here(there)
    there.mkdir(parents=True)
    later = Lease.acquire(there)
    CheckpointStore(there, later).save(state(10), position(10))
    machine("mirror")
    assert not was_left_here(run_)
    with pytest.raises(RunError, match=r"run was taken over by a later start; this one writes nothing more"):
        CheckpointStore(run_, lease).save(state(20), position(20))
    found = CheckpointStore(run_).restore()
    assert found is not None and found[0].step == 10


# Google Cloud


def test_google_clouds_protocol_is_spoken_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: Callable[[str], None]
) -> None:
    with emulating_google(tmp_path / "log") as port:
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", f"http://127.0.0.1:{port}")
        machine("writer")
        where = f"gs://{BUCKET}/model"
        upload_dir(filled(resolve_path(where), config="1", weights="old"))
        upload_dir(filled(resolve_path(where), config="1", weights="new"))
        machine("reader")
        assert fetch_folder(resolve_path(where)) and content_of(resolve_path(where)) == {
            "config": "1",
            "weights": "new",
        }
        write_text_atomic(resolve_path(f"{where}.yaml"), "x")
        assert read(resolve_path(f"{where}.yaml")) == b"x" and read(resolve_path(f"{where}.other")) is None
        assert names(resolve_path(f"gs://{BUCKET}")) == {"model", "model.yaml"}
        delete_dir(resolve_path(where))
        assert not is_stored(resolve_path(where))
        with pytest.raises(StorageError, match=r"there is no bucket elsewhere at http://127.0.0.1"):
            probe(resolve_path("gs://elsewhere/x"))  # type: ignore[arg-type]


# What may be refused


def test_each_refusal_is_one_message(bucket: str, gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def told(where: str) -> str:
        with pytest.raises(StorageError) as refused:
            probe(resolve_path(where))  # type: ignore[arg-type]
        assert "\n" not in str(refused.value) and "Sentinel" not in str(refused.value)
        return str(refused.value)

    assert "there is no bucket elsewhere at http://127.0.0.1" in told("s3://elsewhere/x")
    gate.refuse_from(0, 403, "AccessDenied")
    assert f"these credentials lack the permission; allow them to get, put, delete and list in {BUCKET}" in told(bucket)
    gate.refuse_from(0, 403, "InvalidAccessKeyId")
    assert "does not know these credentials (INVALID_ACCESS_KEY_ID)" in told(bucket)
    gate.refuse_from(0, 403, "AccessDenied")
    for name in CREDENTIALS:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    assert "no credentials are here, and http://127.0.0.1" in told(bucket)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        assert "was not reached, tried again and again; mend the network, or the endpoint in the environment" in told(
            bucket
        )


def test_what_passes_is_tried_again(bucket: str, gate: Gate) -> None:
    left = [1]

    def refuses(method: str, path: str) -> tuple[int, str] | None:
        if method == "PUT" and left:
            left.pop()
            return 503, "SlowDown"
        return None

    gate.refuses = refuses
    file = resolve_path(f"{bucket}/x")
    file.parent.mkdir(parents=True)
    write_text_atomic(file, "one")
    assert not left and read(file) == b"one"


def test_a_run_that_cannot_be_stored_is_refused_before_any_work(recipe: Recipe, gate: Gate) -> None:
    gate.refuse_from(0)
    with pytest.raises(DistcseError, match="these credentials lack the permission"):
        run(recipe, Reporter())
