"""This process: launchers that start it twice, signals, a closed pipe, its exit status, its imports, and repeated calls."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, Self, TextIO, cast

from distcse.errors import ArgumentError, DistcseError, EncoderSettingError, RecipeError, StoppedEarlyError

NO_GAIN = 3
"""Exit status of a command of which no model is better than its start."""
INTERRUPTED = 130
"""Exit status of a command that was asked to stop."""
_NO_READER = 141
"""Exit status of a command whose output nobody reads any more: what shells report for SIGPIPE."""

# Ray's job supervisor sets the first for a job's process, and reads the second from its own environment, which the job inherits.
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_RAY_WAITS = "RAY_JOB_STOP_WAIT_TIME_S"

# Each launcher's number of processes and this one's number. A Slurm allocation without a step has SLURM_NTASKS, but one process.
_LAUNCHERS = {
    "torchrun, accelerate or deepspeed": ("WORLD_SIZE", "RANK"),
    "mpirun (Open MPI)": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "mpirun": ("PMI_SIZE", "PMI_RANK"),
    "srun": ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
}


def refuse_launchers() -> None:
    """Raise `ArgumentError` if a launcher started several processes, each of which would do the same work.

    A Ray job is one process, although it inherits the variables of its node.
    """
    if _RAY_JOB in os.environ:
        return
    for launcher, (size_variable, rank_variable) in _LAUNCHERS.items():
        size, rank = os.environ.get(size_variable, ""), os.environ.get(rank_variable, "")
        if size.isdecimal() and rank.isdecimal() and int(size) > 1:
            raise ArgumentError(
                f"{launcher} started this process as number {rank} of {size} ({rank_variable}, {size_variable}), and each would "
                f"do the same work; start one process, without the launcher, which starts its own: training.workers={size} "
                f"(unset {size_variable} if this is the only one)"
            )


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector.

    Importing PyTorch and transformers creates hundreds of thousands of objects, hardly any of them garbage. Without the
    pause, repeated collections take a fifth of the import time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def repeated(function: Callable[[], object], interval_s: float, thread: str) -> Iterator[None]:
    """Context manager: call a function every `interval_s` seconds, on a daemon thread of this name, until the block ends.

    The end waits for a call that runs, so that none comes later.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(interval_s):
            function()

    repeating = threading.Thread(target=repeat, name=thread, daemon=True)
    repeating.start()
    try:
        yield
    finally:
        ended.set()
        repeating.join()


def exit_status(work: Callable[[], int], kept: str, as_json: bool = False) -> int:
    """Run a command and return its exit status; an error becomes one line on stderr.

    SIGTERM and SIGHUP (a closed terminal; not under nohup) end the command as Ctrl-C does, at once; inside `StopOnSignal`, the
    first signal only requests a stop. Output that nobody reads any more (`| head -1`) counts as SIGHUP.

    Args:
        work: Runs the command and returns its exit status.
        kept: What remains after a second Ctrl-C, for the message.
        as_json: Also print an error as a JSON object on stdout. Default: False.

    Returns:
        The command's own status; of an error, 1 for a failure, 2 for a mistake in the recipe or the arguments, 130 for a stop
        without a new checkpoint, and 141 if nobody read the output.
    """
    before = _handle(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler))
    streams = sys.stdout, sys.stderr
    if streams == (sys.__stdout__, sys.__stderr__):
        sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", (_Output(sys.stdout), _Output(sys.stderr)))
    output = sys.stdout
    try:
        try:
            return work()
        finally:
            with suppress(KeyboardInterrupt):
                output.flush()
            sys.stdout, sys.stderr = streams
            _handle(before)
    except KeyboardInterrupt:
        if isinstance(output, _Output) and output.is_closed:
            return _NO_READER
        sys.stderr.write(f"distcse: stopped at once; {kept}\n")
        return INTERRUPTED
    except DistcseError as error:
        sys.stderr.write(f"distcse: {error.coded_message}\n")
        if as_json:
            described = {"event": "Error", "code": error.code, "kind": type(error).__name__, "message": str(error)}
            sys.stdout.write(json.dumps(described) + "\n")
        if isinstance(error, StoppedEarlyError):
            return INTERRUPTED
        return 2 if isinstance(error, RecipeError | EncoderSettingError) else 1


class _Output:
    """Standard output or standard error. Once nobody reads it any more, it is discarded, and the process gets SIGHUP."""

    is_closed = False

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._write(partial(self._stream.write, text))

    def flush(self) -> None:
        self._write(self._stream.flush)

    def _write(self, work: Callable[[], int | None]) -> int:
        try:
            return work() or 0
        except OSError as refused:
            if refused.errno not in (errno.EPIPE, errno.EIO):
                raise
        self.is_closed = True
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), self._stream.fileno())
        signal.raise_signal(signal.SIGHUP)
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class StopOnSignal:
    """Handles Ctrl-C, SIGTERM and SIGHUP: the first requests a stop, the second stops at once, unless it is SIGHUP.

    A closed terminal sends SIGHUP, and makes the next output send it again. Under nohup, it stays ignored.
    """

    def __init__(
        self, outcome: str = "stopping after the current step (with a checkpoint) or batch; what is stored is kept"
    ) -> None:
        self._outcome = outcome
        self._requested = False

    def stop_requested(self) -> bool:
        """Return whether a signal has arrived."""
        return self._requested

    def __enter__(self) -> Self:
        self._before = _handle(dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), self._on_signal))
        return self

    def __exit__(self, *raised: object) -> None:
        _handle(self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._requested and number == signal.SIGHUP:
            return
        if self._requested:
            raise KeyboardInterrupt
        self._requested = True
        sys.stderr.write(f"{self._outcome}; {_limit(number)}\n")


def _handle(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Set the handlers of signals, and return those before.

    Does nothing outside the main thread, which has no signals, and leaves SIGHUP to nohup, which ignores it.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    kept = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else set()
    return {number: signal.signal(number, handler) for number, handler in handlers.items() if number not in kept}


def _limit(number: int) -> str:
    """Describe what stops the command before it ends by itself."""
    if number == signal.SIGTERM and _RAY_JOB in os.environ:
        seconds = os.environ.get(_RAY_WAITS, "3")
        return f"Ray kills a stopped job after {seconds} s ({_RAY_WAITS}): without a new checkpoint by then, the last one stays"
    return "press Ctrl-C again to stop at once"
