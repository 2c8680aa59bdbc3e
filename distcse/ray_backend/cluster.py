"""The Ray cluster a run stands on: joined where there is one, started on this machine where there is none."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # Ray does in the thread, and a process that has begun to end can no longer
import ctypes
import logging
import os
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distcse import host
from distcse.errors import RayConnectionError
from distcse.trainer import allocator

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


class _Coming:
    """A cluster that comes up in a thread of its own.

    The thread stays until the cluster is ended: Linux kills processes that were started with the thread that started them.
    """

    def __init__(self, wanted: _Wanted) -> None:
        self.wanted = wanted
        self.up: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._come, name="cluster", daemon=True)
        if wanted.address is None:
            _set_local_environment()  # here and not in the thread: Ray may be imported as soon as this returns
            atexit.register(self.end)  # waits until it is up: who ends before leaves some of Ray's processes behind
        self._thread.start()

    @property
    def is_gone(self) -> bool:
        """It did not come up, or somebody else has ended it."""
        return self.up.done() and not _is_up()

    def _come(self) -> None:
        try:
            self.wanted.come()
            _give_back_sigterm()
        except BaseException as refused:
            self.up.set_exception(refused)
        else:
            self.up.set_result(None)
            self._over.wait()

    def wait(self) -> None:
        """Wait until it is up. `RunError` where it cannot be joined or started."""
        try:
            self.up.result()
        except (ConnectionError, RuntimeError, TimeoutError, ValueError) as refused:
            address = self.wanted.address
            raise RayConnectionError(
                f"cannot {'join the Ray cluster at ' + address if address else 'start Ray here'}: {refused}. "
                "Check RAY_ADDRESS and RAY_AUTH_MODE / RAY_AUTH_TOKEN, or run without Ray: training.workers=0 for a student, "
                "ray=false for groups"
            ) from refused

    def end(self) -> None:
        """Leave or end it, when it is up."""
        atexit.unregister(self.end)
        if self.up.exception() is None:
            import ray

            ray.shutdown()
        self._over.set()
        self._thread.join()


_coming: _Coming | None = None
"""What `start_ray` began, until `cluster` takes it over: Ray is one a process, and so is this."""


def start_ray(cpus: int | None = None, fast_allocator: bool = False) -> bool:
    """Let the cluster that `cluster` will be asked for come up, while this process imports and reads.

    What goes wrong is told by `cluster`. Arguments as there. One that nobody enters ends with the process.

    Returns:
        Whether it was begun here: False where there is one, or one is coming up.
    """
    global _coming
    _forget_what_is_gone()
    if _coming is not None or _is_up():
        return False
    _coming = _Coming(_Wanted.now(cpus, fast_allocator))
    return True


@contextmanager
def coming_up(wanted: bool) -> Iterator[None]:
    """While this is entered a cluster comes up, where one is wanted and none is there; after an error it is ended."""
    begun = wanted and start_ray()
    try:
        yield
    except BaseException:
        if begun:
            shutdown_ray()
        raise


@contextmanager
def cluster(cpus: int | None = None, fast_allocator: bool = False) -> Iterator[None]:
    """Join the cluster of RAY_ADDRESS (a Ray job sets it), or this process's own, or start one here and end it after.

    Args:
        cpus: CPUs that a cluster started here claims to have; None counts those that this process may use.
        fast_allocator: All processes of this one's actors, not only Ray Train's, are for training.
    """
    global _coming
    _forget_what_is_gone()
    if _coming is None and _is_up():
        yield
        return
    wanted = _Wanted.now(cpus, fast_allocator)
    if _coming is not None and _coming.wanted != wanted:
        shutdown_ray()
    coming = _coming = _coming or _Coming(wanted)  # kept while it is waited for: whoever interrupts that may come again
    coming.wait()
    _coming = None
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # see `_give_back_sigterm`
    try:
        yield
    finally:
        coming.end()


def wait_for_ray() -> None:
    """Wait for the cluster that `start_ray` began (or begin one) without entering it: `cluster` still has to be.

    Raises:
        RunError: It cannot be joined or started.
    """
    start_ray()
    if _coming is not None:
        _coming.wait()


def is_on_this_machine() -> bool:
    """Whether the cluster of this process is one that distcse starts, or has begun to start, on this machine."""
    if _coming is not None:
        return _coming.wanted.address is None
    return not _is_up() and "RAY_ADDRESS" not in os.environ


def shutdown_ray() -> None:
    """End a cluster that was brought up and not entered."""
    global _coming
    coming, _coming = _coming, None
    if coming is not None:
        coming.end()


def _forget_what_is_gone() -> None:
    if _coming is not None and _coming.is_gone:
        shutdown_ray()


def _give_back_sigterm() -> None:
    """Ray's core takes SIGTERM for itself and ends the process at once; a scheduler that sends it wants a checkpoint.

    `signal.signal` is for the main thread, which has other work now. To the system Python has one handler for all signals, so
    that of SIGINT is what SIGTERM shall have; where it has none there, `cluster` gives it back.
    """
    handler, other = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.argtypes, get.restype = [ctypes.c_int], ctypes.c_void_p
    put.argtypes, put.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    if not callable(handler):
        put(signal.SIGTERM, int(handler or signal.SIG_DFL))
    elif callable(other):
        put(signal.SIGTERM, get(signal.SIGINT))


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
        num_cpus=cpus or host.cpus(),
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
