"""The result of a mutual distillation, and the model cards of its groups' best models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from distcse.evaluation import Evaluation
from distcse.model_source import shown_name
from distcse.recipe import MutualRecipe
from distcse.runs.directory import RunDirectory
from distcse.runs.experiment import ReferenceModel, Result
from distcse.runs.model_card import USE, ModelCard, hub_metadata, limits, usage
from distcse.runs.mutual.phase_store import Kind, Phase
from distcse.storage import to_uri

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
    def name(self) -> str:
        """Its name in tables, such as `bert cross`."""
        return f"{self.group} {self.kind}"

    @property
    def is_start(self) -> bool:
        """Whether it is the group's initial bi-encoder, unchanged."""
        return not self.phase.number


@dataclass(frozen=True)
class MutualResult(Result):
    """Result of a mutual distillation."""

    recipe: MutualRecipe
    best: Sequence[Best]
    """The best models; empty if the run was interrupted before the last phase ended."""
    dropped: Mapping[str, str]
    """Groups that failed and were dropped, with the reason."""
    pairs: int
    """Number of pairs."""

    @classmethod
    def of(
        cls,
        recipe: MutualRecipe,
        directory: RunDirectory,
        best: Sequence[Best],
        dropped: Mapping[str, str],
        pairs: int,
        interrupted: bool,
        evaluation: Evaluation | None,
    ) -> MutualResult:
        """Describe a run whose best models are saved."""
        summary = []
        for model in best:
            dev = "" if model.dev is None else f"  dev {model.dev:.2f}"
            cycle = "its start: no cycle is better" if model.is_start else f"cycle {model.phase.cycle}"
            summary.append(f"{model.group} {model.kind:<5}  {to_uri(model.model)}  ({cycle}{dev})")
        return cls(
            recipe,
            directory,
            interrupted,
            evaluation,
            models={model.name: model.model for model in best},
            unchanged=[model.name for model in best if model.is_start],
            reference=ReferenceModel("start", recipe.groups[0]),
            summary=[*summary, *(f"dropped  {group}: {why}" for group, why in dropped.items())],
            cards=[_card(recipe, model, dropped, pairs) for model in best],
            best=best,
            dropped=dropped,
            pairs=pairs,
        )


def _card(recipe: MutualRecipe, best: Best, dropped: Mapping[str, str], pairs: int) -> ModelCard:
    group = next(group for group in recipe.groups if group.name == best.group)
    is_cross = best.kind == "cross"
    kind, start = ("cross-encoder", recipe.cross_start(group)) if is_cross else ("bi-encoder", group.backbone)
    return ModelCard(
        model=best.model,
        metadata=hub_metadata(
            start,
            "text-ranking" if is_cross else "sentence-similarity",
            ["cross-encoder"] if is_cross else ["sentence-similarity", "feature-extraction"],
            0 if best.is_start else pairs,
        ),
        title=f"{recipe.name}: {best.group}, {kind}",
        evaluated_as=best.name,
        sections=[
            _history(recipe, best, dropped, pairs, kind, start),
            *(
                f"Group {name} was dropped during training ({why}); later labels do not include it."
                for name, why in dropped.items()
            ),
            "" if best.is_start else _transductive(recipe),
            usage(_USE_CROSS if is_cross else USE),
        ],
        closing=[
            "## Recipe\n\nThe resolved recipe is in `distcse/recipe.yaml`.",
            limits("Licences of pairs and backbones apply to it."),
        ],
    )


def _history(recipe: MutualRecipe, best: Best, dropped: Mapping[str, str], pairs: int, kind: str, start: str) -> str:
    """Return how the model came about."""
    names = [group.name for group in recipe.groups if group.name != best.group and group.name not in dropped]
    others = f", together with {', '.join(names)}, with the groups' combined scores as labels" if names else ""
    if best.is_start:
        return (
            f"A {kind}: `{shown_name(start)}`, unchanged. No cycle of the run, Trans-Encoder's distillation on "
            f"{pairs:,} unlabelled sentence pairs{others}, has a higher dev score than its {best.dev:.2f}."
        )
    dev = "" if best.dev is None else f" Its dev score there was {best.dev:.2f}."
    return (
        f"A {kind}, initialized from `{shown_name(start)}` and trained on {pairs:,} unlabelled sentence pairs with "
        f"Trans-Encoder's distillation{others}. This is the best checkpoint of cycle {best.phase.cycle}.{dev}"
    )


def _transductive(recipe: MutualRecipe) -> str:
    task = recipe.pairs.task
    if task is None:
        return ""
    return (
        f"**Transductive**: its pairs are those of the task `{task}`, including the test pairs (without their labels). Do "
        "not compare its scores on that task with those of models that were not trained on the test sentences."
    )
