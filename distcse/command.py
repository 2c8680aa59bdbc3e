"""What the commands have in common: how they tell, how they end, and what signals and a closed pipe mean to them."""

from __future__ import annotations

import argparse
import errno
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, Literal, Self, TextIO, cast

from distcse import host
from distcse.errors import ArgumentError, DistcseError, EncoderSettingError, RecipeError, StoppedEarlyError
from distcse.spelling import PATHS_BY_NAME, nearest

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

_MODULE = "distcse."
_RECIPE_OPTIONS = ("config", "config_file", "cfg", "recipe")
"""Options by which other programs take their configuration file."""

_FILES = {"bash": "_shtab_compgen_files", "zsh": "_files", "fish": "(__fish_complete_path (commandline -ct))"}
"""shtab.FILE: shells complete files."""

STATUSES = "Exit status: 0 done, 1 failed, 2 a mistake in what was asked, 3 no model is better than its start, 130 interrupted."


def program(command: str) -> str:
    """Return how to call a command, in the form in which the user called this one: `distcse train`."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "" if spec is None else spec.name
    if module == f"{_MODULE}__main__":
        return f"python -m distcse {command}"
    return f"python -m distcse.{command}" if module.startswith(_MODULE) else f"distcse {command}"


def parse_command(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command's arguments, and limit the spinning of its threads (see `host.limit_spinning`).

    Exits with status 2 and a hint at the right form for an unknown option.

    Args:
        parser: The command's parser. One with `overrides` may have them before and after options.
        arguments: The arguments; None takes those of this process.
    """
    host.limit_spinning()
    words = list(sys.argv[1:] if arguments is None else arguments)
    for before, word in zip(["", *words], words, strict=False):
        option, _, value = word.partition("=") if word.startswith("--") and "=" in word else (before, "", word)
        if not value.strip() and option != "--prompt":
            name = option if option.startswith("-") else "an argument"
            parser.error(f"{name} is empty, such as an unset shell variable; write a value, or leave it out")
    takes_overrides = parser.get_default("overrides") is not None
    options, unknown = (parser.parse_known_intermixed_args if takes_overrides else parser.parse_known_args)(words)
    # An option with a space in its value is an argument to argparse.
    unknown += [word for word in getattr(options, "overrides", ()) if word.startswith("--")]
    if unknown:
        parser.error(_hint_at_option(parser, words, unknown, options))
    return options


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


def _hint_at_option(
    parser: argparse.ArgumentParser, words: Sequence[str], unknown: Sequence[str], options: argparse.Namespace
) -> str:
    """Describe what to write instead of the first unknown option.

    Args:
        parser: The command's parser.
        words: The arguments.
        unknown: Those that the parser does not know.
        options: Those that it knows.
    """
    unknown_options = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    if not unknown_options or "subcommand" in options:
        return f"unrecognized arguments: {' '.join(unknown)}"
    first = unknown_options[0]
    close = nearest(first, [f"--{name.replace('_', '-')}" for name in vars(options)], cutoff=0.75)
    name = first.removeprefix("--").replace("-", "_")
    is_setting = "." in name or name in PATHS_BY_NAME or name in _RECIPE_OPTIONS
    if "recipe" not in options or (close and not is_setting):
        return f"no option {first}{close}"
    return (
        f"no option {first}: the recipe is the first word, and settings are key.path=value; write: "
        f"{parser.prog} {shlex.join(_as_overrides(words, unknown_options))}"
    )


def _as_overrides(words: Sequence[str], unknown: Sequence[str]) -> list[str]:
    """Rewrite `--config FILE --key value` as `FILE key=value`. The other words stay behind them, in their order."""
    recipe, settings, others = list[str](), list[str](), list[str]()
    rest = list(words)
    while rest:
        option, equals, value = rest.pop(0).partition("=")
        if option not in unknown:
            others.append(f"{option}{equals}{value}")
            continue
        if not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("-") else "true"
        key = option.removeprefix("--").replace("-", "_")
        if key in _RECIPE_OPTIONS:
            recipe.append(value)
        else:
            settings.append(f"{PATHS_BY_NAME.get(key, key)}={value}")
    if not recipe and others and not others[0].startswith("-"):
        recipe.append(others.pop(0))
    return [*recipe, *settings, *others]


