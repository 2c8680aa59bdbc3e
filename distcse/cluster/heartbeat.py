"""Detects actors that hang, which Ray considers alive, and kills them so that Ray restarts them.

An actor answers heartbeats on a separate thread, also during long calls. The timeout therefore does not depend on how long a
call takes. An actor hangs because its process is stopped, a GPU driver waits for a lost device, or a C library never returns.
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
"""Options of actors that answer heartbeats."""
RESTARTABLE = {"max_restarts": 20, "max_task_retries": 3, **CONCURRENCY}
"""Options of actors that Ray restarts. The number is limited, so that an actor that always crashes raises an error."""


class HeartbeatActor:
    """Base class of actors that answer heartbeats."""

    @ray.method(concurrency_group="heartbeat")  # type: ignore[untyped-decorator]
    def beat(self) -> str:
        """Return the process and node that answer."""
        return f"process {os.getpid()} on {ray.util.get_node_ip_address()}"


class HeartbeatMonitor:
    """Polls actors' heartbeats on a thread and kills actors that hang, so that Ray restarts them and retries their calls.

    A context manager: it polls between enter and exit. An actor that has not answered yet counts as starting. Time in which this
    process itself stood still, and could receive no answer, does not count.

    Args:
        timeout_s: Seconds without an answer after which an actor hangs.
        warn: Called on the monitor's thread with a message about each actor that hangs.
        find_actors: Returns names and handles of all current actors, for actors that other processes start. Default: none.
        key: Recipe key of the timeout, for messages. Default: that of teachers.
    """

    def __init__(
        self,
        timeout_s: float,
        warn: Callable[[str], None],
        find_actors: Callable[[], Mapping[str, Any]] | None = None,
        key: str = "teachers.heartbeat_timeout_s",
    ) -> None:
        self._timeout_s, self._key = timeout_s, key
        self._warn = warn
        self._find_actors = find_actors
        self._monitored: list[_ActorHeartbeat] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="heartbeat-monitor", daemon=True)

    def add(self, name: str, actor: Any) -> None:
        """Monitor another actor; messages name it `name`."""
        self._monitored.append(_ActorHeartbeat(name, actor))

    def remove(self, actor: Any) -> None:
        """Stop monitoring an actor, before it is ended or replaced."""
        for heartbeat in [heartbeat for heartbeat in self._monitored if heartbeat.actor is actor]:
            self._monitored.remove(heartbeat)

    def __enter__(self) -> HeartbeatMonitor:
        self._thread.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        interval_s = min(1.0, self._timeout_s / 4)
        polled_at = time.monotonic()
        while not self._stopped.wait(interval_s):
            self._add_found_actors()
            waited_s, polled_at = min(time.monotonic() - polled_at, 2 * interval_s), time.monotonic()
            for heartbeat in list(self._monitored):
                if (process := heartbeat.find_hung_process(waited_s, self._timeout_s)) is not None:
                    self._warn(
                        f"{heartbeat.name}, {process}, has not answered for {self._timeout_s:g} s "
                        f"({self._key}): it hangs, and is killed and restarted"
                    )
                    ray.kill(heartbeat.actor, no_restart=False)

    def _add_found_actors(self) -> None:
        if self._find_actors is None:
            return
        try:
            found = self._find_actors()
        except RayError:  # the actor that owns them is lost, and they with it, or answers late (GetTimeoutError)
            return
        known = {heartbeat.name for heartbeat in self._monitored}
        for name, actor in found.items():
            if name not in known:
                self.add(name, actor)


class _ActorHeartbeat:
    """One actor's heartbeat: the pending call, the seconds it was waited for, and the process that answered last."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self.actor = name, actor
        self._process: str | None = None
        self._send()

    def find_hung_process(self, waited_s: float, timeout_s: float) -> str | None:
        """Add the seconds since the last poll; return a process that has not answered for `timeout_s`, None otherwise."""
        self._waited_s += waited_s
        if ray.wait([self._answer], timeout=0)[0]:
            try:
                self._process = ray.get(self._answer)
            except RayError:  # the process was lost, and Ray is starting another
                self._process = None
            self._send()
        elif self._process is not None and self._waited_s > timeout_s:
            hung, self._process = self._process, None
            return hung
        return None

    def _send(self) -> None:
        # Without retries: an answer must come from the process that received the call.
        self._answer = self.actor.beat.options(max_task_retries=0).remote()
        self._waited_s = 0.0
