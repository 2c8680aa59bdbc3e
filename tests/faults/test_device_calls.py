"""Functions and a family's students on other nodes' GPUs: killed, hung and failing processes, a stop, a lost node."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import distcse
from distcse.cluster.backend import RayBackend
from distcse.devices.device_plan import DeviceOptions
from distcse.errors import DistcseError, ModelOutputError, StoppedEarlyError, WorkFailedError
from distcse.evaluation import Evaluation
from distcse.events import Event, GroupEvent, LogMessage, Reporter, StageProgress, StepReport
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import MutualRecipe, load_recipe, read_recipe, recipe_yaml, with_values
from distcse.runs.backend import Backend, DeviceCall, LocalBackend
from distcse.runs.directory import RunDirectory, write_recipe
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.mutual.pairs import load_pairs
from distcse.storage import checksum, open_store
from tests.backends import run
from tests.commands import run_command
from tests.jobs import make_recipe
from tests.kills import Nodes
from tests.machines import RAY
from tests.pairs import make_mutual_recipe
from tests.weights import assert_equal_weights, weights_of


@contextmanager
def recorded_loads() -> Iterator[list[str]]:
    """Yield a list to which every model is added that this process loads."""
    loaded: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((Encoder, "from_section"), (CrossEncoder, "load")):
            original = getattr(kind, name).__func__

            def load(cls: type[Any], source: Any, *more: Any, original: Any = original, **settings: Any) -> Any:
                loaded.append(getattr(source, "backbone", str(source)))
                return original(cls, source, *more, **settings)

            patch.setattr(kind, name, classmethod(load))
        yield loaded


def comparable(evaluation: Evaluation | None) -> dict[str, Any]:
    """Return an evaluation as plain data, without times."""
    assert evaluation is not None
    plain: dict[str, Any] = json.loads(json.dumps(asdict(evaluation)))
    timings = dict.fromkeys(("seconds", "sentences_per_s", "latency_ms"), 0)
    return {**plain, "seconds": 0, "models": [{**model, **timings} for model in plain["models"]]}


def wait_or_return(file: Path, seconds: Mapping[int, float], answer: int, reporter: Reporter) -> int:
    """Note this attempt in a file, report it and its place, wait as long as it should, and return an answer."""
    import ray

    with file.open("a") as attempts:
        attempts.write(f"{os.getpid()}\n")
    attempt, node = len(file.read_text().splitlines()), ray.get_runtime_context().get_node_id()
    reporter.emit(LogMessage(f"{answer} {attempt} {os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')} {node}"))
    time.sleep(seconds.get(attempt, 0.0))
    return answer


def wait_until(condition: Callable[[], bool]) -> None:
    """Return once a condition holds, or after two minutes."""
    deadline = time.monotonic() + 120
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def write_once_stopped(folder: Path, reporter: Reporter) -> None:
    """Run until a stop is requested, and say so in a file, as training writes a checkpoint."""
    (folder / "running").touch()
    wait_until(reporter.stop_requested)
    (folder / "stopped").touch()


def fail_once_another_runs(folder: Path, reporter: Reporter) -> None:
    """Raise an error once `write_once_stopped` runs."""
    wait_for_file(folder / "running", reporter)
    raise ModelOutputError("the model's output is NaN")


def wait_for_file(file: Path, reporter: Reporter) -> None:
    wait_until(file.exists)


def stop_and_continue(folder: Path, reporter: Reporter) -> str:
    """Run until a stop is requested, and return the node of the second attempt, which ends at once."""
    import ray

    node = str(ray.get_runtime_context().get_node_id())
    first = folder / "first"
    if first.exists():
        return node
    first.write_text(node)
    reporter.emit(LogMessage(f"runs on {node}"))
    wait_until(reporter.stop_requested)
    return "stopped"


def node_of(reporter: Reporter) -> str:
    """Return this node, after seconds in which another one is drained."""
    import ray

    time.sleep(5)
    return str(ray.get_runtime_context().get_node_id())


def count_actors(most: int, file: Path, reporter: Reporter) -> int:
    """Return the number of actors of this cluster's devices, also of those that have not started, once it is at most this."""
    import ray

    def number() -> int:
        names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
        return sum(name.startswith("device-") for name in names)

    wait_until(lambda: number() <= most)
    file.touch()
    return number()


def fail_unexpectedly(reporter: Reporter) -> None:
    raise ZeroDivisionError("one by zero")


pytestmark = pytest.mark.cluster

