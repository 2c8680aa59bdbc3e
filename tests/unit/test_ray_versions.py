"""Every name of Ray on which `distcse.cluster.versions` depends still exists in the installed Ray, and works as expected."""

from __future__ import annotations

import inspect
import logging
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train.v2._internal.execution.context as context
from packaging.requirements import Requirement
from ray import tune
from ray.exceptions import ActorDiedError

from distcse.cluster import versions
from distcse.cluster.event_channel import EventActor


def test_the_installed_ray_is_supported() -> None:
    major, minor = (int(part) for part in version("ray").split(".")[:2])
    assert versions.OLDEST <= (major, minor) < versions.FIRST_UNSUPPORTED


def test_the_supported_versions_are_those_of_the_package() -> None:
    (required,) = (entry for entry in map(Requirement, requires("distcse") or []) if entry.name == "ray")
    oldest, unsupported = (".".join(map(str, bound)) for bound in (versions.OLDEST, versions.FIRST_UNSUPPORTED))
    assert str(required.specifier) == f"<{unsupported},>={oldest}"


def test_the_coordinator_can_be_started_early_and_draining_nodes_can_be_listed() -> None:
    from ray._private.state import state
    from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as module

    for function in (module.get_or_create_autoscaling_coordinator, state.get_draining_nodes):
        assert not inspect.signature(function).parameters


def test_a_trainer_creates_the_callback_of_datasets_and_runs_without_it() -> None:
    from ray.train.torch import TorchTrainer

    trainers = (TorchTrainer(lambda: None), versions.trainer_without_datasets()(lambda: None))
    callbacks, left = (trainer._create_default_callbacks() for trainer in trainers)
    assert sum(type(callback).__module__.endswith(".callbacks.datasets") for callback in callbacks) == 1
    assert not any(type(callback).__module__.endswith(".callbacks.datasets") for callback in left)
    assert len(left) == len(callbacks) - 1


def test_a_trainer_has_its_controller_in_the_variable_that_is_read() -> None:
    from ray.train.torch import TorchTrainer

    assert "controller" in TorchTrainer._initialize_and_run_controller.__code__.co_varnames
    assert versions.train_controller() is None


def test_the_backend_of_torch_can_be_replaced() -> None:
    from ray.train.torch import TorchConfig

    backend = versions.torch_backend()
    assert TorchConfig().backend_cls is backend
    assert list(inspect.signature(backend.on_start).parameters)[1:] == ["worker_group", "backend_config"]


def test_a_restored_search_has_a_new_scheduler() -> None:
    """As docs/how-to/sweeps.md says of ASHA's rungs."""
    from ray.tune.execution.tune_controller import TuneController

    source = inspect.getsource(TuneController.__getstate__)
    assert '"_scheduler_alg",' in source.partition("for k in [")[2].partition("]")[0]


def test_reports_are_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context.logger, "level", logging.NOTSET)
    versions.silence_train_reports()
    assert context.logger.level == logging.WARNING


def test_a_node_can_be_preferred() -> None:
    node = "0a" * 28
    assert versions.prefer_node(node, spills_if_full=True)._spill_on_unavailable is True
    assert versions.prefer_node(node, spills_if_full=False).soft is True


def test_the_callbacks_of_a_tuner_can_be_set() -> None:
    callback = tune.Callback()
    tuner = tune.Tuner(lambda config: None)
    versions.set_callbacks(tuner, [callback])
    assert tuner._local_tuner.get_run_config().callbacks == [callback]


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (context.TrainContext, "logger.info"),
        (ray._private.worker, "logger = logging.getLogger(__name__)"),
        (ray._private.worker, "SIGTERM handler is not set"),
        (ray.actor, "def __ray_ready__"),
        (ray.actor, "def __ray_call__"),
        (ray._common.utils, versions.current_cluster_file().name),
    ],
)
def test_sources_have_what_is_silenced_called_and_read(place: Any, words: str) -> None:
    assert words in inspect.getsource(place)


def test_the_message_of_a_lost_actor_names_its_class() -> None:
    from ray.core.generated.common_pb2 import ActorDiedErrorContext

    def message(class_name: str) -> str:
        return str(ActorDiedError(ActorDiedErrorContext(class_name=class_name, actor_id=b"0" * 16)))

    assert versions.is_lost_event_actor(message(EventActor.__name__))
    assert not versions.is_lost_event_actor(message("TrainController"))


def test_ray_reads_the_variables() -> None:
    own = versions.BEFORE_IMPORT, versions.LOCAL_CLUSTER, versions.TUNE, versions.TUNE_TRIAL, versions.pending_trials(1)
    names = [name for variables in own for name in variables]
    folder = Path(ray.__file__).parent
    files = [
        file
        for part in ("_private", "_common", "dashboard", "train", "tune", "air")
        for file in (folder / part).rglob("*.py")
    ]
    text = "".join(file.read_text(errors="ignore") for file in files)
    library = (folder / "_raylet.so").read_bytes()  # reads its settings without the prefix RAY_
    assert [name for name in names if name not in text and name.removeprefix("RAY_").encode() not in library] == []
