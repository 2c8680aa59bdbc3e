"""Expected seconds of a group's phases by number of workers: an estimate from its model's size, corrected by measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from distcse.experiments.mutual.max_workers import Parameters
from distcse.experiments.mutual.phases import Kind, Phase
from distcse.experiments.mutual.scheduling import StepTimes
from distcse.recipe import KINDS, GroupSection, LoopSection, MutualRecipe
from distcse.trainer.schedule import total_steps

_SECONDS_PER_PARAMETER = 4e-12
"""Assumed seconds of a pair's forward pass per parameter of a layer, until a group's first scores are measured. Until then only
ratios between groups matter, except next to the pause in which workers start."""
_TRAINING_PASSES = 3.0
"""Forward and backward pass of a training step over its forward pass."""
_UPDATE_PASSES = {"cpu": 1.7, "gpu": 27.0}
"""Optimizer's update per parameter, embeddings included, over a pair's forward pass per parameter of a layer: 1.5 to 1.9 on a CPU
core (MiniLM-L3, E5), 23 to 31 on an H100 (BERT-base; bi and cross steps of benchmarks/results)."""
_SERIAL_SHARE = 0.05
"""Assumed share of the passes that more workers do not shorten, until steps with several numbers of workers are measured. They do
not shorten the update."""


@dataclass
class PhaseCosts:
    """Expected seconds of one group's work.

    Attributes:
        steps: Training steps of a phase by formulation.
        times: Seconds of a training step by formulation.
        scoring_alone_s: Seconds of scoring all pairs with one worker, by formulation.
    """

    steps: Mapping[Kind, int]
    times: Mapping[Kind, StepTimes]
    scoring_alone_s: dict[Kind, float]
    _measured_steps: set[Kind] = field(default_factory=set)
    _measured_scores: set[Kind] = field(default_factory=set)

    @classmethod
    def of(
        cls, recipe: MutualRecipe, group: GroupSection, pairs: int, parameters: Parameters, on_gpu: bool
    ) -> PhaseCosts:
        """Estimate the costs of a group.

        Args:
            recipe: The run's recipe.
            group: The group.
            pairs: Number of pairs.
            parameters: Number of its model's parameters.
            on_gpu: Whether its workers have GPUs.
        """
        pair_s = _SECONDS_PER_PARAMETER * parameters.layers
        update_s = _UPDATE_PASSES["gpu" if on_gpu else "cpu"] * _SECONDS_PER_PARAMETER * parameters.all
        rows: dict[Kind, int] = {"bi": pairs, "cross": pairs * (2 if recipe.cross_of(group).both_orders else 1)}
        sections: dict[Kind, LoopSection] = {kind: recipe.loop_of(group, kind) for kind in KINDS}
        return cls(
            {kind: total_steps(loop, max(1, rows[kind] // loop.batch_size)) for kind, loop in sections.items()},
            {
                kind: _step_times(_TRAINING_PASSES * pair_s * loop.batch_size, update_s)
                for kind, loop in sections.items()
            },
            {kind: pair_s * pairs for kind in sections},
        )

    def seconds(self, phase: Phase, workers: int, done_steps: int = 0) -> float:
        """Return the expected seconds of a phase's rest after a number of training steps, scoring included."""
        return self.training_s(phase, workers, done_steps) + self.scoring_s(phase, workers)

    def training_s(self, phase: Phase, workers: int, done_steps: int = 0) -> float:
        """Return the expected seconds of the training that remains after a number of steps; 0 in phase 0."""
        if not phase.number:
            return 0.0
        return (self.steps[phase.kind] - done_steps) * self.times[phase.kind].seconds(workers)

    def scoring_s(self, phase: Phase, workers: int) -> float:
        """Return the expected seconds of scoring all pairs."""
        return self.scoring_alone_s[phase.kind] / workers

    def measure_step(self, phase: Phase, workers: int, seconds: float) -> None:
        """Record the mean seconds of recent training steps."""
        self.times[phase.kind].measure(workers, seconds)
        self._measured_steps.add(phase.kind)

    def measure_scores(self, phase: Phase, workers: int, seconds: float) -> None:
        """Record the seconds of scoring all pairs, and correct the estimates of what was not measured by their ratio."""
        ratio = seconds * workers / self.scoring_alone_s[phase.kind]
        for kind in self.steps:
            if kind == phase.kind or kind not in self._measured_scores:
                self.scoring_alone_s[kind] *= ratio
            if kind not in self._measured_steps and not self._measured_scores:
                self.times[kind].alone_s *= ratio
        self._measured_scores.add(phase.kind)


def _step_times(passes_s: float, update_s: float) -> StepTimes:
    """Estimate a step of forward and backward passes, and an update, with one worker each."""
    alone_s = passes_s + update_s
    return StepTimes(alone_s, (_SERIAL_SHARE * passes_s + update_s) / alone_s)