OPTIONS = DeviceOptions(heartbeat_timeout_s=10)


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A head without CPUs, on which the drivers run, and two nodes with a GPU each."""
    with Nodes(tmp_path_factory.mktemp("nodes"), cpus=0) as running:
        for _ in range(2):
            running.start(2, "--num-gpus=1")
        yield running


def drive(nodes: Nodes, function: str, folder: Path) -> Any:
    """Call a function of this module in a driver on the head, and return what it has written."""

    script = f"from pathlib import Path; from tests.faults import test_device_calls as t; t.{function}(Path({str(folder)!r}))"
    done = run_command([sys.executable, "-c", script], **nodes.environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "found.json").read_text())


def waits(folder: Path, *seconds: dict[int, float], returns_on_stop: bool = False) -> list[DeviceCall[int | None]]:
    """Return calls that wait these seconds at their attempts, and return their number; they note attempts in a folder."""
    folder.mkdir()
    return [
        DeviceCall(
            f"call {number}",
            partial(wait_or_return, folder / str(number), each, number),
            returns_on_stop=returns_on_stop,
        )
        for number, each in enumerate(seconds)
    ]


def attempts_in(folder: Path) -> list[int]:
    return [len(file.read_text().splitlines()) for file in sorted(folder.iterdir())]


def error_of(calls: Sequence[DeviceCall[Any]], reporter: Reporter | None = None) -> list[str]:
    with pytest.raises(DistcseError) as raised:
        RayBackend().run_on_devices(calls, OPTIONS, reporter or Reporter())
    return [type(raised.value).__name__, str(raised.value)]


def disturb(folder: Path) -> None:
    """A driver: disturb the processes of functions, and write what became of them."""
    import ray

    with RayBackend.cluster.joined():
        messages: list[str] = []

        def kill_and_hang(event: Event) -> None:
            """Send a signal to the processes of the first two functions during their first attempt."""
            assert isinstance(event, LogMessage)
            messages.append(event.text)
            if event.text.startswith(("0 1 ", "1 1 ")):
                how = signal.SIGKILL if event.text.startswith("0") else signal.SIGSTOP
                os.kill(int(event.text.split()[2]), how)

        backend, minute, stops = RayBackend(), {1: 60.0}, list[Event]()
        found: dict[str, Any] = {
            "returned": backend.run_on_devices(
                waits(folder / "disturbed", minute, minute, {}), OPTIONS, Reporter(kill_and_hang)
            ),
            "attempts": attempts_in(folder / "disturbed"),
            "messages": messages,
            "places": [text.split()[3:] for text in messages if text.startswith(("0 1 ", "1 1 "))],
            "head": ray.get_runtime_context().get_node_id(),
            "unexpected": error_of([DeviceCall("evaluation of x", fail_unexpectedly)]),
            "stopped": error_of(waits(folder / "stopped", {1: 600.0}), Reporter(stops.append, lambda: bool(stops))),
        }
        begun = list[Event]()
        found["waited for"] = backend.run_on_devices(
            waits(folder / "waited", *[{1: 2.0}] * 3, returns_on_stop=True),
            OPTIONS,
            Reporter(begun.append, lambda: bool(begun)),
        )
        next_to_another = folder / "failed"
        next_to_another.mkdir()
        functions = partial(write_once_stopped, next_to_another), partial(fail_once_another_runs, next_to_another)
        found["failed"] = error_of([DeviceCall("call", function, returns_on_stop=True) for function in functions])
        found["files"] = sorted(file.name for file in next_to_another.iterdir())
        # Of three functions, the third has an actor that waits for a node, and that ends while the last two functions run.
        (quick,) = waits(folder / "returns", {})
        counting = partial(wait_for_file, folder / "counted"), partial(count_actors, 2, folder / "counted")
        counted = [quick, *(DeviceCall[Any]("count", function) for function in counting)]
        found["actors"] = backend.run_on_devices(counted, replace(OPTIONS, can_wait=True), Reporter())[2]
    (folder / "found.json").write_text(json.dumps(found))


def tokenize_in_parts(folder: Path) -> None:
    """A driver that cannot tokenize: let the nodes do so, stop in between, and compare with a single pass."""
    from unittest.mock import patch

    from distcse.runs.distillation import precompute
    from distcse.text import token_table

    recipe, backend, events = load_recipe(str(folder / "recipe.yaml"), []), RayBackend(), list[Event]()
    corpus = read_corpus(recipe, Reporter())
    reporter = Reporter(events.append)
    stopping = Reporter(stop_requested=lambda: len(list(folder.glob("cache/tokens/*.parts/[0-9]*-[0-9]*"))) > 1)
    with (
        backend.cluster.joined(),
        patch.object(precompute, "PART_ROWS", 50),
        patch.object(token_table, "encode_batch", side_effect=AssertionError("the driver tokenizes")),
    ):
        try:
            precompute.prepare_tokens(recipe, corpus, backend, stopping)
        except StoppedEarlyError:
            kept = len(list(folder.glob("cache/tokens/*.parts/[0-9]*-[0-9]*")))
        made = precompute.prepare_tokens(recipe, corpus, backend, reporter)
    alone = with_values(recipe, {"storage.cache": str(folder / "alone")})
    whole = precompute.prepare_tokens(alone, corpus, LocalBackend(), Reporter())
    progress = [event.done for event in events if isinstance(event, StageProgress)]
    found = {
        "kept": kept,
        "parts left": len(list(folder.glob("cache/tokens/*.parts/[0-9]*-[0-9]*"))),
        "progress": [min(progress), max(progress)],
        "rows": [len(corpus), len(made)],
        "files": [{file.name: checksum(file) for file in table.store.path.iterdir()} for table in (made, whole)],
    }
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_killed_and_hung_processes_repeat_their_function_and_errors_keep_their_class(
    nodes: Nodes, tmp_path: Path
) -> None:
    found = drive(nodes, "disturb", tmp_path)
    gpus, ids = zip(*found["places"], strict=True)
    assert gpus == ("0", "0") and found["head"] not in ids and len(set(ids)) == 2
    assert found["returned"] == [0, 1, 2] and found["attempts"] == [2, 2, 1], found["messages"]
    (warning,) = (text for text in found["messages"] if "has not answered for 10 s" in text)
    assert warning.startswith("process ")
    assert found["unexpected"][0] == WorkFailedError.__name__ and "evaluation of x" in found["unexpected"][1]
    assert found["stopped"][0] == StoppedEarlyError.__name__ and "call 0" in found["stopped"][1]
    assert found["waited for"] in ([0, 1, None], [0, None, None])  # the second may have begun
    assert found["failed"] == [ModelOutputError.__name__, "the model's output is NaN"]
    assert found["files"] == ["running", "stopped"]
    assert found["actors"] == 2  # the one that had not started has ended


@pytest.mark.slow
def test_nodes_tokenize_a_corpus_in_parts_and_a_stopped_run_keeps_those_it_has(
    nodes: Nodes, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences)
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe))
    found = drive(nodes, "tokenize_in_parts", tmp_path)
    rows = found["rows"][0]
    assert found["rows"] == [rows, rows] and found["progress"] == [0, rows]
    assert 2 <= found["kept"] < rows // 50 and found["parts left"] == 0
    assert found["files"][0] == found["files"][1] and len(found["files"][0]) == 3


def train_from_the_head(folder: Path) -> None:
    """A driver: train, evaluate and mine pairs, and write what this process loaded, and the results."""
    recipe, mutual = load_recipe(str(folder / "on-ray.yaml"), []), read_recipe(str(folder / "mutual" / "recipe.yaml"))
    assert isinstance(mutual, MutualRecipe)

    def mine(backend: Backend) -> str:
        return load_pairs(mutual, open_store(RunDirectory.create(mutual).path), backend, Reporter()).fingerprint

    with recorded_loads() as loaded:
        result = run(recipe, Reporter())
        with RayBackend.cluster.joined():
            mined = mine(RayBackend())
    found = {"loaded": list(loaded), "run": str(result.directory.path)}
    (folder / "found.json").write_text(json.dumps({**found, "mined": [mined, mine(LocalBackend())]}))


@pytest.mark.slow
def test_a_driver_without_room_loads_no_model_and_its_run_equals_a_local_one(
    nodes: Nodes, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], labelled: Path
) -> None:
    """Regression targets, export, evaluation and mined pairs are computed on the nodes."""
    overrides = (
        "student.projection=none",
        "objective.regression={weight: 2.0}",
        "training.max_steps=4",
        f"evaluation.data={labelled}",
        "evaluation.rank_inference={num_references: 100}",
    )
    on_ray = ("training.workers=1", "training.cpus_per_worker=1", "training.gpus_per_worker=0")
    models = tiny("bert"), [tiny("minilm"), tiny("roberta")]
    recipe = make_recipe(tmp_path, *models, sentences, *overrides, *on_ray, "teachers.embedding_workers=1")
    (tmp_path / "on-ray.yaml").write_text(recipe_yaml(recipe))
    pairs = f"pairs={{mine: {{corpus: {{path: '{tmp_path / 'corpus.txt'}'}}, pairs: 100, num_neighbors: 10}}}}"
    mutual = make_mutual_recipe(tmp_path / "mutual", {"bert": tiny("bert")}, sentences, pairs)
    write_recipe(open_store(tmp_path / "mutual"), mutual)
    found = drive(nodes, "train_from_the_head", tmp_path)
    assert found["loaded"] == [] and found["mined"][0] == found["mined"][1]
    (tmp_path / "local").mkdir()
    local = run(make_recipe(tmp_path / "local", *models, sentences, *overrides), Reporter())
    directory = Path(found["run"])
    assert_equal_weights(weights_of(local.directory.path), weights_of(directory))
    remote = comparable(Evaluation.read(directory / "evaluation.json"))
    for ours, theirs in zip(comparable(local.evaluation)["scores"], remote["scores"], strict=True):
        assert theirs["values"] == pytest.approx(ours["values"], abs=0.2), ours["measure"]


# -- a family's students -------------------------------------------------------------------------------------------------


NAMES = ["3-layers", "2-layers", "1-layer"]


@pytest.fixture(scope="module")
def nodes_of_one_thread(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    with Nodes(tmp_path_factory.mktemp("nodes"), cpus=0) as running:
        for _ in range(2):
            running.start(1, "--num-gpus=1")  # one thread each, as in the local run
        yield running


def train_families(folder: Path) -> None:
    """A driver: a run whose largest student's process is killed, one that is stopped and resumed, one that loses a node."""
    recipe, found = str(folder / "recipe.yaml"), {}
    found["killed"] = _trained(lambda listen: distcse.run(recipe, listen=listen), "process")
    stopped = _trained(lambda listen: distcse.run(recipe, listen=listen, stop_requested=lambda: listen.has_steps))
    found["stopped"] = stopped
    found["resumed"] = _trained(lambda listen: distcse.resume(Path(stopped["run"]), listen=listen))
    found["node lost"] = _trained(lambda listen: distcse.run(recipe, listen=listen), "node")
    (folder / "found.json").write_text(json.dumps(found))


