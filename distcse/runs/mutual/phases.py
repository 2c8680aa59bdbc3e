"""The phases of a mutual distillation, in order: the start, then cross and bi in each cycle; and a group's part of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from distcse.recipe import GroupSection, LoopSection, MutualRecipe
from distcse.storage import ArtifactStore
from distcse.text import Pairs
from distcse.training.dropout_rng import dropout_seed

Kind = Literal["bi", "cross"]


@dataclass(frozen=True, order=True)
class Phase:
    """A phase of a run, by its number.

    Phase 0 scores with the initial bi-encoders. Phase 1 trains the cross-encoders of cycle 1, phase 2 its bi-encoders, phase 3
    the cross-encoders of cycle 2, and so on. The scores of phase n, combined over the groups, are the labels of phase n + 1.
    """

    number: int

    @property
    def kind(self) -> Kind:
        """The formulation that is trained in the phase and then scores the pairs."""
        return "cross" if self.number % 2 else "bi"

    @property
    def cycle(self) -> int:
        """Number of the cycle, from 1; phase 0 belongs to cycle 0."""
        return (self.number + 1) // 2

    @property
    def name(self) -> str:
        """Name in folders and messages, such as `cycle-1-cross`."""
        return f"cycle-{self.cycle}-{self.kind}" if self.number else "start"

    @property
    def ends_cycle(self) -> bool:
        """Whether the phase is the last of its cycle."""
        return self.number > 0 and self.kind == "bi"


def last_phase(cycles: int) -> Phase:
    """Return the last phase of a run of `cycles` cycles."""
    return Phase(2 * cycles)


TokenStores = Mapping[Kind, ArtifactStore]
"""The folders of a group's token tables: a `TokenTable` of the sentences, and a `PairTokenTable`."""


@dataclass(frozen=True)
class PhaseResult:
    """Result of the training in a phase."""

    model: str
    """Folder of the best model."""
    step: int
    """Step of the best model."""
    dev: float | None
    """Dev score of the best model; None without dev pairs."""
    steps: int
    """Number of training steps."""


@dataclass(frozen=True)
class GroupContext:
    """The inputs of a group's trainer or scorer. The run's folder is on storage that all of them see, guarded by its lease."""

    recipe: MutualRecipe
    number: int
    """Index of the group in the recipe."""
    run: ArtifactStore
    tokens: TokenStores
    """The group's token tables."""

    @property
    def group(self) -> GroupSection:
        """The group's section of the recipe."""
        return self.recipe.groups[self.number]

    @property
    def pairs(self) -> Pairs:
        """The run's pairs."""
        return Pairs.open((self.run / "pairs").path)

    def folder(self, phase: Phase) -> Path:
        """Return the folder of a phase of this group."""
        return self.run.path / "groups" / self.group.name / phase.name

    def section(self, kind: Kind) -> LoopSection:
        """Return the group's training settings of a formulation."""
        return self.recipe.loop_of(self.group, kind)

    def seed(self, phase: Phase) -> int:
        """Return the seed of new weights, row order and dropout, different for each group and phase."""
        return dropout_seed(self.recipe.seed, phase.number, self.number) % 2**31
