"""Everything that depends on Ray's version: the supported versions, private names, and environment variables of its internals.

Each private name says why the public API is not enough. `tests/unit/test_ray_versions.py` finds names that a new version moved.
Nothing is imported before it is used: `cluster` sets the variables of `BEFORE_IMPORT` before Ray is imported. Tried with Ray
2.58.0, 2.59.0 and 2.60.0. Before 2.58, `FailureConfig` has no `max_preemption_failures`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from distcse.errors import RayConnectionError

OLDEST, FIRST_UNSUPPORTED = (2, 58), (2, 61)
"""Supported versions: from `OLDEST` up to, and without, `FIRST_UNSUPPORTED`; as in pyproject.toml."""

BEFORE_IMPORT = {
    "RAY_AUTH_MODE": "token",
    # Binds every port to the loopback address, as on macOS, because the cluster has only this machine. `ray.init` has
    # `dashboard_host` for the dashboard's port, and no argument for the others.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""Variables that Ray reads on import. If other code has imported Ray before, it requires a token by default, from 2.59 on."""

LOCAL_CLUSTER = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # The dashboard's ten processes import Ray at the same time: on two busy CPUs, the defaults of 30 and 60 s are too short.
    "RAY_DASHBOARD_SUBPROCESS_MODULE_WAIT_READY_TIMEOUT": "150",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180",
    # Ray Train polls reports of dev scores at this interval; with the default of 2 s, each report would take 2 s. `RunConfig`
    # has no such setting.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Outside of clouds there is no preemption, and the watcher only logs errors.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # With Ray's niceness of 15, workers get a thirtieth of what another program's processes get, and hardly start next to four
    # of these on two CPUs. `ray.init` has no such setting.
    "RAY_worker_niceness": "0",
}
"""Variables of a local cluster's processes."""

TUNE = {
    # Ray Tune's default TensorBoard, CSV and JSON loggers would repeat the trials' trackers and records. `RunConfig`
    # adds callbacks and cannot remove these.
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    # The caller handles Ctrl-C.
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    # Seconds between snapshots of Ray Tune's state: a killed driver loses at most this much of it. `CheckpointConfig` is about
    # the trials' checkpoints only.
    "TUNE_GLOBAL_CHECKPOINT_S": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
}
"""Variables of a sweep's driver."""

TUNE_TRIAL = {
    # How long Ray Tune waits for this trial to end before it reuses the actor; its default of 2 s is too short.
    "TUNE_FUNCTION_THREAD_TIMEOUT_S": "60",
}
"""Variables that a trial sets in its actor."""


def pending_trials(number: int) -> dict[str, str]:
    """Return the variable with which Ray Tune lets this many trials wait for resources, so that an autoscaler sees them all."""
    return {"TUNE_MAX_PENDING_TRIALS_PG": str(number)}


def silence_sigterm_warning() -> None:
    """Filter out Ray's warning that it cannot set a SIGTERM handler on a thread, which `cluster` intends.

    Private: the name of the logger and the text. `ray.init(logging_level=ERROR)` would also hide other warnings.
    """
    logging.getLogger("ray._private.worker").addFilter(_is_not_sigterm_warning)


def _is_not_sigterm_warning(record: logging.LogRecord) -> bool:
    return "SIGTERM handler is not set" not in record.getMessage()


