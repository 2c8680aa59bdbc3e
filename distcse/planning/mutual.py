"""What a mutual distillation costs: training and scoring of every group in every phase, and the time that groups wait."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from distcse.errors import CorpusTooSmallError, DistcseError
from distcse.events import Reporter
from distcse.planning.costs import PROCESS, Pass, WorkerMemory, with_update
from distcse.planning.machines import Cluster
from distcse.planning.sizes import Lengths, Shape, assumed_lengths, read_lengths, read_shape
from distcse.recipe import KINDS, GroupSection, MutualRecipe
from distcse.runs.mutual.pairs import fit_to_pairs, temporary_pairs
from distcse.runs.mutual.phases import Kind, Phase, last_phase
from distcse.runs.mutual.processes import with_max_workers
from distcse.training.schedule import total_steps

_FILLED = 1.1
"""Tokens with padding over real ones: a batch is split into parts of similar length."""
_ASSUMED_PAIRS = 10_000
_DRIVER_BYTES_PER_PAIR = 145.0
"""Measured by benchmarks/million_pairs.py while pairs were written: 139 to 141 MiB for 1 million pairs, 426 to 555 MiB for 4."""


@dataclass(frozen=True)
class Stage:
    """Cost of one group in one phase."""

    group: str
    phase: str
    workers: int
    steps: int
    training: float
    """Seconds."""
    scoring: float
    """Seconds."""
    flops: float
    binding: str

    @property
    def seconds(self) -> float:
        """Seconds of training and scoring on the group's workers."""
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
        """Read the groups' shapes and the number of pairs: `rows`, or the recipe's, those of its files, or 10,000."""
        if recipe.pairs.mine is not None:
            lengths = read_lengths(recipe.pairs.mine.corpus, recipe.groups[0], None)
            pairs = rows or recipe.pairs.mine.pairs
        else:
            counted = _count_pairs(recipe)
            pairs = rows or counted or recipe.pairs.limit or _ASSUMED_PAIRS
            why = "pairs in files are not tokenised for a plan"
            why += "" if rows or counted else f"; {pairs:,} pairs assumed: give --corpus-rows"
            lengths = assumed_lengths(2 * pairs, why)
        recipe = fit_to_pairs(with_max_workers(recipe, Reporter()), pairs)
        shapes = [_shapes(group, recipe.cross_start(group)) for group in recipe.groups]
        return cls(recipe, cluster, shapes, lengths, pairs)

    @property
    def shared_workers(self) -> int | None:
        """Number of workers that all groups share; None if each has its own."""
        shared = self.recipe.mutual.shared_workers
        if shared is None or not self.recipe.ray:
            return None
        return self.cluster.devices if shared == "auto" else shared

    @property
    def devices(self) -> int:
        """Devices that work at the same time."""
        if not self.recipe.ray:
            return 1
        workers = sum(group.workers for group in self.recipe.groups)
        return self.shared_workers or min(workers, self.cluster.devices)

    @cached_property
    def stages(self) -> list[list[Stage]]:
        """Costs by phase, then by group: the start, then cross and bi of every cycle."""
        phases = [Phase(number) for number in range(last_phase(self.recipe.mutual.cycles).number + 1)]
        return [[self._stage(number, phase) for number in range(len(self.shapes))] for phase in phases]

    def _seconds_of(self, stages: list[Stage]) -> float:
        """Return the seconds of a phase: as long as its slowest group, and as all work on the devices that there are."""
        if not self.recipe.ray:
            return sum(stage.seconds for stage in stages)
        work = sum(stage.seconds * stage.workers for stage in stages)
        return max([work / self.devices, *(stage.seconds for stage in stages)])

    @property
    def seconds(self) -> float:
        """Seconds of the run. A phase begins when all groups have ended the one before."""
        return sum(map(self._seconds_of, self.stages))

    @property
    def idle(self) -> float:
        """Fraction of the devices' time in which they wait for the slowest group of a phase."""
        if not self.recipe.ray:
            return 0.0
        work = sum(stage.seconds * stage.workers for stages in self.stages for stage in stages)
        return max(0.0, 1 - work / (self.devices * self.seconds))

    @cached_property
    def memories(self) -> dict[str, dict[Kind, WorkerMemory]]:
        """Memory of a worker that trains a group's formulation, including the scorer process next to it."""
        return {
            group.name: {kind: self._memory(number, kind) for kind in KINDS}
            for number, group in enumerate(self.recipe.groups)
        }

    @property
    def driver_bytes(self) -> float:
        """Host memory of the driver that grows with the pairs: it finds duplicates among them. Scorers and trainers map files."""
        return _DRIVER_BYTES_PER_PAIR * self.pairs

    @cached_property
    def bytes_at_once(self) -> float:
        """Memory of all workers that run at the same time, which one machine holds."""
        needs = [max(held.total for held in kinds.values()) for kinds in self.memories.values()]
        if self.shared_workers is not None:
            return max(needs) * self.shared_workers
        each = [group.workers * need for group, need in zip(self.recipe.groups, needs, strict=True)]
        return sum(each) if self.recipe.ray else max(each)

    def _stage(self, number: int, phase: Phase) -> Stage:
        recipe, group, machine = self.recipe, self.recipe.groups[number], self.cluster.machine
        scoring = self._pass(number, phase.kind, self.pairs, False)
        scored = scoring.batched_seconds(machine) / group.workers
        if phase.number == 0:
            return Stage(group.name, phase.name, group.workers, 0, 0.0, scored, scoring.flops, "scoring")
        section = recipe.loop_of(group, phase.kind)
        rows = self.pairs * (2 if phase.kind == "cross" and recipe.cross_of(group).both_orders else 1)
        steps = total_steps(section, max(1, rows // section.batch_size))
        work = self._pass(number, phase.kind, section.batch_size / group.workers, True)
        step = with_update(work.terms(machine), work.shape.parameters, self.cluster, group.workers, section)
        flops, seconds = scoring.flops + steps * group.workers * work.flops, steps * step.seconds(machine.kind)
        return Stage(group.name, phase.name, group.workers, steps, seconds, scored, flops, step.binding)

    def _memory(self, number: int, kind: Kind) -> WorkerMemory:
        group, machine = self.recipe.groups[number], self.cluster.machine
        section = self.recipe.loop_of(group, kind)
        work = self._pass(number, kind, section.batch_size / group.workers, True)
        scorer = 4.0 * work.shape.parameters + (PROCESS if machine.kind == "cpu" else 0.0)
        activations = work.saved_bytes(machine.kind)
        return WorkerMemory.of(work.shape.parameters, section.zero_stage, group.workers, scorer, activations)

    def _pass(self, number: int, kind: Kind, pairs: float, training: bool) -> Pass:
        """Return a pass over pairs: a bi-encoder encodes each sentence, a cross-encoder both as one text."""
        group, shape = self.recipe.groups[number], self.shapes[number][kind]
        longest = self.recipe.cross_of(group).max_length if kind == "cross" else group.max_length or 512
        lengths = self.lengths if kind == "bi" else self.lengths.pairs()
        length = lengths.mean(longest) * (_FILLED if training else 1.0)
        precision = self.recipe.loop_of(group, kind).precision if training else self.recipe.mutual.precision
        return Pass(shape, 2 * pairs if kind == "bi" else pairs, length, training, precision)

    @property
    def described(self) -> dict[str, Any]:
        """The costs as a JSON object."""
        return {
            "recipe": self.recipe.name,
            "cluster": self.cluster.spec,
            "machine": self.cluster.machine.name,
            "constants": self.cluster.machine.source,
            "pairs": self.pairs,
            "lengths": self.lengths.source,
            "shared_workers": self.shared_workers,
            "seconds": self.seconds,
            "idle": self.idle,
            "phases": [[{**vars(stage), "seconds": stage.seconds} for stage in stages] for stages in self.stages],
            "memory": {
                name: {kind: memory.described for kind, memory in kinds.items()}
                for name, kinds in self.memories.items()
            },
            "driver_memory": self.driver_bytes,
        }


def _shapes(section: GroupSection, cross_start: str) -> dict[Kind, Shape]:
    """Read the shapes of a group's bi-encoder and of its cross-encoder, which reads the first token of `cross_start`."""
    cross = section.model_copy(update={"backbone": cross_start, "pooling": "cls"})
    return {"bi": read_shape(section), "cross": read_shape(cross)}


def _count_pairs(recipe: MutualRecipe) -> int | None:
    """Count the pairs in the recipe's files; None if they cannot be read. Raises `CorpusTooSmallError`."""
    try:
        with temporary_pairs(recipe) as pairs:
            return len(pairs)
    except CorpusTooSmallError:
        raise
    except DistcseError:
        return None
