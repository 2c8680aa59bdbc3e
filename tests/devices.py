"""Functions that tests call on devices of other processes, and what their drivers record."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from distcse.errors import ModelOutputError
from distcse.evaluation import Evaluation
from distcse.events import LogMessage, Reporter
from distcse.models import CrossEncoder, Encoder


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
