"""Joins the Ray cluster of a run, or starts one on this machine."""

from __future__ import annotations

import atexit
import concurrent.futures.thread  # Ray imports it in our thread, where it fails once the interpreter shuts down
import ctypes
import logging
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from distcse.cluster.versions import (
    BEFORE_IMPORT,
    LOCAL_CLUSTER,
    find_long_socket_path,
    finds_token,
    silence_sigterm_warning,
    temporary_folder,
    use_given_token,
)
from distcse.devices import host
from distcse.errors import DistcseError, RayConnectionError

_CONNECT_TIMEOUT_S = 10.0
"""Seconds for a cluster's address to accept a connection."""
_PASSED_PREFIXES = ("HF_", "TOKENIZERS_", "TRANSFORMERS_", "DISTCSE_", "NCCL_", "GLOO_", "RAY_TRAIN_")
_NODE_VARIABLES = ("DISTCSE_MIRROR",)
_WORKER_LOGS = "DISTCSE_WORKER_LOGS"


@dataclass(frozen=True)
class ClusterConfig:
    """Address and settings of a cluster."""

    address: str | None
    cpus: int | None
    environment: dict[str, Any] | None

    @staticmethod
    def from_environment(cpus: int | None, fast_allocator: bool) -> ClusterConfig:
        environment = {"env_vars": host.MALLOC_ENV} if fast_allocator else None
        return ClusterConfig(os.environ.get("RAY_ADDRESS"), cpus, environment)

    def connect(self) -> None:
        """Join or start the cluster."""
        import ray

        silence_sigterm_warning()
        _leave_out_colors()
        if self.address:
            _check_address(self.address)
            ray.init(log_to_driver=_shows_worker_logs(), logging_level=logging.WARNING, runtime_env=self.environment)
        else:
            _start_local_cluster(self.cpus, self.environment)


