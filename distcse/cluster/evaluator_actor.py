"""Dev scores in a separate actor during training: it has its own copy of the student and receives the weights to score.

Ray Train's validation function does not fit: it reads checkpoints from Ray Train's storage and returns the score to the
driver. Here checkpoints are in the run's folder, and the workers need the score for early stopping and their checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayTaskError

from distcse.cluster.assigned_resources import use_assigned
from distcse.cluster.event_channel import unique_name
from distcse.cluster.heartbeat import RESTARTABLE, HeartbeatActor, HeartbeatMonitor
from distcse.cluster.teacher_servers import RemoteTeacherClient
from distcse.devices.device import default_device
from distcse.devices.resources import ResourceRequest, format_resources
from distcse.errors import DistcseError, ProcessLostError, WorkFailedError, first_line, last_line
from distcse.events import Reporter, WaitWarning
from distcse.runs.distillation.batch_loader import BatchLoader, TrainSpec, teacher_clients
from distcse.runs.distillation.distillation_task import DistillationTask
from distcse.runs.distillation.processes import EVALUATOR_ALTERNATIVE
from distcse.training.checkpoint_files import ModelState

_POLL_S = 0.25


class EvaluatorActor(HeartbeatActor):
    """Ray actor that computes dev scores, with the teachers' servers of rank 0."""

    def __init__(self, spec: TrainSpec, servers: Mapping[int, Any]) -> None:
        use_assigned()
        self._spec, self._servers = spec, servers

    @cached_property
    def _task(self) -> DistillationTask:
        # Not in the constructor: heartbeats start after it, so a hang in loading would not be noticed.
        served = {number: RemoteTeacherClient(server, lambda _: None) for number, server in self._servers.items()}
        task = DistillationTask(self._spec, BatchLoader(self._spec, 0, 1), teacher_clients(self._spec, served))
        task.model.to(default_device()).eval()
        return task

    def score(self, weights: Mapping[str, NDArray[Any]]) -> float:
        """Return the dev score of the student with these weights."""
        self._task.model.load_state_dict({name: torch.from_numpy(np.array(weight)) for name, weight in weights.items()})
        return self._task.evaluate()


class RemoteEvaluator:
    """Rank 0's `AsyncEvaluator`: starts an `EvaluatorActor` for the first score; the actor ends with the worker.

    Inside its context, an unresponsive actor is restarted and its score computed again.

    Args:
        spec: The run.
        servers: The worker's server of each teacher, by the teacher's number.
        request: CPUs, GPUs and node labels of the actor.
        reporter: Receives a warning when the actor is unresponsive or waits; a stop request ends the wait for its node.
    """

    def __init__(
        self, spec: TrainSpec, servers: Mapping[int, Any], request: ResourceRequest, reporter: Reporter
    ) -> None:
        self._spec, self._servers, self._request = spec, servers, request
        self._monitor = HeartbeatMonitor(spec.recipe.teachers.heartbeat_timeout_s, reporter.warn)
        self._reporter = reporter
        self._actor: Any = None
        self._has_started: Any = None
        self._pending: Any = None

    def __enter__(self) -> RemoteEvaluator:
        self._monitor.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._monitor.__exit__(*raised)

    def begin(self, state: ModelState) -> None:
        if self._actor is None:
            self._actor = (
                ray.remote(**RESTARTABLE)(EvaluatorActor)
                .options(
                    name=f"dev-scores-{unique_name(self._spec.run.name)}",
                    num_cpus=self._request.each["CPU"],
                    num_gpus=self._request.each.get("GPU", 0.0),
                    label_selector=self._request.labels,
                )
                .remote(self._spec, self._servers)
            )
            self._has_started = self._actor.beat.remote()
            self._monitor.add("the dev-score evaluator", self._actor)
        weights = {name: weight.numpy() for name, weight in state.weights.items()}
        self._pending = self._actor.score.options(name="dev score").remote(weights)

    def is_ready(self) -> bool:
        return bool(ray.wait([self._pending], timeout=0)[0])

    def take(self) -> float:
        warning = WaitWarning(self._reporter)
        while not ray.wait([self._pending], timeout=_POLL_S)[0]:
            # One that computes is waited for: the checkpoint of a stop has its score.
            if not ray.wait([self._has_started], timeout=0)[0]:
                self._reporter.check_stop("while the dev-score evaluator waited for a node")
                warning.check(
                    f"the dev-score evaluator waits for a node with {format_resources(self._request.each)} free"
                )
        try:
            return float(ray.get(self._pending))
        except RayTaskError as failed:
            if isinstance(failed.cause, DistcseError):
                raise failed.cause from failed
            raise WorkFailedError(f"the dev score failed: {last_line(failed)}; {EVALUATOR_ALTERNATIVE}") from failed
        except RayActorError as lost:
            raise ProcessLostError(
                f"the dev-score evaluator crashed repeatedly: {first_line(lost)}; {EVALUATOR_ALTERNATIVE}"
            ) from lost