class _Listener:
    """Notes what a run reports, and kills a student's process, or its node, once both that train have written checkpoints."""

    def __init__(self, kills: str) -> None:
        self.messages: list[str] = []
        self.continued: list[str] = []
        self._steps: dict[str, int] = {}
        self._kills = kills

    @property
    def has_steps(self) -> bool:
        """Whether a student has reported steps."""
        return bool(self._steps)

    def __call__(self, event: Event) -> None:
        if isinstance(event, LogMessage):
            self.messages.append(event.text)
        if not isinstance(event, GroupEvent):
            return
        if isinstance(event.event, LogMessage) and event.event.text.startswith("resuming after step"):
            self.continued.append(event.event.text)
        if isinstance(event.event, StepReport):
            self._steps[event.group] = event.event.step
            if self._kills and len(self._steps) > 1 and all(step > 25 for step in self._steps.values()):
                process = psutil.Process(_training_processes()[0])
                raylet = process.parent()
                assert raylet is not None and raylet.name() == "raylet"
                for killed in [process] if self._kills == "process" else [raylet, *raylet.children(recursive=True)]:
                    killed.kill()
                self._kills = ""


def _training_processes() -> list[int]:
    """Return the processes of this driver's cluster that train a student."""
    found, (_, _, port) = [], os.environ["RAY_ADDRESS"].rpartition(":")
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            parent = process.parent()
            if parent is not None and process.cmdline()[:1] and process.cmdline()[0].startswith("ray::DeviceActor"):
                found += [process.pid] if any(f":{port}" in part for part in parent.cmdline()) else []
    return found


