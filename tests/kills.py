"""SIGKILL for actors, as a machine that dies would do it."""

from __future__ import annotations

import os
import signal


def kill_actor(kind: str) -> bool:
    """Kill the process of one live actor whose class name holds `kind`; whether there was one.

    Ray lists an actor as alive for a moment after its process has ended: such a one is passed over.
    """
    from ray.util.state import list_actors

    for actor in list_actors(limit=1000):
        if kind in actor.class_name and actor.state == "ALIVE" and actor.pid:
            try:
                os.kill(actor.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            return True
    return False
