"""Estimates a mutual distillation: training and scoring of every group in every phase, and the time that groups wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from distcse.errors import DistcseError
from distcse.events import Reporter
from distcse.experiments.mutual.max_workers import with_max_workers
from distcse.experiments.mutual.phases import Kind, Phase, last_phase
from distcse.experiments.mutual.resources import gpu_role
from distcse.experiments.mutual.scheduling import RemainingWork, makespan_bound, worker_counts
from distcse.placement.gpu_shares import share_gpus
from distcse.placement.resources import Node
from distcse.planning.lengths import Lengths, assumed_lengths, read_lengths
from distcse.planning.machines import Cluster
from distcse.planning.memory import FITS, WorkerMemory, gathered_bytes, states
from distcse.planning.network import Traffic, gradient_bytes, waited_seconds
from distcse.planning.passes import Pass, Terms, is_recorded, with_update
from distcse.planning.plan import gib
from distcse.planning.shapes import Shape, read_shape
from distcse.recipe import GroupSection, LoopSection, MutualRecipe
from distcse.trainer.schedule import total_steps

_KINDS: tuple[Kind, Kind] = ("cross", "bi")
_FILLED = 1.1
"""Tokens with padding over real ones: a batch is split into parts of similar length."""
_ASSUMED_PAIRS = 10_000
_DRIVER_BYTES_PER_PAIR = 145.0
"""Measured by benchmarks/million_pairs.py while pairs were written: 139 to 141 MiB for 1 million pairs, 426 to 555 MiB for 4."""


@dataclass(frozen=True)
class GroupPhaseCost:
    """Cost of one group in one phase."""

    group: str
    phase: str
    steps: int
    training: float
    """Seconds."""
    scoring: float
    """Seconds."""
    flops: float
    binding: str

    @property
    def seconds(self) -> float:
        """Seconds of training and scoring."""
        return self.training + self.scoring


@dataclass(frozen=True)
class MutualPlan:
    """Estimated cost of all groups over all cycles on a cluster."""

    recipe: MutualRecipe
    cluster: Cluster
    shapes: list[dict[Kind, Shape]]
    """Shapes of each group's bi-encoder and cross-encoder."""
    lengths: Lengths
    pairs: int

    @classmethod
    def of(cls, recipe: MutualRecipe, cluster: Cluster, rows: int | None) -> MutualPlan:
        """Read the groups' shapes and the number of pairs.

        Args:
            recipe: The recipe.
            cluster: Where it would run.
            rows: Number of pairs; None takes the recipe's, counts those of its files, or assumes 10,000.
        """
        if recipe.pairs.mine is not None:
            lengths = read_lengths(recipe.pairs.mine.corpus, recipe.groups[0], None)
            pairs = rows or recipe.pairs.mine.pairs
        else:
            counted = _count_pairs(recipe)
            pairs = rows or counted or recipe.pairs.limit or _ASSUMED_PAIRS
            why = "pairs in files are not tokenised for a plan"
            why += "" if rows or counted else f"; {pairs:,} pairs assumed: give --corpus-rows"
            lengths = assumed_lengths(2 * pairs, why)
        recipe = with_max_workers(recipe, Reporter())
        shapes = [_shapes(group, recipe.cross_start(group)) for group in recipe.groups]
        return cls(recipe, cluster, shapes, lengths, pairs)

    @property
    def side_by_side(self) -> bool:
        """Whether all groups run at the same time, each on its own devices."""
        return (
            self.recipe.ray
            and self.shared_workers is None
            and self.cluster.devices >= sum(group.workers for group in self.recipe.groups)
        )

    @property
    def shares_devices(self) -> bool:
        """Whether all groups run at the same time on fewer devices than workers, each on a share of them."""
        return self._lacks_devices and not self._without_gpu

    @property
    def _lacks_devices(self) -> bool:
        return self.recipe.ray and self.shared_workers is None and not self.side_by_side

    @cached_property
    def _without_gpu(self) -> list[str]:
        """Groups that get no GPU where there are too few, as a run shares them out."""
        if not self._lacks_devices or self.cluster.machine.kind == "cpu":
            return []
        groups, each = self.recipe.groups, {"GPU": float(self.cluster.per_node)}
        nodes = [Node(str(number), each, {}) for number in range(self.cluster.nodes)]
        # Nodes have no labels here: those of the recipe are left out.
        roles = [replace(gpu_role(self.recipe, number), labels=None) for number in range(len(groups))]
        return [group.name for group, share in zip(groups, share_gpus(roles, nodes), strict=True) if not share]

    @property
    def shared_workers(self) -> int | None:
        """Number of workers that all groups share; None if each has its own."""
        shared = self.recipe.mutual.shared_workers
        if shared is None or not self.recipe.ray:
            return None
        return self.cluster.devices if shared == "auto" else shared

    @cached_property
    def stages(self) -> list[list[GroupPhaseCost]]:
        """Costs by phase, then by group: the start, then cross and bi of every cycle."""
        groups = self.recipe.groups
        return [[self._stage(n, phase, group.workers) for n, group in enumerate(groups)] for phase in self._phases]

    @property
    def seconds(self) -> float:
        """Seconds of the run: a phase takes as long as its slowest group, or as all groups together if they take turns.

        With shared workers, it takes as long as `makespan_bound`, which leaves out the start of workers.
        """
        if self.shared_workers is not None:
            return sum(self._shared_seconds(phase, self.shared_workers) for phase in self._phases)
        combine = max if self.side_by_side or self.shares_devices else sum
        return sum(combine(ends) for ends in self._ends)

    @property
    def idle(self) -> float:
        """Fraction of the groups' time spent waiting for other groups, or of the shared workers' time without work."""
        if self.shared_workers is not None:
            worked = sum(stage.seconds for stages in self.stages for stage in stages)
            return max(0.0, 1 - worked / (self.shared_workers * self.seconds))
        if not (self.side_by_side or self.shares_devices):
            return 0.0
        return 1 - sum(sum(ends) for ends in self._ends) / (len(self.shapes) * self.seconds)

    @cached_property
    def memories(self) -> dict[str, dict[Kind, WorkerMemory]]:
        """Memory of a worker that trains a group's formulation, including the scorer process next to it."""
        return {
            group.name: {kind: self._memory(number, kind) for kind in _KINDS}
            for number, group in enumerate(self.recipe.groups)
        }

    @property
    def driver_bytes(self) -> float:
        """Host memory of the driver that grows with the pairs: it finds duplicates among them. Scorers and trainers map files."""
        return _DRIVER_BYTES_PER_PAIR * self.pairs

    @cached_property
    def problems(self) -> list[str]:
        """Reasons why the plan cannot run, and how to fix them."""
        machine, found = self.cluster.machine, []
        totals = {name: {kind: held.total for kind, held in kinds.items()} for name, kinds in self.memories.items()}
        for group, (name, kinds) in zip(self.recipe.groups, totals.items(), strict=True):
            found += [
                f"group {name} needs {gib(need)} for its {kind}-encoder, more than {machine.name} has; "
                f"lower {self.recipe.loop_path(group, kind)}.batch_size, or raise workers of the group"
                for kind, need in kinds.items()
                if need > FITS * machine.memory
            ]
        if machine.kind == "cpu" and self.cluster.nodes == 1 and not found:
            # One machine holds all groups that run at the same time.
            workers = [max(totals[group.name].values()) for group in self.recipe.groups]
            each = [group.workers * need for group, need in zip(self.recipe.groups, workers, strict=True)]
            need = sum(each) if self.side_by_side or self.shares_devices else max(each)
            if self.shared_workers is not None:
                need = max(workers) * self.shared_workers
            if need > FITS * machine.memory:
                found.append(
                    f"all groups need {gib(need)} together, more than {machine.name} has; lower cross.batch_size and "
                    "bi.batch_size, or write ray=false: one group runs after the other"
                )
        if self._without_gpu:
            found.append(
                f"no GPU is left for {' and '.join(self._without_gpu)}, which would train on CPUs; lower groups.N.workers, or "
                "write mutual.shared_workers: auto, with which groups take turns"
            )
        if machine.kind != "cpu" and self.shares_devices and not found:
            needs = [max(totals[group.name].values()) for group in self.recipe.groups]
            need = max(sum(needs[number] for number in device) for device in placed(needs, self.cluster.devices))
            if need > FITS * machine.memory:
                found.append(
                    f"groups that share a {machine.name} need {gib(need)} of it together, more than it has; write "
                    "mutual.shared_workers: auto, with which they take turns, or lower cross.batch_size and bi.batch_size"
                )
        path, largest = max(
            ((self.recipe.loop_path(group, "bi"), self.recipe.bi_of(group).batch_size) for group in self.recipe.groups),
            key=lambda loop: loop[1],
        )
        if self.driver_bytes > FITS * machine.host_memory:
            found.append(
                f"the driver needs {gib(self.driver_bytes)} for {self.pairs:,} pairs, more than a host has; write pairs.limit"
            )
        if self.pairs < largest:
            found.append(f"{self.pairs:,} pairs are fewer than one batch; lower {path}.batch_size, or give more pairs")
        return found

    @property
    def described(self) -> dict[str, Any]:
        """The plan as a JSON object."""
        return {
            "recipe": self.recipe.name,
            "cluster": self.cluster.spec,
            "machine": self.cluster.machine.name,
            "constants": self.cluster.machine.source,
            "pairs": self.pairs,
            "lengths": self.lengths.source,
            "side_by_side": self.side_by_side,
            "shares_devices": self.shares_devices,
            "shared_workers": self.shared_workers,
            "seconds": self.seconds,
            "idle": self.idle,
            "phases": [[{**vars(stage), "seconds": stage.seconds} for stage in stages] for stages in self.stages],
            "memory": {
                name: {kind: memory.described for kind, memory in kinds.items()}
                for name, kinds in self.memories.items()
            },
            "driver_memory": self.driver_bytes,
            "problems": self.problems,
        }

    @cached_property
    def _ends(self) -> list[list[float]]:
        """Seconds after which each group ends each phase, from the phase's beginning."""
        if not self.shares_devices:
            return [[stage.seconds for stage in stages] for stages in self.stages]
        return [self._shared_ends([stage.seconds for stage in stages]) for stages in self.stages]

    def _shared_ends(self, seconds: Sequence[float]) -> list[float]:
        """Return when the groups end a phase whose workers share devices: a group ends with its last worker."""
        owners = [number for number, group in enumerate(self.recipe.groups) for _ in range(group.workers)]
        ends = shared_ends([seconds[owner] for owner in owners], self.cluster.devices)
        return [
            max(end for owner, end in zip(owners, ends, strict=True) if owner == number)
            for number in range(len(seconds))
        ]

    @property
    def _phases(self) -> list[Phase]:
        return [Phase(number) for number in range(last_phase(self.recipe.mutual.cycles).number + 1)]

    def _shared_seconds(self, phase: Phase, slots: int) -> float:
        """Return the seconds of a phase in which groups share workers."""
        work = [
            RemainingWork(
                group.name,
                {
                    count: self._stage(number, phase, count).seconds
                    for count in worker_counts(group.rng_streams, max(slots, group.workers), group.workers)
                },
            )
            for number, group in enumerate(self.recipe.groups)
        ]
        return makespan_bound(work, slots)

    def _stage(self, number: int, phase: Phase, workers: int) -> GroupPhaseCost:
        scoring, group = self._pass(number, phase.kind, self.pairs, False), self.recipe.groups[number]
        scored = scoring.batched_seconds(self.cluster.machine) / workers
        if phase.number == 0:
            return GroupPhaseCost(group.name, phase.name, 0, 0.0, scored, scoring.flops, "scoring")
        section = self.recipe.loop_of(group, phase.kind)
        rows = self.pairs * (2 if phase.kind == "cross" and self.recipe.cross_of(group).both_orders else 1)
        steps = total_steps(section, max(1, rows // section.batch_size))
        work = self._pass(number, phase.kind, section.batch_size / workers, True)
        recorded = group.rng_streams == 1 and is_recorded(
            self.cluster.machine, workers, work.shape, section.cuda_graphs, section.changes_to_record
        )
        step = self._step(work, section, workers, recorded)
        flops, seconds = scoring.flops + steps * workers * work.flops, steps * step.seconds(work.kind)
        return GroupPhaseCost(group.name, phase.name, steps, seconds, scored, flops, step.binding)

    def _step(self, work: Pass, section: LoopSection, workers: int, recorded: bool) -> Terms:
        machine, trained = self.cluster.machine, work.shape.parameters
        total = with_update(work.terms(machine), machine, trained, workers, section, recorded)
        sent = Traffic(gradient_bytes(trained, workers, section))
        seconds, accumulation = total.seconds(machine.kind), section.gradient_accumulation
        return total + Terms(network=waited_seconds(sent, workers, self.cluster, seconds, accumulation))

    def _memory(self, number: int, kind: Kind) -> WorkerMemory:
        group, machine = self.recipe.groups[number], self.cluster.machine
        section, workers = self.recipe.loop_of(group, kind), group.workers
        work = self._pass(number, kind, section.batch_size / workers, True)
        parameters, stage, on_cpu = work.shape.parameters, section.zero_stage, machine.kind == "cpu"
        scorer = 4.0 * parameters + (machine.process if on_cpu else 0.0)
        checkpoint = gathered_bytes(parameters, stage) if on_cpu else 0.0
        activations = work.saved_bytes + work.backward_bytes
        return WorkerMemory(stage, states(parameters, stage, workers), scorer, activations, machine.process, checkpoint)

    def _pass(self, number: int, kind: Kind, pairs: float, training: bool) -> Pass:
        """Return a pass over pairs: a bi-encoder encodes each sentence, a cross-encoder both as one text."""
        group, shape = self.recipe.groups[number], self.shapes[number][kind]
        longest = self.recipe.cross_of(group).max_length if kind == "cross" else group.max_length or 512
        lengths = self.lengths if kind == "bi" else self.lengths.pairs()
        length = lengths.mean(longest) * (_FILLED if training else 1.0)
        precision = self.recipe.loop_of(group, kind).precision if training else self.recipe.mutual.precision
        dropout = training and (shape.has_dropout if group.dropout is None else group.dropout > 0)
        texts = 2 * pairs if kind == "bi" else pairs
        return Pass(shape, texts, length, training, precision, dropout, self.cluster.machine.kind)


def placed(sizes: Sequence[float], devices: int) -> list[list[int]]:
    """Place each size on the device that holds the least so far, the largest first; return the places' numbers by device."""
    held = [0.0] * devices
    found: list[list[int]] = [[] for _ in range(devices)]
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        device = held.index(min(held))
        held[device] += sizes[number]
        found[device].append(number)
    return found


def shared_ends(seconds: Sequence[float], devices: int) -> list[float]:
    """Return when works end that share devices evenly, from the seconds that each would take alone."""
    ends = [0.0] * len(seconds)
    for device in placed(seconds, devices):
        for number in device:
            ends[number] = sum(min(seconds[other], seconds[number]) for other in device)
    return ends


def _shapes(section: GroupSection, cross_start: str) -> dict[Kind, Shape]:
    """Read the shapes of a group's bi-encoder and of its cross-encoder, which reads the first token of `cross_start`."""
    cross = section.model_copy(update={"backbone": cross_start, "pooling": "cls"})
    return {"bi": read_shape(section), "cross": read_shape(cross)}


def _count_pairs(recipe: MutualRecipe) -> int | None:
    """Count the pairs in the recipe's files; None if they cannot be read."""
    from distcse.experiments.mutual.pairs import temporary_pairs

    try:
        with temporary_pairs(recipe) as pairs:
            return len(pairs)
    except DistcseError:
        return None
