"""Channel between training workers and the driver: workers send events, the driver sends a stop request."""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distcse.cluster.versions import call_in, ping
from distcse.errors import DistcseError
from distcse.events import Event, Reporter

_RESTARTED = {"max_restarts": 20, "max_task_retries": -1}
"""Ray's options for an actor that restarts after its process ended, and then receives the unanswered calls again."""
_ANSWER_TIMEOUT_S = 10.0
"""Seconds for the actor to answer, including a restart. It is limited so that a hung actor does not block the run."""


class _Taken(NamedTuple):
    """What the driver learns from the actor at once."""

    workers: dict[int, tuple[Any, str]]
    """Actors of the workers by rank, with the ids of their nodes."""
    has_finished: bool
    """Whether rank 0 has finished."""
    failure: bytes | None
    """The error that ended a worker."""
    events: list[Event]
    """Rank 0's events since the last time."""


class EventActor:
    """Actor that stores rank 0's events until the driver takes them.

    A restart only loses events that the driver has not taken yet: the driver knows the worker and repeats its stop request.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stop = False
        self._workers: dict[int, tuple[Any, str]] = {}
        self._failure: bytes | None = None
        self._finished = False

    def start(self, rank: int, worker: Any, host: str) -> None:
        """Record a worker's actor and the id of its node; a restarted one calls this again."""
        self._workers[rank] = worker, host
        if rank == 0:
            self._finished, self._failure = False, None

    def finish(self, rank: int) -> None:
        """Record that rank 0 has finished, so that the end of its actor is no loss."""
        if rank == 0:
            self._finished = True

    def fail(self, error: bytes) -> None:
        """Record the error that ended a worker, the first if there are several."""
        self._failure = self._failure or error

    def emit(self, event: Event) -> bool:
        """Store an event, and return whether the run must stop."""
        self._events.append(event)
        return self._stop

    def take(self) -> _Taken:
        """Return what is known of the workers, and the new events."""
        events, self._events = self._events, []
        return _Taken(self._workers, self._finished, self._failure, events)

    def stop(self) -> None:
        """Request that the run stops."""
        self._stop = True

    def stops(self) -> bool:
        """Return whether the run must stop."""
        return self._stop


class EventChannel:
    """The driver's end of the channel: starts the actor, and relays workers' events."""

    def __init__(self, name: str) -> None:
        # Pinned to the driver's node, so that losing another node cannot kill it.
        driver_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(num_cpus=0, **_RESTARTED)(EventActor)
        self.actor: Any = actor.options(name=f"events-{unique_name(name)}", scheduling_strategy=driver_node).remote()
        """The actor's handle, to pass to workers; see `reporter_of`."""
        self.has_started = False
        """Whether a worker had started at the last `relay`; it can be lost since."""
        self._workers: dict[int, tuple[Any, str]] = {}
        self._is_pausing = False
        self._finished = False
        self._taking: Any = None
        self._failure: bytes | None = None
        self._failed_at = 0.0
        self._idle_since: float | None = time.monotonic()

    def has_worker(self) -> bool:
        """Return whether the worker runs or has finished. It is asked, and answers within 1 s."""
        return self._finished or (self.has_started and (0 not in self._workers or _is_alive(self._workers[0][0])))

    def idle_s(self) -> float:
        """Return the seconds since the channel was opened or the worker was found lost; 0 if it runs or has finished."""
        now = time.monotonic()
        if self.has_worker():
            self._idle_since = None
            return 0.0
        self._idle_since = self._idle_since or now
        return now - self._idle_since

    def relay(self, reporter: Reporter) -> None:
        """Emit the events since the last call to `reporter`, and send its stop request to the workers."""
        if self._is_pausing or reporter.stop_requested():
            self.actor.stop.remote()
        if self._taking is None:
            self._taking = self.actor.take.remote()
        # A later call reads a late answer: a second `take` would lose its events.
        if not ray.wait([self._taking], timeout=_ANSWER_TIMEOUT_S)[0]:
            return
        answer, self._taking = self._taking, None
        taken: _Taken = ray.get(answer)
        self._workers |= taken.workers  # a restarted actor knows none
        self._finished = taken.has_finished
        if taken.failure is not None and self._failure is None:
            self._failed_at = time.monotonic()
        self._failure = taken.failure
        if not self.has_started and (0 in self._workers or taken.events):
            self.has_started, self._idle_since = True, None
        for event in taken.events:
            reporter.emit(event)

    def pause(self) -> None:
        """Ask the workers to write a checkpoint and return, so that others continue."""
        self._is_pausing = True

    def hosts(self) -> set[str]:
        """Return the ids of the workers' nodes."""
        return {host for _, host in self._workers.values()}

    def failure(self, after_s: float) -> DistcseError | None:
        """Return the error that ended a worker at least `after_s` seconds before the last `relay`; None if there is none."""
        if self._failure is None or time.monotonic() - self._failed_at < after_s:
            return None
        error: DistcseError = ray.cloudpickle.loads(self._failure)
        return error

    def writes_checkpoint(self) -> bool:
        """Return whether a worker's process writes a checkpoint; one that does not answer counts as not writing."""
        answers = [call_in(worker, _is_writing) for worker, _ in self._workers.values()]
        ready, _ = ray.wait(answers, num_returns=len(answers), timeout=_ANSWER_TIMEOUT_S) if answers else ([], [])
        found = False
        for answer in ready:
            with suppress(RayActorError):  # the worker that failed may have ended
                found |= ray.get(answer)
        return found

    def kill_workers(self) -> None:
        """Kill the processes of all workers."""
        for worker, _ in self._workers.values():
            ray.kill(worker)

    def close(self) -> None:
        """Kill the actor."""
        ray.kill(self.actor)


