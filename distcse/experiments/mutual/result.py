"""The result of a mutual distillation, and the model cards of its groups' best models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from distcse.evaluation import Evaluation
from distcse.experiments.experiment import ReferenceModel
from distcse.experiments.model_card import ModelCard, hub_metadata, limits, usage
from distcse.experiments.mutual.phases import Kind, Phase
from distcse.model_source import shown_name
from distcse.recipe import MutualRecipe
from distcse.runs.directory import RunDirectory
from distcse.storage import to_uri

_USE_BI = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
vectors = model.encode(["A sentence.", "Another one."])"""
_USE_CROSS = """from sentence_transformers import CrossEncoder

model = CrossEncoder("path/to/this/folder")
scores = model.predict([("A sentence.", "Another one.")])"""


@dataclass(frozen=True)
class Best:
    """The best model of one group and formulation over all cycles."""

    group: str
    kind: Kind
    phase: Phase
    """The phase that trained the model; phase 0 for a bi-encoder that is the group's start (`mutual.best_of`)."""
    dev: float | None
    """Its dev score; None without dev pairs."""
    model: Path
    """Its folder."""

    @property
    def is_start(self) -> bool:
        """Whether it is the group's initial bi-encoder, unchanged."""
        return not self.phase.number


@dataclass(frozen=True)
class MutualResult:
    """Result of a mutual distillation (see `Result`)."""

    recipe: MutualRecipe
    directory: RunDirectory
    best: list[Best]
    """The best models; empty if the run was interrupted before the last phase ended."""
    dropped: dict[str, str]
    """Groups that failed and were dropped, with the reason."""
    pairs: int
    """Number of pairs."""
    interrupted: bool
    """Whether the run was asked to stop before its end."""
    evaluation: Evaluation | None
    """Evaluation of initial and best models, without those that a stop left out; None if nothing was measured."""

    @property
    def models(self) -> dict[str, Path]:
        return {f"{best.group} {best.kind}": best.model for best in self.best}

    @property
    def unchanged(self) -> list[str]:
        return [f"{best.group} {best.kind}" for best in self.best if best.is_start]

    @property
    def reference(self) -> ReferenceModel:
        return ReferenceModel("start", self.recipe.groups[0])

    @property
    def summary(self) -> list[str]:
        lines = []
        for best in self.best:
            dev = "" if best.dev is None else f"  dev {best.dev:.2f}"
            cycle = "its start: no cycle is better" if best.is_start else f"cycle {best.phase.cycle}"
            lines.append(f"{best.group} {best.kind:<5}  {to_uri(best.model)}  ({cycle}{dev})")
        return [*lines, *(f"dropped  {group}: {why}" for group, why in self.dropped.items())]

    @property
    def cards(self) -> list[ModelCard]:
        return [self._card(best) for best in self.best]

    def _card(self, best: Best) -> ModelCard:
        group = next(group for group in self.recipe.groups if group.name == best.group)
        is_cross = best.kind == "cross"
        kind = "cross-encoder" if is_cross else "bi-encoder"
        start = self.recipe.cross_start(group) if is_cross else group.backbone
        return ModelCard(
            model=best.model,
            metadata=hub_metadata(
                start,
                "text-ranking" if is_cross else "sentence-similarity",
                ["cross-encoder"] if is_cross else ["sentence-similarity", "feature-extraction"],
                0 if best.is_start else self.pairs,
            ),
            title=f"{self.recipe.name}: {best.group}, {kind}",
            evaluated_as=f"{best.group} {best.kind}",
            sections=[
                self._history(best, kind, start),
                *(
                    f"Group {name} was dropped during training ({why}); later labels do not include it."
                    for name, why in self.dropped.items()
                ),
                "" if best.is_start else self._transductive(),
                usage(_USE_CROSS if is_cross else _USE_BI),
            ],
            closing=[
                "## Recipe\n\nThe resolved recipe is in `distcse/recipe.yaml`.",
                limits("Licences of pairs and backbones apply to it."),
            ],
        )

    def _history(self, best: Best, kind: str, start: str) -> str:
        """Return how the model came about."""
        others = self._other_groups(best)
        if best.is_start:
            return (
                f"A {kind}: `{shown_name(start)}`, unchanged. No cycle of the run, Trans-Encoder's distillation on "
                f"{self.pairs:,} unlabelled sentence pairs{others}, has a higher dev score than its {best.dev:.2f}."
            )
        dev = "" if best.dev is None else f" Its dev score there was {best.dev:.2f}."
        return (
            f"A {kind}, initialized from `{shown_name(start)}` and trained on {self.pairs:,} unlabelled sentence pairs with "
            f"Trans-Encoder's distillation{others}. This is the best checkpoint of cycle {best.phase.cycle}.{dev}"
        )

    def _other_groups(self, best: Best) -> str:
        others = [g.name for g in self.recipe.groups if g.name != best.group and g.name not in self.dropped]
        return f", together with {', '.join(others)}, with the groups' combined scores as labels" if others else ""

    def _transductive(self) -> str:
        task = self.recipe.pairs.task
        if task is None:
            return ""
        return (
            f"**Transductive**: its pairs are those of the task `{task}`, including the test pairs (without their labels). Do "
            "not compare its scores on that task with those of models that were not trained on the test sentences."
        )
