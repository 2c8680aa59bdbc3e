"""The Ray cluster a run stands on: joined where there is one, started on this machine where there is none."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # Ray does in the thread, and a process that has begun to end can no longer
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from distcse.errors import RunError
from distcse.training import allocator

_LOCAL_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A dev score is reported by a barrier that the controller polls: at its default of 2 s every report costs 2 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    # Nobody pre-empts a laptop; the watcher only logs errors there.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
_BEFORE_IMPORT = {
    "RAY_AUTH_MODE": "token",
    # One machine and no more: as on macOS, every port is bound to the loopback address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
"""What Ray reads when it is imported. Imported before by somebody else, it asks for a token of its own accord."""

_ANSWERS_WITHIN = 10.0
"""Seconds for a cluster's address to take a connection."""
_PASSED_ON = ("HF_", "TOKENIZERS_", "TRANSFORMERS_", "DISTCSE_", "NCCL_", "GLOO_", "RAY_TRAIN_")
_OF_THE_NODE = ("DISTCSE_MIRROR",)
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIALS")
"""Ends of names whose values Ray must not be told: it writes a worker's environment into logs and shows it to all."""


@dataclass(frozen=True)
class _Wanted:
    """Which cluster, and how."""

    address: str | None
    cpus: int | None
    environment: dict[str, Any] | None

    @staticmethod
    def now(cpus: int | None, fast_allocator: bool) -> _Wanted:
        environment = {"env_vars": allocator.FAST} if fast_allocator else None
        return _Wanted(os.environ.get("RAY_ADDRESS"), cpus, environment)

    def come(self) -> None:
        """Join or start it."""
        import ray

        logging.getLogger("ray._private.worker").addFilter(_not_of_threads)
        if self.address:
            _ask(self.address)
            ray.init(log_to_driver=False, logging_level=logging.WARNING, runtime_env=self.environment)
        else:
            _start_here(self.cpus, self.environment)


@dataclass(frozen=True)
class _Coming:
    """A cluster that comes up in a thread of its own.

    The thread stays until the cluster is ended: Linux kills processes that were started with the thread that started them.
    """

    wanted: _Wanted
    up: concurrent.futures.Future[None] = field(default_factory=concurrent.futures.Future)
    over: threading.Event = field(default_factory=threading.Event)

    @staticmethod
    def begun(wanted: _Wanted) -> _Coming:
        """A cluster that nobody enters ends with the process, which waits until it is up: half up it would leave some behind."""
        coming = _Coming(wanted)
        if wanted.address is None:
            _set_local_environment()  # here and not in the thread: Ray may be imported as soon as this returns
        threading.Thread(target=coming._come, name="cluster", daemon=True).start()
        atexit.register(coming.end)
        return coming

    def _come(self) -> None:
        try:
            self.wanted.come()
        except BaseException as refused:
            self.up.set_exception(refused)
        else:
            self.up.set_result(None)
            self.over.wait()

    def end(self) -> None:
        """Leave or end it, when it is up."""
        atexit.unregister(self.end)
        if self.up.exception() is None:
            import ray

            ray.shutdown()
        self.over.set()


_coming: _Coming | None = None
"""What `bring_up` began, until `cluster` takes it over: Ray is one a process, and so is this."""


def bring_up(cpus: int | None = None, fast_allocator: bool = False) -> None:
    """Let the cluster that `cluster` will be asked for come up, while this process imports and reads.

    What goes wrong is told by `cluster`. Arguments as there.
    """
    global _coming
    if _coming is None and not _is_up():
        _coming = _Coming.begun(_Wanted.now(cpus, fast_allocator))


@contextmanager
def cluster(cpus: int | None = None, fast_allocator: bool = False) -> Iterator[None]:
    """Join the cluster of RAY_ADDRESS (a Ray job sets it), or this process's own, or start one here and end it after.

    Args:
        cpus: CPUs that a cluster started here claims to have; None counts them.
        fast_allocator: All processes of this one's actors, not only Ray Train's, are for training.
    """
    global _coming
    if _coming is None and _is_up():
        yield
        return
    wanted, (coming, _coming) = _Wanted.now(cpus, fast_allocator), (_coming, None)
    if coming is not None and coming.wanted != wanted:
        coming.end()
        coming = None
    coming = coming or _Coming.begun(wanted)
    try:
        coming.up.result()
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as refused:
        raise RunError(
            f"cannot {'join the Ray cluster at ' + wanted.address if wanted.address else 'start Ray here'}: {refused}. "
            "Check RAY_ADDRESS and RAY_AUTH_MODE / RAY_AUTH_TOKEN, or run without Ray: training.workers=0 for a student, "
            "ray=false for groups"
        ) from refused
    if threading.current_thread() is threading.main_thread():
        # Ray's core takes SIGTERM for itself and ends the process at once; a scheduler that sends it wants a checkpoint.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    try:
        yield
    finally:
        coming.end()


def _not_of_threads(record: logging.LogRecord) -> bool:
    """Ray warns that on a thread it sets no Python handler of SIGTERM, which is what is wanted."""
    return "SIGTERM handler is not set" not in record.getMessage()


def _is_up() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


def _ask(address: str) -> None:
    """Ray itself asks for minutes before it says that nobody answers."""
    if "://" in address and not address.startswith("ray://"):
        raise ValueError("that is where jobs are submitted; a driver joins HOST:PORT, mostly port 6379, or auto")
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWERS_WITHIN).close()
        except OSError as refused:
            raise ConnectionError(f"nobody answers there ({refused.strerror or refused})") from None


def worker_environment(gpus: float) -> dict[str, str]:
    """Environment variables of a training worker: what the allocator needs, and this process's own where they matter.

    Secrets such as HF_TOKEN are not among them: a worker has those of its node.

    Args:
        gpus: GPUs that it was given; one without must not see those of others, which Ray hides only if told to.
    """
    given = {name: value for name, value in os.environ.items() if not name.endswith(_SECRET)}
    passed_on = {
        name: value for name, value in given.items() if name.startswith(_PASSED_ON) and name not in _OF_THE_NODE
    }
    return {**allocator.FAST, **passed_on, **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})}


def _set_local_environment() -> None:
    """Settings of a cluster of our own. Those of the user stand."""
    settings = dict(_LOCAL_SETTINGS)
    if "RAY_AUTH_MODE" not in os.environ:
        # A token guards the cluster's ports. Given here it lives as long as the cluster and is written to no file.
        settings["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if "ray" not in sys.modules:
        settings.update(_BEFORE_IMPORT)
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def _start_here(cpus: int | None, environment: dict[str, Any] | None) -> None:
    import ray

    port = _free_port()
    # Ray Train's cleaner asks the State API; told nothing, it finds every Ray instance of the machine and gives up.
    os.environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{port}"
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=port,
        log_to_driver=False,
        logging_level=logging.WARNING,
        runtime_env=environment,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
