"""Waits for workers and for the cluster, which are warned of, and what workers decide together."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from distcse.cluster.train_workers import result_unless_paused
from distcse.devices.distributed import on_all_ranks, rank
from distcse.errors import CorpusError, DivergedError, StoppedEarlyError, TeacherError
from distcse.events import Event, LogMessage, Reporter, WaitWarning
from distcse.training.checkpoint_files import TrainerState
from distcse.training.trainer import TrainResult
from tests.failures import fails_with
from tests.workers import run_workers


@pytest.mark.parametrize("is_paused", [True, False])
def test_workers_that_are_paused_before_they_train_do_not_end_the_run(is_paused: bool) -> None:
    state = TrainerState(3)
    done = TrainResult(state, 5, 0.0, 0.0)
    stopped = TrainResult(state, 5, 0.0, 0.0, interrupted=True)
    assert result_unless_paused(done, is_paused) is done
    assert result_unless_paused(stopped, is_paused) is (None if is_paused else stopped)
    early = StoppedEarlyError("stopped while a teacher was loaded")
    with nullcontext() if is_paused else fails_with(StoppedEarlyError, "teacher"):
        assert result_unless_paused(early, is_paused) is None
    with fails_with(DivergedError, "loss"):
        result_unless_paused(DivergedError("the loss is not finite"), is_paused)


def test_a_long_wait_is_reported_once() -> None:
    events: list[Event] = []
    short, long = WaitWarning(Reporter(events.append)), WaitWarning(Reporter(events.append), after_s=0.0)
    for _ in range(2):
        short.check("short")
        long.check("waiting for a node")
    assert events == [LogMessage("waiting for a node", warning=True)] and long.waited_s > 0


def test_the_mistake_of_one_worker_is_raised_by_all() -> None:
    """Raised by one alone, the others would wait for it in their next collective."""
    assert run_workers(_met, 2) == ["rank 1 has no disk", "rank 1 has no disk"]


def _met() -> str:
    assert on_all_ranks(lambda: rank() + 5) == rank() + 5
    try:
        on_all_ranks(_work)
    except CorpusError as mistake:
        return str(mistake)
    return "no error"


def _work() -> int:
    if rank() == 1:
        raise CorpusError("rank 1 has no disk")
    return 1


def test_a_worker_alone_has_its_own() -> None:
    def fail() -> None:
        raise TeacherError("mine")

    assert on_all_ranks(lambda: 3) == 3
    with fails_with(TeacherError, "mine"):
        on_all_ranks(fail)