def start_autoscaling_coordinator() -> None:
    """Start the actor that Ray Train's controller waits for, and would request two seconds after its own start.

    Private: the function. No public API starts this actor; the controller starts it itself.
    """
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        get_or_create_autoscaling_coordinator,
    )

    get_or_create_autoscaling_coordinator()


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that Ray drains: after a preemption notice, or because an autoscaler ends them.

    Private: the function. `ray.nodes` and the state API list these nodes as alive. `ray.train.get_preemption_info` exists only in
    workers, all of which must call it together.
    """
    from ray._private.state import state

    return frozenset(state.get_draining_nodes())


def trainer_without_datasets() -> type[Any]:
    """Return `TorchTrainer` without the callback that shards Ray datasets: no run has one, and its process costs a second.

    Private: the callback's class, and `TorchTrainer._create_default_callbacks`. `RunConfig(callbacks=…)` adds callbacks and
    cannot remove this one; `TorchTrainer(datasets=None)` keeps it.
    """
    from ray.train.torch import TorchTrainer
    from ray.train.v2._internal.callbacks.datasets import DatasetsCallback

    class TrainerWithoutDatasets(TorchTrainer):  # type: ignore[misc]
        def _create_default_callbacks(self) -> list[Any]:
            callbacks = super()._create_default_callbacks()
            return [callback for callback in callbacks if not isinstance(callback, DatasetsCallback)]

    return TrainerWithoutDatasets


def train_controller() -> Any | None:
    """Return the actor that `TorchTrainer.fit` waits for on a thread of this process; None before it exists and after its end.

    Private: the local variable of `TorchTrainer._initialize_and_run_controller`, which hands the actor out only on the main
    thread.
    """
    for frame in sys._current_frames().values():
        caller: FrameType | None = frame
        while caller is not None:
            if caller.f_code.co_name == "_initialize_and_run_controller":
                return caller.f_locals.get("controller")
            caller = caller.f_back
    return None


def torch_backend() -> type[Any]:
    """Return the class that opens the process group of `TorchTrainer`'s workers, to set the network interface before.

    Private: the class. `TorchConfig` has no field for the interface, and `worker_runtime_env` has one value for all nodes,
    whose interfaces can have different names. The train loop is too late: the group is open by then.
    """
    from ray.train.torch.config import _TorchBackend

    backend: type[Any] = _TorchBackend
    return backend


def silence_train_reports() -> None:
    """Raise the level of the logger with which Ray Train logs every `ray.train.report` at INFO.

    Private: the module, and its logger, which is named after the file. `LoggingConfig` and `RAY_TRAIN_…` variables set no level
    for it.
    """
    import ray.train.v2._internal.execution.context as context

    context.logger.setLevel(logging.WARNING)


def prefer_node(node: str, spills_if_full: bool) -> Any:
    """Return a scheduling strategy that prefers a node.

    Private: `_spill_on_unavailable`. With the public `soft=True` alone, an actor waits for a node that is alive and full; a node
    of a run can stay full of workers until its end.
    """
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(node, soft=True, _spill_on_unavailable=spills_if_full)


def set_callbacks(tuner: Any, callbacks: Sequence[Any]) -> None:
    """Set the callbacks of a restored `Tuner`.

    Private: `Tuner._local_tuner._run_config`. `Tuner.restore` takes no callbacks and uses the pickled ones, which are those of
    the process that ended.
    """
    tuner._local_tuner._run_config.callbacks = list(callbacks)


def ping(actor: Any) -> Any:
    """Call a method that every actor has, and return the reference of its answer.

    Private: `__ray_ready__`, which Ray's guides use and no API page lists. `ray.util.state.get_actor` needs the dashboard, and
    reports a lost actor only after seconds.
    """
    return actor.__ray_ready__.remote()


def call_in(actor: Any, function: Callable[[Any], object]) -> Any:
    """Call a function in an actor's process, with the actor as its argument, and return the reference of its answer.

    Private: `__ray_call__`, which every actor has, and Ray's guides use. The actors of Ray Train's workers answer while they
    train, because training runs in a thread.
    """
    return actor.__ray_call__.remote(function)


def current_cluster_file() -> Path:
    """Return the path of the file with the address of the last cluster that `ray start` started on this machine.

    Private: the file. `ray.init(address="auto")` reads it and joins that cluster, also if only its address is wanted.
    """
    return temporary_folder() / "ray" / "ray_current_cluster"


def temporary_folder() -> Path:
    """Return the folder in which Ray puts the folder `ray`, with the sessions of local clusters."""
    variable = _folder_variable()
    return Path("/tmp" if variable is None else os.environ[variable])


def find_long_socket_path() -> tuple[str, str] | None:
    """Return a problem and its fix if the paths of a local cluster's sockets are longer than the system allows.

    Private: the names below the folder; Ray's own check raises an OSError without a way out.
    """
    session = f"session_2000-01-01_00-00-00_000000_{os.getpid()}"
    path, most = (
        temporary_folder() / "ray" / session / "sockets" / "plasma_store",
        103 if sys.platform == "darwin" else 107,
    )
    if (length := len(os.fsencode(path))) <= most:
        return None
    return (
        f"Ray's folder is below {_folder_variable()}, whose path is too long: its sockets' paths would have {length} bytes, and "
        f"{most} are allowed",
        "set RAY_TMPDIR to a short path, such as RAY_TMPDIR=/tmp",
    )


def _folder_variable() -> str | None:
    on_linux = ("TMPDIR",) if sys.platform == "linux" else ()
    return next((name for name in ("RAY_TMPDIR", *on_linux) if name in os.environ), None)


def is_lost_event_actor(message: str) -> bool:
    """Return whether the message of a `RayActorError` is about an `EventActor`.

    Private: the format of the message. The error has no attribute with the name or class of the actor.
    """
    return "class_name: EventActor" in message


UPLOAD_LIMIT_BYTES = 100 * 2**20
"""Largest archive that the job API takes: `DASHBOARD_CLIENT_MAX_SIZE` of a private module, on the cluster, which tells nobody."""


def finds_token() -> bool:
    """Return whether Ray finds a token: in a variable, in the file that one names, or in its default file."""
    return _is_token_given() or Path("~/.ray/auth_token").expanduser().exists()


def use_given_token() -> None:
    """Let Ray use the token that a variable gives also if no other asks for one. Call it before Ray is imported."""
    if _is_token_given():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _is_token_given() -> bool:
    return not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}.isdisjoint(os.environ)


def job_headers() -> dict[str, str]:
    """Return the headers with the token that Ray finds, if its variables ask for one, or only give one.

    Private: the function. `JobSubmissionClient` does not say the cluster's version of Python.

    Raises:
        RayConnectionError: Ray's variables ask for a token, and Ray finds none.
    """
    use_given_token()
    from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled
    from ray.exceptions import AuthenticationError

    try:
        headers: dict[str, str] = get_auth_headers_if_auth_enabled({})
    except AuthenticationError:
        raise RayConnectionError(
            "Ray finds no token for the cluster; set RAY_AUTH_TOKEN to the cluster's, or RAY_AUTH_MODE=disabled if it has none"
        ) from None
    return headers


def job_client(address: str) -> Any:
    """Return a client of the job API at this address, whichever cluster RAY_ADDRESS or RAY_API_SERVER_ADDRESS names.

    With either variable, `JobSubmissionClient` ignores its argument. Private: the names of the loggers of its uploads.
    """
    from ray.job_submission import JobSubmissionClient

    for module in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging"):
        logging.getLogger(f"ray.{module}").setLevel(logging.WARNING)
    hidden = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
    kept = {name: os.environ.pop(name) for name in hidden if name in os.environ}
    try:
        return JobSubmissionClient(address)
    finally:
        os.environ.update(kept)
