"""The line between workers and the driver: events one way, the wish to stop the other."""

from __future__ import annotations

import secrets
import time
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distcse.events import Event, Watch

_RESTARTED = {"max_restarts": 20, "max_task_retries": -1}
"""Ray's options for an actor that is started again after its process ended, and then gets the calls that were not answered."""
_ANSWERS_WITHIN = 10.0
"""Seconds for the board to answer, its restart included. The driver does not wait longer: a hung board must not hang the run."""


class Board:
    """An actor between the first worker and the driver.

    A restarted board has lost the events that the driver had not taken, and nothing else: the driver remembers the worker, and
    repeats its wish to stop.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stop = False
        self._worker: Any = None

    def begin(self, rank: int, worker: Any) -> None:
        """Note the first worker's actor; it begins again after a loss."""
        if rank == 0:
            self._worker = worker

    def post(self, event: Event) -> bool:
        """Take an event; answers whether the run is asked to stop."""
        self._events.append(event)
        return self._stop

    def take(self) -> tuple[Any, list[Event]]:
        """The first worker's actor, None where it is not known, and the events since the last call."""
        events, self._events = self._events, []
        return self._worker, events

    def stop(self) -> None:
        """Wish the run to stop at its next report."""
        self._stop = True


class DriverBoard:
    """The driver's side: starts a board on its own node and passes on what is posted there.

    Args:
        name: Whose events the board takes, for people who look at the cluster's actors.
    """

    def __init__(self, name: str) -> None:
        # Pinned to the driver's node, so that losing another node cannot kill it.
        home = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        board = ray.remote(num_cpus=0, **_RESTARTED)(Board)
        self.actor: Any = board.options(name=f"board-{own_name(name)}", scheduling_strategy=home).remote()
        """For workers; see `watch_of`."""
        self.begun = False
        """Whether a worker has begun, by the last `relay`; it may be lost since."""
        self._worker: Any = None
        self._taking: Any = None
        self._idle_since: float | None = time.monotonic()

    def idle_s(self) -> float:
        """Seconds for which no worker has been there: since the board was started, or since this found the worker lost."""
        now = time.monotonic()
        if self.begun and (self._worker is None or _is_alive(self._worker)):
            self._idle_since = None
            return 0.0
        self._idle_since = self._idle_since or now
        return now - self._idle_since

    def relay(self, watch: Watch) -> None:
        """Pass on the events since the last call, and the wish to stop.

        Raises:
            RayActorError: The board is lost for good.
        """
        if watch.stop_wished():
            self.actor.stop.remote()
        if self._taking is None:
            self._taking = self.actor.take.remote()
        # An answer that is late is taken by a later call: a second `take` would leave its events to nobody.
        if not ray.wait([self._taking], timeout=_ANSWERS_WITHIN)[0]:
            return
        taken, self._taking = self._taking, None
        worker, events = ray.get(taken)
        self._worker = worker or self._worker
        if not self.begun and (worker is not None or events):
            self.begun, self._idle_since = True, None
        for event in events:
            watch.post(event)

    def close(self) -> None:
        """End the board."""
        ray.kill(self.actor)


def _is_alive(actor: Any) -> bool:
    """Whether an actor's process is there; one that does not answer is."""
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=1.0)
    except GetTimeoutError:
        return True
    except RayActorError:
        return False
    return True


def own_name(name: str) -> str:
    """A name that nobody else has: an actor's is free again only some time after its end."""
    return f"{name}-{secrets.token_hex(3)}"


def begin(board: Any, rank: int) -> bool:
    """In a worker: tell the driver that it is there. False where the board is lost for good: nobody drives this run any more."""
    try:
        ray.get(board.begin.remote(rank, ray.get_runtime_context().current_actor), timeout=_ANSWERS_WITHIN)
    except RayActorError:
        return False
    except GetTimeoutError:  # it hangs; the training does not need it
        return True
    return True


def watch_of(board: Any) -> Watch:
    """In a worker: a watch that posts to the board, and hears of the wish to stop by the answers; it never waits.

    Its `stop_wished` raises `RayActorError` where the board is lost for good: nobody drives this run any more.
    """
    answers: list[Any] = []

    def post(event: Event) -> None:
        answers.append(board.post.remote(event))

    def stop_wished() -> bool:
        ready, answers[:] = ray.wait(answers, num_returns=len(answers), timeout=0) if answers else ([], [])
        return any(ray.get(ready))

    return Watch(post, stop_wished)
