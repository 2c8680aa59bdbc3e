"""The line between workers and the driver: events one way, the wish to stop the other."""

from __future__ import annotations

import secrets
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from distcse.events import Event, Watch


class Board:
    """An actor between the first worker and the driver."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._stop = False
        self._begun = False

    def begin(self) -> None:
        """A worker is there."""
        self._begun = True

    def begun(self) -> bool:
        """Whether a worker is there."""
        return self._begun

    def post(self, event: Event) -> bool:
        """Take an event; answers whether the run shall stop."""
        self._events.append(event)
        return self._stop

    def take(self) -> list[Event]:
        """Events since the last call."""
        events, self._events = self._events, []
        return events

    def stop(self) -> None:
        """Wish the run to stop at its next report."""
        self._stop = True


def open_board(name: str) -> Any:
    """A board on this process's node, whose loss ends the run anyway; `ray.kill` it when it is no longer needed.

    Args:
        name: Whose events it takes, for people who look at the cluster's actors.
    """
    # On the driver's node: with no other it shall be lost.
    home = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(num_cpus=0)(Board).options(name=f"board-{own_name(name)}", scheduling_strategy=home)
    return board.remote()


def own_name(name: str) -> str:
    """A name that nobody else has: an actor's is free again only some time after its end."""
    return f"{name}-{secrets.token_hex(3)}"


def relay(board: Any, watch: Watch) -> None:
    """In the driver: pass on what was posted since the last call, and the wish to stop."""
    if watch.stop_wished():
        board.stop.remote()
    for event in ray.get(board.take.remote()):
        watch.post(event)


def watch_of(board: Any) -> Watch:
    """In a worker: a watch that posts to the board, and hears of the wish to stop by the answers; it never waits."""
    answers: list[Any] = []

    def post(event: Event) -> None:
        answers.append(board.post.remote(event))

    def stop_wished() -> bool:
        ready, answers[:] = ray.wait(answers, num_returns=len(answers), timeout=0) if answers else ([], [])
        return any(ray.get(ready))

    return Watch(post, stop_wished)