class StartingCluster:
    """A cluster that is joined or started on a background thread.

    The thread lives until the cluster ends, because Linux kills the cluster's processes together with the thread that started
    them.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.up: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        if config.address is None:
            _set_local_environment()  # not in the thread: Ray can be imported as soon as this returns
            atexit.register(self.end)  # it waits for the start, because exiting earlier leaves Ray processes behind
        else:
            use_given_token()
        self._thread.start()

    @property
    def is_gone(self) -> bool:
        """Whether it failed to start, or other code has ended it."""
        return self.up.done() and not _is_up()

    def _run(self) -> None:
        # A closed terminal asks the driver to stop with a checkpoint. Ray's processes inherit the mask, and outlast it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
        try:
            self.config.connect()
            _restore_sigterm()
        except BaseException as error:
            self.up.set_exception(error)
        else:
            self.up.set_result(None)
            self._ended.wait()

    def wait(self) -> None:
        """Wait until the cluster is up."""
        try:
            self.up.result()
        except DistcseError:
            raise
        except Exception as error:  # Ray raises Exception itself where a busy machine starts its processes too late
            address, load = self.config.address, f"{os.getloadavg()[0]:.1f} on {host.cpus()} CPUs"
            failed = f"join the Ray cluster at {address}" if address else f"start Ray here (load {load})"
            fix = fix_of_joining(error) if address else _fix_of_starting(error)
            reason = str(error).partition(". Ensure that the token ")[0]  # five sentences of advice from Ray follow
            raise RayConnectionError(
                f"cannot {failed}: {reason}; {fix}, or run without Ray: training.workers=0 for a student, ray=false for groups"
            ) from error

    def end(self) -> None:
        """Wait until the cluster is up, then leave or end it."""
        atexit.unregister(self.end)
        if self.up.exception() is None:
            import ray

            ray.shutdown()
        self._ended.set()
        self._thread.join()


_starting: StartingCluster | None = None
"""The cluster that `start_ray` began to start and `cluster` has not entered yet. A process has one Ray, so this is global."""
_entered: StartingCluster | None = None
"""The cluster that `cluster` has joined or started and not left yet."""


def start_ray(cpus: int | None = None, fast_allocator: bool = False) -> bool:
    """Start or join the cluster in the background, to enter it later with `cluster`.

    `cluster` raises the error if it fails. A cluster that is never entered ends with the process.

    Returns:
        False if there is a cluster already, or one is starting.
    """
    global _starting
    _end_if_gone()
    if _starting is not None or _is_up():
        return False
    _starting = StartingCluster(ClusterConfig.from_environment(cpus, fast_allocator))
    return True


@contextmanager
def starting_ray() -> Iterator[None]:
    """Context manager: call `start_ray`, and end the started cluster if the block raises an error."""
    is_started = start_ray()
    try:
        yield
    except BaseException:
        if is_started:
            shutdown_ray()
        raise


@contextmanager
def cluster(cpus: int | None = None, fast_allocator: bool = False) -> Iterator[None]:
    """Context manager: use this process's Ray connection, join the cluster of RAY_ADDRESS, or start a local cluster.

    It leaves or ends the cluster afterwards, unless the process was connected before. A Ray job has RAY_ADDRESS set.

    Args:
        cpus: Number of CPUs of a local cluster. Default: those that this process may use.
        fast_allocator: Whether all actors' processes get the allocator settings for training. Default: only those of
            training workers.

    Raises:
        RayConnectionError: The cluster cannot be joined or started.
    """
    global _starting, _entered
    _end_if_gone()
    if _starting is None and _is_up():
        yield
        return
    config = ClusterConfig.from_environment(cpus, fast_allocator)
    if _starting is not None and _starting.config != config:
        shutdown_ray()
    # Stays in `_starting` during the wait, so that a caller who interrupts it can enter the cluster later.
    starting = _starting = _starting or StartingCluster(config)
    starting.wait()
    _starting, _entered = None, starting
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))  # see `_restore_sigterm`
    try:
        yield
    finally:
        _entered = None
        starting.end()


def wait_for_ray() -> None:
    """Wait for the cluster of `start_ray`, starting it if needed. It must still be entered with `cluster`."""
    start_ray()
    if _starting is not None:
        _starting.wait()


def is_on_this_machine() -> bool:
    """Return whether this process's cluster is, or will be, a local one that distcse starts."""
    if _starting is not None:
        return _starting.config.address is None
    return not _is_up() and "RAY_ADDRESS" not in os.environ


def was_started_here() -> bool:
    """Return whether this process's cluster is a local one that `cluster` has started and not ended yet."""
    return _entered is not None and _entered.config.address is None


def shutdown_ray() -> None:
    """End a cluster that was started and not entered."""
    global _starting
    starting, _starting = _starting, None
    if starting is not None:
        starting.end()


def _end_if_gone() -> None:
    if _starting is not None and _starting.is_gone:
        shutdown_ray()


def fix_of_joining(error: Exception) -> str:
    """Return what to do if the cluster at RAY_ADDRESS cannot be joined."""
    if isinstance(error, _AddressError):
        return "correct RAY_ADDRESS"
    if "ersion mismatch" in str(error):
        return "install the cluster's versions of Ray and Python here"
    if type(error).__name__ == "AuthenticationError" or re.search(
        "unauthenticated|auth.*token", str(error), re.IGNORECASE
    ):
        return "set RAY_AUTH_MODE and RAY_AUTH_TOKEN as on the cluster"
    if "Failed to connect to Ray cluster" in str(error):  # also where it refuses the token, which Ray only logs
        return "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN if the cluster asks for one, or correct RAY_ADDRESS"
    return "start the cluster, or correct RAY_ADDRESS"


def _fix_of_starting(error: Exception) -> str:
    if isinstance(error, OSError) and (error.filename or "AF_UNIX" in str(error)):
        return "set RAY_TMPDIR to a short path of a folder with room in which you may write"
    return (
        f"see {temporary_folder() / 'ray' / 'session_latest' / 'logs'}, and start again when the machine is less busy"
    )