def add_recipe(
    parser: argparse.ArgumentParser,
    nargs: Literal["?"] | None = None,
    help: str = "values that override the recipe's",
) -> None:
    """Add the arguments `recipe` and `overrides`.

    Args:
        parser: The command's.
        nargs: `?` for a command that also works without a recipe.
        help: What the overrides do.
    """
    recipe = parser.add_argument("recipe", nargs=nargs, help="a packaged recipe's name, or a YAML file")
    recipe.complete = _FILES  # type: ignore[attr-defined]
    parser.add_argument("overrides", nargs="*", default=[], metavar="key.path=value", help=help)


def add_output_options(parser: argparse.ArgumentParser) -> None:
    """Add `--quiet` and `--json`, which are the same for all commands."""
    how = parser.add_mutually_exclusive_group()
    how.add_argument("-q", "--quiet", action="store_true", help="no progress: warnings and the results alone")
    how.add_argument(
        "--json", action="store_true", help="for programs: every event and result as JSON, one a line, on stdout"
    )


def add_start_options(parser: argparse.ArgumentParser, noun: str, checked: str) -> None:
    """Add `--dry-run`, `--run-id` and `--resume` to a command that starts runs or sweeps.

    Args:
        parser: The command's.
        noun: What it starts: `run` or `sweep`.
        checked: What a dry run checks.
    """
    parser.add_argument("--dry-run", action="store_true", help=f"check {checked}; embed and train nothing")
    parser.add_argument(
        "--run-id",
        metavar="NAME",
        help=f"begin the {noun} NAME, or resume it if it has begun: the same command serves every start (storage.run_id)",
    )
    parser.add_argument(
        "--resume", metavar=noun.upper(), help=f"resume the {noun} in this directory, or at this address"
    )


class ErrorStatus:
    """Context manager of a command: an error becomes one line on stderr, and sets the exit status.

    SIGTERM and SIGHUP (a closed terminal; not under nohup) end the command as Ctrl-C does, at once; inside `StopOnSignal`, the
    first signal only requests a stop. Output that nobody reads any more (`| head -1`) counts as SIGHUP.

    Args:
        kept: What remains after a second Ctrl-C, for the message.
        as_json: Also print the error as a JSON object on stdout. Default: False.
    """

    status = 0
    """Exit status by the error alone, 0 without one: 1 for a failure, 2 for a mistake in the recipe or the arguments, 130 for a
    stop without a new checkpoint, 141 if nobody read the output. `NO_GAIN` is a command's own result."""

    def __init__(self, kept: str, as_json: bool = False) -> None:
        self._kept = kept
        self._as_json = as_json

    def __enter__(self) -> Self:
        self._before = _handle(dict.fromkeys((signal.SIGTERM, signal.SIGHUP), signal.default_int_handler))
        self._streams = sys.stdout, sys.stderr
        if self._streams == (sys.__stdout__, sys.__stderr__):
            sys.stdout, sys.stderr = cast("tuple[TextIO, TextIO]", (_Output(sys.stdout), _Output(sys.stderr)))
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> bool:
        output = sys.stdout
        with suppress(KeyboardInterrupt):
            output.flush()
        sys.stdout, sys.stderr = self._streams
        _handle(self._before)
        if isinstance(error, KeyboardInterrupt) and isinstance(output, _Output) and output.is_closed:
            self.status = _NO_READER
            return True
        if isinstance(error, DistcseError):
            self._print(error)
            is_mistake = isinstance(error, RecipeError | EncoderSettingError)
            is_stop = isinstance(error, StoppedEarlyError)
            self.status = INTERRUPTED if is_stop else 2 if is_mistake else 1
        elif isinstance(error, KeyboardInterrupt):
            sys.stderr.write(f"distcse: stopped at once; {self._kept}\n")
            self.status = INTERRUPTED
        return bool(self.status)

    def _print(self, error: DistcseError) -> None:
        sys.stderr.write(f"distcse: {error.coded_message}\n")
        if self._as_json:
            described = {"event": "Error", "code": error.code, "kind": type(error).__name__, "message": str(error)}
            sys.stdout.write(json.dumps(described) + "\n")


def exit_status(work: Callable[[], int], kept: str, as_json: bool = False) -> int:
    """Run a command and return its exit status, or that of its error (see `ErrorStatus`).

    Args:
        work: Runs the command and returns its exit status.
        kept: What remains after a second Ctrl-C, for the message.
        as_json: Also print an error as a JSON object on stdout. Default: False.
    """
    with ErrorStatus(kept, as_json) as failed:
        return work()
    return failed.status


class _Output:
    """Standard output or standard error. Once nobody reads it any more, it is discarded, and the process gets SIGHUP.

    Args:
        stream: The stream.
    """

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

    Args:
        outcome: What the requested stop waits for and keeps, for the message.
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