def _is_writing(actor: Any) -> bool:
    """In a worker: return whether its process writes a checkpoint."""
    from distcse.training.checkpoint_manager import is_writing

    return is_writing()


def _is_alive(actor: Any) -> bool:
    """Return whether an actor's process exists; one that does not answer within 1 s counts as existing."""
    try:
        ray.get(ping(actor), timeout=1.0)
    except GetTimeoutError:
        return True
    except RayActorError:
        return False
    return True


def unique_name(name: str) -> str:
    """Append a random suffix to a name, because Ray releases an actor's name only some time after its end."""
    return f"{name}-{secrets.token_hex(3)}"


def announce_worker(actor: Any, rank: int) -> bool:
    """In a worker: report to the driver that it is running.

    Returns:
        False if the actor is lost and cannot restart, so that no driver follows this run.
    """
    try:
        context = ray.get_runtime_context()
        ray.get(actor.start.remote(rank, context.current_actor, context.get_node_id()), timeout=_ANSWER_TIMEOUT_S)
    except RayActorError:
        return False
    except GetTimeoutError:  # the actor hangs; training does not need it
        return True
    return True


def announce_failure(actor: Any, error: DistcseError) -> None:
    """In a worker: report to the driver that an error has ended it, which other workers may not have."""
    with suppress(RayActorError, GetTimeoutError):
        ray.get(actor.fail.remote(ray.cloudpickle.dumps(error)), timeout=_ANSWER_TIMEOUT_S)


def announce_end(actor: Any, rank: int) -> None:
    """In a worker: report to the driver that it has finished, so that the end of its process is no loss."""
    with suppress(RayActorError, GetTimeoutError):
        ray.get(actor.finish.remote(rank), timeout=_ANSWER_TIMEOUT_S)


def flush(actor: Any) -> None:
    """In a worker: wait until the actor has the events that this process sent before."""
    with suppress(RayActorError, GetTimeoutError):
        ray.get(ping(actor), timeout=_ANSWER_TIMEOUT_S)


def reporter_of(actor: Any) -> Reporter:
    """Create the worker's end of the channel: a reporter that sends events to the actor without waiting.

    Its `stop_requested` reads the actor's answers, and raises `RayActorError` if the actor is lost and cannot restart, so
    that no driver follows this run any more.
    """
    answers: list[Any] = []

    def emit(event: Event) -> None:
        answers.append(actor.emit.remote(event))

    def stop_requested() -> bool:
        ready, answers[:] = ray.wait(answers, num_returns=len(answers), timeout=0) if answers else ([], [])
        if not answers:  # between two events, ask; the next call reads the answer
            answers.append(actor.stops.remote())
        return any(ray.get(ready))

    return Reporter(emit, stop_requested)
