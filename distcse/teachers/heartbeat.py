"""Actors that hang, which Ray takes for alive: found by their silence, ended, and started again by Ray.

An actor answers for its pulse on a thread of its own, at once also in the middle of an hour's work. So the deadline needs to know
nothing of how long work takes. What hangs is a process that was stopped, a driver that waits for a device that is gone, a C
library that never returns.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

CONCURRENCY = {"concurrency_groups": {"heartbeat": 1}}
"""Option of actors that have a pulse."""
RESTARTABLE = {"max_restarts": 20, "max_task_retries": 3, **CONCURRENCY}
"""Options of one that comes back after its process or node was lost. Not without end: what always kills it is told at last."""


class HeartbeatActor:
    """Base of actors that have a pulse."""

    @ray.method(concurrency_group="heartbeat")  # type: ignore[untyped-decorator]
    def beat(self) -> str:
        """Who answers."""
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"


class HeartbeatMonitor:
    """Feels the pulse of actors while it is entered. What hangs is told of and ended; calls under way are done again.

    Args:
        deadline: Seconds without an answer after which a process hangs. One that never answered yet is still being started.
        tell: Told in a line, by a thread of the guard's.
        find: Names and handles of all actors that there are now, where others start them.
    """

    def __init__(
        self,
        deadline: float,
        tell: Callable[[str], None],
        find: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._deadline = deadline
        self._tell = tell
        self._find = find
        self._felt: list[_ActorHeartbeat] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    def add(self, name: str, actor: Any) -> None:
        """Feel the pulse of this one too."""
        self._felt.append(_ActorHeartbeat(name, actor))

    def __enter__(self) -> HeartbeatMonitor:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self._deadline / 4)):
            self._follow()
            for felt in list(self._felt):
                if (process := felt.hangs(self._deadline)) is not None:
                    self._tell(
                        f"{felt.name}, {process}, has not answered for {self._deadline:g} s (teachers.heartbeat_timeout_s): it hangs, "
                        "and is ended and started again"
                    )
                    ray.kill(felt.actor, no_restart=False)

    def _follow(self) -> None:
        if self._find is None:
            return
        try:
            found = self._find()
        except RayError:  # who starts them is lost, and they with it; the run hears of that from them
            return
        known = {felt.name for felt in self._felt}
        for name, actor in found.items():
            if name not in known:
                self.add(name, actor)


class _ActorHeartbeat:
    """One actor's pulse."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor
        self._process: str | None = None
        self._ask()

    def hangs(self, deadline: float) -> str | None:
        """The process that has not answered for so long; None while all is well."""
        if ray.wait([self._answer], timeout=0)[0]:
            try:
                self._process = ray.get(self._answer)
            except RayError:  # its process was lost; the next one is being started
                self._process = None
            self._ask()
        elif self._process is not None and time.monotonic() - self._asked > deadline:
            hanging, self._process = self._process, None
            return hanging
        return None

    def _ask(self) -> None:
        # Not asked again of the next process: an answer is to be that of the one that was asked.
        self._answer = self.actor.beat.options(max_task_retries=0).remote()
        self._asked = time.monotonic()
