"""Ray actors that call functions on one device each: evaluation, candidates, mining, training."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from distcse.cluster.assigned_resources import use_gpus, use_threads
from distcse.cluster.cluster import worker_environment
from distcse.cluster.event_channel import EventChannel, flush, reporter_of, unique_name
from distcse.cluster.heartbeat import RESTARTABLE, HeartbeatActor, HeartbeatMonitor
from distcse.cluster.node_checks import require_alike
from distcse.cluster.nodes import ResourceWatchdog, alive, live_nodes, own_node_drains
from distcse.devices import host
from distcse.devices.device_plan import DeviceOptions, DevicePlan, OwnNode, plan_devices
from distcse.devices.resources import ResourceRequest, format_resources
from distcse.errors import DistcseError, ProcessLostError, StoppedEarlyError, WorkFailedError, first_line, last_line
from distcse.events import Reporter, WaitWarning
from distcse.runs.backend import DeviceCall, LocalBackend

T = TypeVar("T")

_POLL_S = 0.2


@dataclass(frozen=True)
class _Answer:
    """What an actor answers once it has called a function."""

    result: Any
    is_paused: bool
    """Whether the function has stopped, with a checkpoint, because Ray drains the actor's node."""
    is_drained: bool
    """Whether Ray drains the actor's node, which gets no further function."""


class DeviceActor(HeartbeatActor):
    """Ray actor that calls functions on its device, one after the other."""

    def __init__(self, plan: DevicePlan) -> None:
        use_gpus()
        node_id = ray.get_runtime_context().get_node_id()
        self._threads = next(plan.threads_on(node.resources) for node in live_nodes() if node.id == node_id)
        os.environ["OMP_NUM_THREADS"] = str(self._threads)  # for faiss: Ray's value is that of the reserved CPUs

    def call(self, function: Callable[[Reporter], Any], channel: Any, returns_on_stop: bool) -> _Answer:
        """Call a function, and answer once the event channel's actor has its events.

        A function that returns on stop is stopped if Ray drains this node. Others have no checkpoint, and may end in time.
        """
        use_threads(self._threads)
        reporter, drains, is_paused = reporter_of(channel), own_node_drains(), False

        def stop_requested() -> bool:
            nonlocal is_paused
            is_paused = is_paused or (returns_on_stop and drains())
            return is_paused or reporter.stop_requested()

        try:
            result = function(Reporter(reporter.emit, stop_requested))
            return _Answer(result, is_paused, drains())
        except StoppedEarlyError:  # before its first checkpoint
            if not is_paused:
                raise
            return _Answer(None, is_paused, drains())
        finally:
            flush(channel)
            host.release_memory()


def run_calls(calls: Sequence[DeviceCall[T]], options: DeviceOptions, reporter: Reporter) -> list[T]:
    """Call functions on the cluster's devices, or in this process where `plan_devices` decides so.

    See `Backend.run_on_devices`. An actor that is killed, hangs or loses its node repeats its function. If Ray drains its node,
    another one continues a function that returns on stop, and calls those that have not begun.
    """
    nodes, memory = alive(), max(call.memory_bytes for call in calls)
    own = OwnNode(ray.get_runtime_context().get_node_id(), host.memory() - host.memory_used())
    plan = plan_devices(options, nodes, own, len(calls), memory)
    has_gpu = plan is not None and plan.each.get("GPU")
    if options.uses_gpu and not has_gpu and any(node.resources.get("GPU") for node in nodes):
        keys = " or ".join(options.labels)
        text = f"the {calls[0].name} runs on CPUs: no node with the labels of {keys} has a GPU"
        reporter.warn(text)
    if plan is None:
        return LocalBackend().run_on_devices(calls, options, reporter)
    require_alike(options.written, options.read, [plan.labels])
    channel = EventChannel(f"devices-{options.owner}")
    actors: list[Any] = []
    try:
        with HeartbeatMonitor(options.heartbeat_timeout_s, reporter.warn) as monitor:

            def start() -> Any:
                actors.append(_start_actor(plan, options))
                monitor.add(f"process {len(actors) - 1} of the {calls[0].name}", actors[-1])
                return actors[-1]

            return _DeviceCalls(calls, plan, start, channel, reporter).run()
    finally:
        for actor in actors:
            ray.kill(actor)
        channel.close()


def _start_actor(plan: DevicePlan, options: DeviceOptions) -> Any:
    environment = {"env_vars": worker_environment(plan.each.get("GPU", 0.0))} if options.trains else None
    actor_class = ray.remote(**RESTARTABLE)(DeviceActor).options(
        name=unique_name(f"device-{options.owner}"),
        num_cpus=plan.each.get("CPU", 0.0),
        num_gpus=plan.each.get("GPU", 0.0),
        memory=plan.each["memory"],
        label_selector=plan.labels,
        scheduling_strategy="SPREAD",
        runtime_env=environment,
    )
    return actor_class.remote(plan)


