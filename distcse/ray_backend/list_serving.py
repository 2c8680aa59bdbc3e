"""Decides, for `teachers.serve`, whether servers or the training workers compute the lists of teachers with tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distcse import host
from distcse.data import TokenTable
from distcse.errors import EncoderError
from distcse.events import LogMessage, Reporter
from distcse.experiments.distillation.batch_loader import TrainSpec
from distcse.experiments.distillation.teacher_clients import with_worker_tables
from distcse.placement.resources import Node, Resources
from distcse.planning.lengths import Lengths
from distcse.planning.machines import GPUS, Cluster, Machine, builtin_cpu
from distcse.planning.student import StudentRun, falls_behind
from distcse.planning.terms import ListSizes, served_seconds
from distcse.recipe import Recipe
from distcse.runs.directory import RunDirectory
from distcse.teachers.serving import cosine_tables
from distcse.teachers.table import EmbeddingTable

_NETWORK = 100e9 / 8
"""Bytes per second of a node's network: as the default of `distcse.plan`."""
_SMALL_S = 1e-3
"""Seconds of a server per step below which no step is estimated: a student's step takes several times as long."""
_LARGE = 1024
"""Dimension of the vectors of a large teacher, for a first estimate without its table."""
_UNKNOWN_GPU = "H100-80G"
"""GPU whose rates are taken where Ray does not name a known type: a fast one, for which servers fall behind soonest."""
_ACCELERATOR = "accelerator_type:"
"""Prefix of Ray's resource that names a node's type of GPU."""
_SAMPLE = 2000
"""Sentences whose lengths are read."""
_UNKNOWN_SIZES = (EncoderError, AttributeError, TypeError, ValueError, RuntimeError)
"""Errors of a model that can be trained, but whose sizes cannot be read: its config lacks a number of heads or layers
(Perceiver), its layers are not linear maps (GPT-2), or its own code does not run on PyTorch's meta device."""


def choose_serving(
    spec: TrainSpec,
    tables: Sequence[EmbeddingTable | None],
    per_worker: Resources,
    nodes: Sequence[Node],
    reporter: Reporter,
) -> TrainSpec:
    """Return the run with the tables that its workers read themselves, as `teachers.serve` says.

    `auto` compares the seconds that the servers need for a step's lists with those of the step, both as `distcse.plan`
    estimates them. The run's stored recipe gets the result, so that a resumed run keeps it: lists of workers and of servers
    differ by 1e-6.

    Args:
        spec: The run.
        tables: One per teacher; None for a live teacher.
        per_worker: CPUs and GPUs of a training worker.
        nodes: The nodes of the cluster.
        reporter: Receives the choice of `auto`.
    """
    recipe = spec.recipe
    section, computable = recipe.teachers, cosine_tables(recipe.teachers, tables)
    if section.serve == "worker":
        return with_worker_tables(spec, tables)
    uses_lists = recipe.objective.keys_that_need("lists", "clean_lists", active=True) or recipe.objective.custom
    if section.serve == "actor" or not computable or not uses_lists:
        return spec
    nodes = [node for node in nodes if node.has(recipe.training.node_labels)]
    machine, workers, batch = _machine(per_worker, nodes), recipe.training.workers, recipe.training.batch_size
    sizes = _list_sizes(recipe)
    served = served_seconds(machine, _NETWORK, [_LARGE] * len(computable), sizes, workers, section.num_servers)
    bound = "at most"
    if served > _SMALL_S:  # only then is a table opened: the driver would download a shard from object storage
        bound = "about"
        dimensions = [table.dimension for table in computable.values()]
        served = served_seconds(machine, _NETWORK, dimensions, sizes, workers, section.num_servers)
    chosen, reason = spec, f"they need {bound} {_ms(served)} per step"
    if served > _SMALL_S:
        cluster = Cluster("", len(nodes), math.ceil(workers / len(nodes)), machine, _NETWORK)
        lengths = _lengths(spec)
        try:
            run = StudentRun.of_fitted(recipe, lengths)
        except _UNKNOWN_SIZES as error:
            reason += f", of a step whose time cannot be estimated ({type(error).__name__}: {error})"
        else:
            busy = run.busy_seconds(cluster, workers, batch)
            reason += f", and a worker is busy for about {_ms(busy)}"
            chosen = with_worker_tables(spec, tables) if falls_behind(served, busy) else spec
    by = "the workers compute the lists of teachers with tables; servers would not keep ahead"
    by = by if chosen.worker_tables else "servers compute the teachers' lists"
    reporter.emit(LogMessage(f"teachers.serve auto: {by}: {reason}"))
    decided = _with_serving(recipe, chosen)
    RunDirectory(spec.run.path, spec.lease).decide(decided)
    return replace(chosen, recipe=decided)


def _with_serving(recipe: Recipe, chosen: TrainSpec) -> Recipe:
    """Return the recipe with the choice of `auto`; with one server per teacher where no teacher has any."""
    changes: dict[str, Any] = {"serve": "worker" if chosen.worker_tables else "actor"}
    if len(chosen.worker_tables) == len(recipe.teachers.encoders):
        changes["num_servers"] = 1
    return recipe.model_copy(update={"teachers": recipe.teachers.model_copy(update=changes)})


def _list_sizes(recipe: Recipe) -> ListSizes:
    batch, queue = recipe.training.batch_size, recipe.objective.queue
    queued = queue.num_batches * batch + queue.num_anchors if queue else 0
    return ListSizes(batch / recipe.training.workers, batch, queued, width=0)


def _lengths(spec: TrainSpec) -> Lengths:
    """Return the lengths of the run's tokenized sentences, of a sample in a large corpus."""
    tokens = TokenTable.open(spec.tokens.path)
    rows = np.unique(np.linspace(0, len(tokens) - 1, _SAMPLE).astype(np.int64))
    return Lengths(np.sort(tokens.lengths(rows)), len(tokens), "the run's tokens", bytes_per_row=0.0)


def _machine(per_worker: Resources, nodes: Sequence[Node]) -> Machine:
    """Return the rates of a worker's device, by the type of GPU that Ray names."""
    if not per_worker.get("GPU"):
        return builtin_cpu(max(1, int(per_worker["CPU"])), host.memory())
    named = [key.removeprefix(_ACCELERATOR) for node in nodes for key in node.resources if key.startswith(_ACCELERATOR)]
    known = [gpu for gpu in GPUS.values() if named and gpu.name.partition("-")[0] == named[0].partition("-")[0]]
    return known[0] if known else GPUS[_UNKNOWN_GPU]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2g} ms"
