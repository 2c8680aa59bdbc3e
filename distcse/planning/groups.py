"""Estimates a mutual distillation: training and scoring of every group in every phase, and the time that groups wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distcse.errors import DistcseError
from distcse.experiments.mutual.phases import Kind, Phase, last_phase
from distcse.planning.lengths import Lengths, assumed_lengths, read_lengths
from distcse.planning.machines import STEP_HOST, Cluster
from distcse.planning.memory import WorkerMemory, activation_bytes, backward_bytes, gathered_bytes, states
from distcse.planning.network import BACKWARD_SHARE, Traffic, gradient_bytes, hidden_seconds, transfer_seconds
from distcse.planning.passes import Pass, Terms
from distcse.planning.plan import Problem
from distcse.planning.shapes import Shape, read_shape
from distcse.recipe import EncoderSection, GroupSection, LoopSection, MutualRecipe
from distcse.trainer.schedule import total_steps

_ADAMW_BYTES = 40.0
"""Bytes that an AdamW update reads and writes per parameter."""
_FILLED = 1.1
"""Tokens with padding over real ones: a batch is split into parts of similar length."""
_EAGER_BELOW = 128
"""Tokens below which attention on a CPU is eager."""
_ASSUMED_PAIRS = 10_000


@dataclass(frozen=True)
class GroupRun:
    """A group and the shapes of its bi-encoder and its cross-encoder."""

    section: GroupSection
    bi: Shape
    cross: Shape

    @classmethod
    def of(cls, section: GroupSection, cross_start: str) -> GroupRun:
        """Read both shapes, each from its model's config.json.

        Args:
            section: The group.
            cross_start: The model from which its first cross-encoder starts.
        """
        bi = read_shape(section)
        if cross_start == section.backbone:
            return cls(section, bi, bi)
        cross = EncoderSection(backbone=cross_start, trust_remote_code=section.trust_remote_code)
        shape = read_shape(cross.with_switch(section.is_fast))
        return cls(section, bi, shape.with_depth(len(section.named_layers)) if section.named_layers else shape)


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
    groups: list[GroupRun]
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
        first = recipe.groups[0]
        if recipe.pairs.mine is not None:
            lengths = read_lengths(recipe.pairs.mine.corpus, first, None)
            pairs = rows or recipe.pairs.mine.pairs
        else:
            counted = _count_pairs(recipe)
            pairs = rows or counted or recipe.pairs.limit or _ASSUMED_PAIRS
            why = "pairs in files are not tokenised for a plan"
            why += "" if rows or counted else f"; {pairs:,} pairs assumed: give --corpus-rows"
            lengths = assumed_lengths(2 * pairs, why)
        return cls(
            recipe, cluster, [GroupRun.of(group, recipe.cross_start(group)) for group in recipe.groups], lengths, pairs
        )

    @property
    def side_by_side(self) -> bool:
        """Whether all groups run at the same time, each on its own devices."""
        return self.recipe.ray and self.cluster.devices >= sum(group.section.workers for group in self.groups)

    @property
    def stages(self) -> list[list[GroupPhaseCost]]:
        """Costs by phase, then by group: the start, then cross and bi of every cycle."""
        phases = [Phase(number) for number in range(last_phase(self.recipe.mutual.cycles).number + 1)]
        return [[self._stage(group, phase) for group in self.groups] for phase in phases]

    @property
    def seconds(self) -> float:
        """Seconds of the run: a phase takes as long as its slowest group, or as all groups together without side_by_side."""
        combine = max if self.side_by_side else sum
        return sum(combine(stage.seconds for stage in stages) for stages in self.stages)

    @property
    def idle(self) -> float:
        """Fraction of the groups' time spent waiting for other groups."""
        if not self.side_by_side:
            return 0.0
        worked = sum(stage.seconds for stages in self.stages for stage in stages)
        return 1 - worked / (len(self.groups) * self.seconds)

    def memory(self, group: GroupRun, kind: Kind) -> WorkerMemory:
        """Memory of a worker that trains this formulation, including the scorer process next to it."""
        section, machine = self._section(kind), self.cluster.machine
        work = self._pass(group, kind, section.batch_size / group.section.workers, True)
        shape = work.shape
        stage, on_cpu = section.zero_stage, machine.kind == "cpu"
        eager = on_cpu and self._longest(group, kind) < _EAGER_BELOW
        activations = activation_bytes(work, machine.kind, eager) * machine.activation_share + backward_bytes(work)
        scorer = 4.0 * shape.parameters + (machine.process if on_cpu else 0.0)
        checkpoint = gathered_bytes(shape.parameters, stage) if on_cpu else 0.0
        kept_states = states(shape.parameters, stage, group.section.workers)
        return WorkerMemory(stage, kept_states, scorer, activations, machine.process, checkpoint)

    @property
    def problems(self) -> list[Problem]:
        """Reasons why the plan cannot run."""
        machine, found = self.cluster.machine, []
        for group in self.groups:
            for kind in ("cross", "bi"):
                need = self.memory(group, kind).total
                if need > 0.92 * machine.memory:
                    name = group.section.name
                    what = f"group {name} needs {need / 2**30:,.2f} GiB for its {kind}-encoder, more than {machine.name} has"
                    found.append(Problem(what, f"lower {kind}.batch_size, or raise workers of the group"))
        if machine.kind == "cpu" and self.cluster.nodes == 1:
            # One machine holds all groups that run at the same time.
            each = [
                group.section.workers * max(self.memory(group, kind).total for kind in ("cross", "bi"))
                for group in self.groups
            ]
            need = sum(each) if self.side_by_side else max(each)
            if need > 0.92 * machine.memory and not found:
                what = f"all groups need {need / 2**30:,.2f} GiB together, more than {machine.name} has"
                found.append(
                    Problem(
                        what,
                        "lower cross.batch_size and bi.batch_size, or write ray=false: one group runs after the other",
                    )
                )
        if self.pairs < self.recipe.bi.batch_size:
            found.append(
                Problem(f"{self.pairs:,} pairs are fewer than one batch", "lower bi.batch_size, or give more pairs")
            )
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
            "seconds": self.seconds,
            "idle": self.idle,
            "phases": [[{**vars(stage), "seconds": stage.seconds} for stage in stages] for stages in self.stages],
            "memory": {
                group.section.name: {kind: self.memory(group, kind).described for kind in ("bi", "cross")}
                for group in self.groups
            },
            "problems": [str(problem) for problem in self.problems],
        }

    def _stage(self, group: GroupRun, phase: Phase) -> GroupPhaseCost:
        scoring = self._pass(group, phase.kind, self.pairs, False)
        workers, machine = group.section.workers, self.cluster.machine
        scored = scoring.batched_seconds(machine) / workers
        if phase.number == 0:
            return GroupPhaseCost(group.section.name, phase.name, 0, 0.0, scored, scoring.flops, "scoring")
        section = self._section(phase.kind)
        rows = self.pairs * (2 if phase.kind == "cross" and self.recipe.cross.both_orders else 1)
        steps = total_steps(section, max(1, rows // section.batch_size))
        work = self._pass(group, phase.kind, section.batch_size / workers, True)
        step = self._step(work, section, workers)
        flops = scoring.flops + steps * workers * work.flops
        return GroupPhaseCost(
            group.section.name, phase.name, steps, steps * step.seconds(machine.kind), scored, flops, step.binding
        )

    def _step(self, work: Pass, section: LoopSection, workers: int) -> Terms:
        machine, trained = self.cluster.machine, work.shape.parameters
        share = workers if section.zero_stage else 1
        moved = _ADAMW_BYTES * trained / share / section.gradient_accumulation
        sent = Traffic(gradient_bytes(trained, workers, section), 0.0, 0.0)
        total = work.terms(machine) + Terms(traffic=moved / (machine.optimizer or machine.bandwidth))
        if machine.kind == "gpu":
            total += Terms(host=STEP_HOST)
        backward = BACKWARD_SHARE * total.seconds(machine.kind) / section.gradient_accumulation
        waited = transfer_seconds(sent, workers, self.cluster) - hidden_seconds(sent, workers, self.cluster, backward)
        return total + Terms(network=waited)

    def _pass(self, group: GroupRun, kind: Kind, pairs: float, training: bool) -> Pass:
        """Passes over pairs: a bi-encoder encodes each sentence, a cross-encoder both as one text."""
        shape = group.bi if kind == "bi" else group.cross
        lengths = self.lengths if kind == "bi" else self.lengths.pairs()
        length = lengths.mean(self._longest(group, kind)) * (_FILLED if training else 1.0)
        texts = 2 * pairs if kind == "bi" else pairs
        precision = self._section(kind).precision if training else self.recipe.mutual.precision
        probability = shape.dropout if group.section.dropout is None else group.section.dropout
        dropout = training and probability > 0
        return Pass(shape, texts, length, training, precision, dropout)

    def _longest(self, group: GroupRun, kind: Kind) -> int:
        return self.recipe.cross.max_length if kind == "cross" else group.section.max_length or 512

    def _section(self, kind: Kind) -> LoopSection:
        return self.recipe.bi if kind == "bi" else self.recipe.cross


def _count_pairs(recipe: MutualRecipe) -> int | None:
    """Count the pairs in the recipe's files; None if they cannot be read."""
    from distcse.experiments.mutual.pairs import read_pairs

    try:
        return len(read_pairs(recipe))
    except DistcseError:
        return None