class _DeviceCalls:
    """Distributes functions over actors as these start and finish, relays events, and collects the results."""

    def __init__(
        self,
        calls: Sequence[DeviceCall[Any]],
        plan: DevicePlan,
        start: Callable[[], Any],
        channel: EventChannel,
        reporter: Reporter,
    ) -> None:
        self._calls, self._plan, self._channel, self._reporter = calls, plan, channel, reporter
        self._start_actor = start
        self._waiting = deque(range(len(calls)))
        self._starting: dict[Any, Any] = {}
        for _ in range(plan.number):
            self._start()
        self._running: dict[Any, tuple[int, Any]] = {}
        self._results: dict[int, Any] = {}
        self._failure: DistcseError | None = None
        self._wait_warning = WaitWarning(reporter)
        request = ResourceRequest(f"the {calls[0].name}", 1, plan.each, plan.labels, "", {})
        self._watchdog = ResourceWatchdog([request], reporter.warn)

    def _start(self) -> None:
        actor = self._start_actor()
        self._starting[actor.beat.remote()] = actor

    def run(self) -> list[Any]:
        """Return the results in the functions' order."""
        while unfinished := self._unfinished():
            if self._is_stopping() and self._stop(unfinished):
                break
            if not self._running:
                needed, name = format_resources(self._plan.each), unfinished[0].name
                self._wait_warning.check(f"waiting for a node with {needed} free for the {name}")
            self._watchdog.check()
            ready, _ = ray.wait([*self._starting, *self._running], num_returns=1, timeout=_POLL_S)
            self._channel.relay(self._reporter)
            for answer in ready:
                self._take(answer)
        self._channel.relay(self._reporter)
        if self._failure is not None:
            raise self._failure
        return [self._results[number] for number in range(len(self._calls))]

    def _is_stopping(self) -> bool:
        return self._failure is not None or self._reporter.stop_requested()

    def _stop(self, unfinished: Sequence[DeviceCall[Any]]) -> bool:
        """Begin no more functions. Returns whether none is left that is waited for.

        Raises:
            StoppedEarlyError: A function does not return by itself.
        """
        if not all(call.returns_on_stop for call in unfinished):
            names = ", ".join(call.name for call in unfinished)
            raise StoppedEarlyError(f"stopped before the end of the {names}; what is stored is kept")
        self._results |= dict.fromkeys(self._waiting)
        self._waiting.clear()
        self._end_unstarted()
        return not self._running

    def _take(self, answer: Any) -> None:
        """Take what an actor answers, a result or that it has started, and give it its next function."""
        number, actor = self._running.pop(answer) if answer in self._running else (None, self._starting.pop(answer))
        name = (self._unfinished()[0] if number is None else self._calls[number]).name
        try:
            answered = _get(answer, name)
        except ActorUnavailableError:  # its node may be lost, which Ray notices and repairs only after seconds
            self._starting[actor.beat.remote()] = actor
            if number is not None:
                self._waiting.appendleft(number)
            return
        except DistcseError as failure:
            if not all(call.returns_on_stop for call in self._calls):
                raise
            self._failure = self._failure or failure
            if number is not None:
                self._results[number] = None
            self._channel.pause()
            return
        if number is None:
            self._assign(actor)
            return
        assert isinstance(answered, _Answer)
        if answered.is_paused and not self._is_stopping():
            self._reporter.warn(f"Ray drains the node of the {name}: it continues on another from its checkpoint")
            self._waiting.appendleft(number)
        else:
            self._results[number] = answered.result
        if not answered.is_drained:
            self._assign(actor)
            return
        ray.kill(actor)
        if self._waiting and not self._is_stopping():
            self._start()

    def _assign(self, actor: Any) -> None:
        """Give an idle actor its next function; without one, end it, because a restarting actor may need its device."""
        if not self._waiting or self._is_stopping():
            ray.kill(actor)
            return
        number = self._waiting.popleft()
        call = self._calls[number]
        arguments = call.function, self._channel.actor, call.returns_on_stop
        self._running[actor.call.options(name=call.name).remote(*arguments)] = (number, actor)
        if not self._waiting:
            self._end_unstarted()

    def _end_unstarted(self) -> None:
        """End the actors that have not started, once no function waits for one: an autoscaler would start nodes for them."""
        for unused in self._starting.values():
            ray.kill(unused)
        self._starting.clear()

    def _unfinished(self) -> list[DeviceCall[Any]]:
        return [call for number, call in enumerate(self._calls) if number not in self._results]


def _get(answer: Any, name: str) -> Any:
    """Return an actor's answer."""
    try:
        return ray.get(answer)
    except RayTaskError as failed:
        if isinstance(failed.cause, DistcseError):
            raise failed.cause from failed
        raise WorkFailedError(f"the {name} failed: {last_line(failed)}") from failed
    except ActorUnavailableError:
        raise
    except RayActorError as lost:
        raise ProcessLostError(
            f"the {name} crashed repeatedly; last error: {first_line(lost)}. Start a node with more memory, then continue with "
            "--resume"
        ) from lost
