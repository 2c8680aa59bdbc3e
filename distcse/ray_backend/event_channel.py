"""The channel between training workers and the driver: events one way, the stop request the other."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distcse.events import Event, Reporter

_RESTARTED = {"max_restarts": 20, "max_task_retries": -1}
"""Ray's options for an actor that is restarted after its process ended and then receives the unanswered calls."""
_ANSWERS_WITHIN_S = 10.0
"""Seconds for the actor to answer, a restart included. The driver does not wait longer: a hung actor must not hang the run."""


class EventActor:
    """Keeps rank 0's events until the driver takes them.

    A restarted actor has lost the events that the driver had not taken, and nothing else: the driver remembers the worker, and
    repeats its stop request.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stop = False
        self._worker: Any = None
        self._finished = False

    def start(self, rank: int, worker: Any) -> None:
        """Record rank 0's actor; after a loss it starts again."""
        if rank == 0:
            self._worker, self._finished = worker, False

    def finish(self, rank: int) -> None:
        """Record that rank 0 has done its work: Ray Train ends its actor now."""
        self._finished = self._finished or rank == 0

    def emit(self, event: Event) -> bool:
        """Take an event. Returns whether the run is asked to stop."""
        self._events.append(event)
        return self._stop

    def take(self) -> tuple[Any, bool, list[Event]]:
        """Rank 0's actor (None if unknown), whether it has finished, and the events since the last call."""
        events, self._events = self._events, []
        return self._worker, self._finished, events

    def stop(self) -> None:
        """Ask the run to stop at its next report."""
        self._stop = True


class EventChannel:
    """The driver's end: starts the actor on its own node and passes on what workers emit.

    Args:
        name: Part of the actor's name: whose events it takes.
    """

    def __init__(self, name: str) -> None:
        # Pinned to the driver's node, so that losing another node cannot kill it.
        home = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(num_cpus=0, **_RESTARTED)(EventActor)
        self.actor: Any = actor.options(name=f"events-{unique_name(name)}", scheduling_strategy=home).remote()
        """For workers; see `reporter_of`."""
        self.has_started = False
        """Whether a worker had started by the last `relay`; it may be lost since."""
        self._worker: Any = None
        self._finished = False
        self._taking: Any = None
        self._idle_since: float | None = time.monotonic()

    def idle_s(self) -> float:
        """Seconds without a worker: since the channel was opened, or since this call found it lost. 0 once it has finished."""
        now = time.monotonic()
        if self._finished or (self.has_started and (self._worker is None or _is_alive(self._worker))):
            self._idle_since = None
            return 0.0
        self._idle_since = self._idle_since or now
        return now - self._idle_since

    def relay(self, reporter: Reporter) -> None:
        """Pass on the events since the last call, and the stop request.

        Raises:
            RayActorError: The actor is lost for good.
        """
        if reporter.stop_requested():
            self.actor.stop.remote()
        if self._taking is None:
            self._taking = self.actor.take.remote()
        # A late answer is read by a later call: a second `take` would leave its events to nobody.
        if not ray.wait([self._taking], timeout=_ANSWERS_WITHIN_S)[0]:
            return
        taken, self._taking = self._taking, None
        worker, self._finished, events = ray.get(taken)
        self._worker = worker or self._worker
        if not self.has_started and (worker is not None or events):
            self.has_started, self._idle_since = True, None
        for event in events:
            reporter.emit(event)

    def close(self) -> None:
        """End the actor."""
        ray.kill(self.actor)


def _is_alive(actor: Any) -> bool:
    """Whether an actor's process exists; one that does not answer in time does."""
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=1.0)
    except GetTimeoutError:
        return True
    except RayActorError:
        return False
    return True


def unique_name(name: str) -> str:
    """A name with a random suffix: Ray frees an actor's name only some time after its end."""
    return f"{name}-{secrets.token_hex(3)}"


def announce_worker(actor: Any, rank: int) -> bool:
    """In a worker: tell the driver that it is running. False if the actor is lost for good: no driver follows this run."""
    try:
        ray.get(actor.start.remote(rank, ray.get_runtime_context().current_actor), timeout=_ANSWERS_WITHIN_S)
    except RayActorError:
        return False
    except GetTimeoutError:  # unresponsive; the training does not need it
        return True
    return True


def announce_end(actor: Any, rank: int) -> None:
    """In a worker: tell the driver that it has finished, and is not lost when its process ends."""
    with suppress(RayActorError, GetTimeoutError):
        ray.get(actor.finish.remote(rank), timeout=_ANSWERS_WITHIN_S)


def reporter_of(actor: Any) -> Reporter:
    """A worker's end: a reporter that emits to the actor and reads the stop request from its answers. It never waits.

    Its `stop_requested` raises `RayActorError` where the actor is lost for good: no driver follows this run any more.
    """
    answers: list[Any] = []

    def emit(event: Event) -> None:
        answers.append(actor.emit.remote(event))

    def stop_requested() -> bool:
        ready, answers[:] = ray.wait(answers, num_returns=len(answers), timeout=0) if answers else ([], [])
        return any(ray.get(ready))

    return Reporter(emit, stop_requested)
