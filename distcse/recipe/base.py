"""What the recipes of all kinds of run have in common, and the registry by which a document's kind is found."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from distcse.recipe.section import Section

if TYPE_CHECKING:
    from distcse.devices.gpu_plan import GpuMode
    from distcse.recipe.encoders import EncoderSection
    from distcse.recipe.storage import LoggersSection, StorageSection
    from distcse.recipe.teachers import TeacherSection
    from distcse.recipe.text import CorpusSection
    from distcse.recipe.training import LoopSection, ResourcesSection


FITTED_KEYS = (
    ("evaluation", "num_heldout"),
    ("training", "batch_size"),
    ("bi", "batch_size"),
    ("cross", "batch_size"),
)
"""Sections and keys whose values a run lowers for a small corpus, unless a user gave them."""


@dataclass(frozen=True)
class RecipeInputs:
    """The models and texts that a recipe names."""

    encoders: Sequence[EncoderSection] = ()
    """Pretrained models that are trained or part of the objective."""
    teachers: Sequence[TeacherSection] = ()
    """Teachers of every kind."""
    corpus: CorpusSection | None = None
    """The sentences to train on."""
    labelled: str | None = None
    """Folder of the labeled sets."""
    labelled_for: str | None = None
    """Setting that needs the folder of labeled sets, such as `evaluation.dev is stsb`; None if no setting does."""


class BaseRecipe(Section):
    """The settings of one run. Each kind of run has a subclass with its keys, registered with `register_recipe`.

    A subclass has at least the keys `name`, `seed`, `storage` and `loggers`. One that loads encoders has `models` too, one that
    lets the user choose GPUs `resources`, and one that may be run once per seed `seeds`.
    """

    title: ClassVar[str]
    """Title of such a document in errors, schemas and the reference: `recipe of …`."""
    schema_name: ClassVar[str]
    """Name of its schema, for `distcse recipe schema NAME`."""
    summary: ClassVar[str] = ""
    """What such a run does, in Markdown, for the reference."""
    identifying_key: ClassVar[str]
    """Top-level key that every document of this kind has and no document of another kind."""
    loop_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of the sections that configure a training loop."""
    resumable_keys: ClassVar[tuple[str, ...]] = ("storage.cache", "loggers")
    """Keys that a resumed run may change, because they do not change what is learned. List indices are left out."""
    searchable_keys: ClassVar[tuple[str, ...]] = ()
    """Keys that a sweep may search."""

    if TYPE_CHECKING:  # at runtime, pydantic would put inherited keys before those of the subclass
        name: str
        seed: int
        seeds: list[int]
        resources: ResourcesSection
        storage: StorageSection
        loggers: LoggersSection

    @classmethod
    def subject(cls) -> str:
        """Return what follows the word `recipe` in the title, such as ` of mutual distillation`; nothing for a student's."""
        return cls.title.partition("recipe")[2]

    @property
    def all_seeds(self) -> list[int]:
        """`seeds`, with each of which the recipe is run in place of `seed`; empty for a kind of recipe without that key."""
        return self.seeds if "seeds" in type(self).model_fields else []

    @property
    def uses_ray(self) -> bool:
        """Whether the run needs a Ray cluster."""
        return False

    @property
    def gpu_mode(self) -> GpuMode:
        """`resources.gpu`; `auto` for a kind of recipe without that section."""
        return self.resources.gpu if "resources" in type(self).model_fields else "auto"

    @property
    def dev_score(self) -> str:
        """Name of the score that selects checkpoints; `none` if the run computes no such score."""
        return "none"

    @property
    def loop_sections(self) -> list[LoopSection]:
        """The sections that configure a training loop."""
        return [getattr(self, key) for key in self.loop_keys]

    @property
    def inputs(self) -> RecipeInputs:
        """The models and texts that the recipe names."""
        return RecipeInputs()

    @property
    def model_folders(self) -> list[str]:
        """Folders of a finished run's models, relative to the run's folder."""
        return ["model"]

    @property
    def given_keys(self) -> set[tuple[str, str]]:
        """Those of `FITTED_KEYS` that a user's file, override or code set. A packaged recipe's own values are defaults."""
        return {
            (name, key)
            for name, key in FITTED_KEYS
            if key in getattr(getattr(self, name, None), "model_fields_set", ())
        }

    def with_given_keys(self, given: Collection[tuple[str, str]]) -> Self:
        """Count all other `FITTED_KEYS` as defaults, and return the recipe, which must be a new one."""
        for name, key in self.given_keys - {*given}:
            getattr(self, name).model_fields_set.discard(key)
        return self

    def describe_fitted(self, fitted: Self) -> str:
        """Return the values of `FITTED_KEYS` that another recipe has lowered, as part of a sentence; empty if it has none."""
        pairs = {
            f"{name}.{key}": (getattr(getattr(self, name), key), getattr(getattr(fitted, name), key))
            for name, key in FITTED_KEYS
            if key in getattr(type(getattr(self, name, None)), "model_fields", ())
        }
        return " and ".join(f"{path} is {now}, not {before}" for path, (before, now) in pairs.items() if now != before)

    def with_absolute_paths(self) -> Self:
        """Return a copy with paths resolved against the current directory, because a Ray worker has another one."""
        return self.model_copy(update={"storage": self.storage.with_absolute_paths()})


R = TypeVar("R", bound=BaseRecipe)

RECIPE_CLASSES: list[type[BaseRecipe]] = []
"""Registered kinds of recipes, in order of registration."""


def register_recipe(kind: type[R]) -> type[R]:
    """Register a kind of recipe; a class decorator. A document that has no kind's identifying key is of the first kind."""
    RECIPE_CLASSES.append(kind)
    return kind


def recipe_classes() -> list[type[BaseRecipe]]:
    """Return the registered kinds of recipes."""
    return list(RECIPE_CLASSES)


def recipe_class(document: Mapping[str, Any]) -> type[BaseRecipe]:
    """Return the kind of recipe that a document is."""
    first, *others = RECIPE_CLASSES
    return next((kind for kind in others if kind.identifying_key in document), first)
