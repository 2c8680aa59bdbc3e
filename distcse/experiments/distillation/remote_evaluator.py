"""Dev scores beside the training: an actor has a student of its own, and is sent the weights that are to be scored.

Ray Train's validation function would be given a checkpoint's folder, which a run of ours keeps where its recipe says and
not where Ray Train does, and its score would come to the driver, where nobody waits for it: the workers stop early by it, and
have it in their checkpoints.
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

from distcse.device import default_device
from distcse.errors import DistcseError, ProcessLostError, WorkFailedError
from distcse.events import Reporter
from distcse.experiments.distillation.batch_loader import BatchLoader, TrainSpec
from distcse.experiments.distillation.task import DistillationTask
from distcse.ray_backend.event_channel import unique_name
from distcse.ray_backend.nodes import ResourceRequest
from distcse.recipe import Recipe
from distcse.teachers.heartbeat import RESTARTABLE, HeartbeatActor
from distcse.teachers.servers import RemoteTeacherClient, guarded, use_assigned_gpus, use_assigned_threads
from distcse.trainer.checkpoints import ModelState

_INSTEAD = "evaluation.async_eval=null scores in the workers"


class EvaluatorActor(HeartbeatActor):
    """Scores students; an actor. Its servers are those of the first worker."""

    def __init__(self, spec: TrainSpec, servers: Mapping[int, Any]) -> None:
        use_assigned_gpus()
        use_assigned_threads()
        self._job, self._servers = spec, servers

    @cached_property
    def _task(self) -> DistillationTask:
        # Not in the constructor: loading can hang too, and before it ends there is no pulse to feel.
        sources = [RemoteTeacherClient(server, lambda _: None) for server in self._servers.values()]
        task = DistillationTask(self._job, BatchLoader(self._job, 0, 1), sources)
        task.model.to(default_device()).eval()
        return task

    def score(self, weights: Mapping[str, NDArray[Any]]) -> float:
        """Dev score of the student with these weights."""
        self._task.model.load_state_dict({name: torch.from_numpy(np.array(w)) for name, w in weights.items()})
        return self._task.evaluate()


class RemoteEvaluator:
    """The first worker's `AsyncEvaluator`: an actor that is started for the first score, and ends with the worker.

    One that hangs is replaced while this is entered, and its score made again.

    Args:
        job: The run.
        servers: The worker's server of each teacher, by the teacher's number.
        reporter: Receives a warning when the actor is unresponsive.
    """

    def __init__(self, spec: TrainSpec, servers: Mapping[int, Any], reporter: Reporter) -> None:
        self._job, self._servers = spec, servers
        self._guard = guarded(spec.recipe.teachers, reporter)
        self._judge: Any = None
        self._answer: Any = None

    def __enter__(self) -> RemoteEvaluator:
        self._guard.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._guard.__exit__(*raised)

    def begin(self, state: ModelState) -> None:
        if self._judge is None:
            (demand,) = evaluator_requests(self._job.recipe)
            self._judge = (
                ray.remote(**RESTARTABLE)(EvaluatorActor)
                .options(
                    name=f"dev-scores-{unique_name(self._job.run.name)}",
                    num_cpus=demand.each["CPU"],
                    num_gpus=demand.each["GPU"],
                    label_selector=demand.labels,
                )
                .remote(self._job, self._servers)
            )
            self._guard.add("the process of the dev scores", self._judge)
        weights = {name: weight.numpy() for name, weight in state.weights.items()}
        self._answer = self._judge.score.options(name="dev score").remote(weights)

    def is_ready(self) -> bool:
        return bool(ray.wait([self._answer], timeout=0)[0])

    def take(self) -> float:
        try:
            return float(ray.get(self._answer))
        except RayTaskError as failed:
            if isinstance(failed.cause, DistcseError):
                raise failed.cause from failed
            raise WorkFailedError(
                f"the dev score failed: {str(failed).strip().splitlines()[-1]}; {_INSTEAD}"
            ) from failed
        except RayActorError as lost:
            told = str(lost).strip().splitlines()[0]
            raise ProcessLostError(
                f"the process of the dev scores was lost again and again: {told}; {_INSTEAD}"
            ) from lost


def evaluator_requests(recipe: Recipe) -> list[ResourceRequest]:
    """What dev scores beside the training take; nothing where the workers make them."""
    section = recipe.evaluation.async_eval
    if section is None:
        return []
    smaller = {"CPU": "evaluation.async_eval.cpus", "GPU": "evaluation.async_eval.gpus"}
    each = {"CPU": section.cpus, "GPU": section.gpus or 0.0}
    return [
        ResourceRequest(
            "evaluation.async_eval", 1, each, recipe.training.node_labels, "training.workers", smaller, _INSTEAD
        )
    ]