def _trained(start: Callable[[_Listener], Any], kills: str = "") -> dict[str, Any]:
    listener = _Listener(kills)
    done = start(listener)
    return {
        "run": str(done.directory),
        "interrupted": done.interrupted,
        "models": list(done.models),
        "continued": listener.continued,
        "messages": listener.messages,
    }


@pytest.mark.slow
def test_students_side_by_side_learn_what_they_learn_in_turn(
    nodes_of_one_thread: Nodes, tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    overrides = (
        "objective={info_nce: null, consistency: null, rank: null, regression: {}}",
        "student.projection=none",
        "student.dropout=0.1",
        "student.layers=null",
        "training.workers=1",
        "training.max_steps=120",
        "training.epochs=100",
        "training.log_every=5",
        "evaluation.dev=agreement",
        "evaluation.eval_steps=20",
        "evaluation.final_suites=[agreement]",
    )
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *overrides)
    family = f"family:\n{''.join(f'  - {{layers: {layers}}}{chr(10)}' for layers in (1, 3, 2))}"
    (tmp_path / "recipe.yaml").write_text(recipe_yaml(recipe) + family)
    found = drive(nodes_of_one_thread, "train_families", tmp_path)
    local = distcse.run(str(tmp_path / "recipe.yaml"), "training.workers=0", listen=lambda event: None)
    line = "3 students train side by side, each with a GPU, 2 at the same time"
    for case in ("killed", "resumed", "node lost"):
        run = found[case]
        assert line in run["messages"] and not run["interrupted"] and run["models"] == NAMES
        for name in NAMES:
            assert_equal_weights(*(weights_of(Path(each) / "members" / name) for each in (local.directory, run["run"])))
    for case in ("killed", "node lost"):
        (continued,) = found[case]["continued"] or [case]
        assert continued in (f"resuming after step {step} of 120" for step in (20, 40, 60, 80, 100))
    stopped = found["stopped"]
    assert stopped["interrupted"] and stopped["models"] == NAMES[: len(stopped["models"])]
    assert found["resumed"]["continued"]
    assert Encoder.load(found["killed"]["run"] + "/members/1-layer/model").encode(["a cat"]).shape[0] == 1