def _restore_sigterm() -> None:
    """Replace Ray's SIGTERM handler, which ends the process immediately, so that a scheduler's SIGTERM saves a checkpoint.

    `signal.signal` only works on the main thread. But Python installs the same C handler for all signals, so the handler of
    SIGINT is installed for SIGTERM. If SIGINT has none, `cluster` restores it on the main thread.
    """
    handler, sigint_handler = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    get, put = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get.argtypes, get.restype = [ctypes.c_int], ctypes.c_void_p
    put.argtypes, put.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    if not callable(handler):
        put(signal.SIGTERM, int(handler or signal.SIG_DFL))
    elif callable(sigint_handler):
        put(signal.SIGTERM, get(signal.SIGINT))


def _is_up() -> bool:
    return "ray" in sys.modules and sys.modules["ray"].is_initialized()


class _AddressError(ValueError):
    """RAY_ADDRESS has another form than that of a cluster's address."""


def _check_address(address: str) -> None:
    """Check that an address accepts connections, because Ray itself would try for minutes."""
    if "://" in address and not address.startswith("ray://"):
        raise _AddressError("this is an address for submitting jobs; set HOST:PORT, usually port 6379, or auto")
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ConnectionError(f"nothing answers at this address ({error.strerror or error})") from None


def worker_environment(gpus: float) -> dict[str, str]:
    """Return the environment variables of a training worker: allocator settings, and relevant variables of this process.

    Secrets such as HF_TOKEN are excluded: a worker uses those of its node.
    """
    public = {name: value for name, value in os.environ.items() if not name.endswith(host.SECRET_SUFFIXES)}
    passed_on = {
        name: value
        for name, value in public.items()
        if name.startswith(_PASSED_PREFIXES) and name not in _NODE_VARIABLES
    }
    # A torchrun that started one process sets it: the first worker would look for torchrun's store and open none.
    own_store = {"TORCHELASTIC_USE_AGENT_STORE": "False"}
    return {**host.MALLOC_ENV, **own_store, **passed_on, **({} if gpus else {"CUDA_VISIBLE_DEVICES": ""})}


def _set_local_environment() -> None:
    """Set Ray's variables for a local cluster; variables that the user has set are kept."""
    settings = dict(LOCAL_CLUSTER)
    mode = os.environ.get("RAY_AUTH_MODE", "").lower()
    if not mode or (mode == "token" and not finds_token()):
        # A token protects the cluster's ports. Passed in the environment, it is written to no file; without one, Ray would write
        # ~/.ray/auth_token, which other users can read.
        settings["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    if "ray" not in sys.modules:
        settings.update(BEFORE_IMPORT)
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    host.limit_spinning()


def _start_local_cluster(cpus: int | None, environment: dict[str, Any] | None) -> None:
    import ray

    if (found := find_long_socket_path()) is not None:
        raise RayConnectionError(f"cannot start Ray here: {'; '.join(found)}")

    port = _free_port()
    # Ray Train's cleanup uses the State API; without this address it fails if the machine has several Ray instances.
    os.environ["RAY_API_SERVER_ADDRESS"] = f"http://127.0.0.1:{port}"
    ray.init(
        address="local",
        num_cpus=cpus or host.cpus(),
        include_dashboard=True,
        dashboard_host="127.0.0.1",
        dashboard_port=port,
        log_to_driver=_shows_worker_logs(),
        logging_level=logging.WARNING,
        runtime_env=environment,
    )


def _shows_worker_logs() -> bool:
    """Return whether this process prints what the workers print; they write it to files of the Ray session in any case."""
    return os.environ.get(_WORKER_LOGS, "0") not in ("", "0")


def _leave_out_colors() -> None:
    """Let Ray print workers' lines without color codes where they are not wanted: NO_COLOR, a file or a pipe."""
    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        os.environ.setdefault("RAY_COLOR_PREFIX", "0")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