def lose_a_node(folder: Path) -> None:
    """A driver: call a function on each node, and kill the raylet of the first one's node."""
    lost: list[int] = []

    def listen(event: Event) -> None:
        assert isinstance(event, LogMessage)
        if event.text.startswith("0 ") and not lost:
            lost.append(psutil.Process(int(event.text.split()[2])).ppid())
            os.kill(lost[0], signal.SIGKILL)

    calls = waits(folder / "calls", {1: 600.0}, {1: 20.0})
    with RayBackend.cluster.joined():
        returned = RayBackend().run_on_devices(calls, DeviceOptions(), Reporter(listen))
    (folder / "found.json").write_text(json.dumps({"returned": returned, "attempts": attempts_in(folder / "calls")}))


def drive_and_replace(nodes: Nodes, driver: str, folder: Path) -> dict[str, Any]:
    """As `drive`, for a driver that ends the second node, which the next test needs."""
    try:
        return drive(nodes, driver, folder)
    finally:
        nodes.start(2, "--num-gpus=1")


@pytest.mark.slow
def test_the_function_of_a_lost_node_is_repeated_on_the_other_once_that_is_free(nodes: Nodes, tmp_path: Path) -> None:
    found = drive_and_replace(nodes, "lose_a_node", tmp_path)
    assert found == {"returned": [0, 1], "attempts": [2, 1]}


def drain_a_node(folder: Path) -> None:
    """A driver: drain the node of the first of four functions, two of which run at the same time."""
    drained: list[str] = []
    messages: list[str] = []

    def listen(event: Event) -> None:
        assert isinstance(event, LogMessage)
        messages.append(event.text)
        if event.text.startswith("runs on "):
            drained.append(event.text.removeprefix("runs on "))
            address, reason = os.environ["RAY_ADDRESS"], "DRAIN_NODE_REASON_PREEMPTION"
            notice = [f"--reason={reason}", "--reason-message=spot", "--deadline-remaining-seconds=600"]
            command = [RAY, "drain-node", f"--address={address}", f"--node-id={drained[0]}", *notice]
            subprocess.run(command, check=True, capture_output=True)

    first = DeviceCall("training", partial(stop_and_continue, folder), returns_on_stop=True)
    others = [DeviceCall[str]("export", node_of) for _ in range(3)]
    with RayBackend.cluster.joined():
        places = RayBackend().run_on_devices([first, *others], OPTIONS, Reporter(listen))
    (folder / "found.json").write_text(json.dumps({"drained": drained[0], "places": places, "messages": messages}))


@pytest.mark.slow
def test_a_drained_node_gets_no_function_and_its_training_continues_on_another(nodes: Nodes, tmp_path: Path) -> None:
    found = drive_and_replace(nodes, "drain_a_node", tmp_path)
    assert len(found["places"]) == 4 and not {found["drained"], "stopped"} & {*found["places"]}
    (warning,) = (text for text in found["messages"] if "Ray drains" in text)
    assert "the training: it continues on another from its checkpoint" in warning
