"""Base class of a loss's settings, and the registry of losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field

from distcse.recipe.paths import absolute_folder
from distcse.recipe.section import Section

if TYPE_CHECKING:
    from distcse.recipe.kinds.distillation import Recipe
    from distcse.recipe.objective import ObjectiveSection

Temperature = Annotated[float, Field(ge=1e-4, le=10)]
"""At least 1e-4: below it, the rounding of a float32 cosine changes a logit by a factor of e."""

Need = Literal["lists", "vectors", "detector"]
"""What a term needs apart from the two views of the batch:

- `lists`: the teachers' similarity lists;
- `vectors`: the teachers' vectors of the batch's rows;
- `detector`: the discriminator of edited tokens.
"""
Needs = Mapping[Need, str]
"""What a term needs -> the key of its section that asks for it; "" is the term itself."""
ClassAndArguments = tuple[str, Mapping[str, Any]]
"""A class as `module:Class`, and keyword arguments of its constructor."""


class LossSection(Section):
    """Settings of a loss term. A subclass also answers what the rest of distcse asks about the term."""

    weight_key: ClassVar[str] = "weight"
    """Key of the term's weight in the sum."""
    fixed_in_training: ClassVar[tuple[str, ...]] = ()
    """Keys that cannot change during training, because checkpoints or targets depend on them."""
    shared_keys: ClassVar[tuple[str, ...]] = ()
    """Keys of `objective` itself that the term reads."""
    metrics: ClassVar[tuple[str, ...]] = ()
    """Names of the values that the term reports besides its share."""

    contrasts_views: ClassVar[bool] = False
    """Whether the term compares a sentence's two views, and needs dropout to tell them apart."""

    @property
    def weight_in_sum(self) -> float:
        """Weight of the term in the sum, whatever its key."""
        weight: float = getattr(self, self.weight_key)
        return weight

    def term(self, objective: ObjectiveSection) -> ClassAndArguments:
        """Return the term's class and its arguments.

        The class is imported when an objective is built, so that reading a recipe does not import PyTorch.
        """
        raise NotImplementedError

    @property
    def needs(self) -> Needs:
        """What the term needs besides the two views."""
        return {}

    def vector_teachers(self, count: int) -> list[int]:
        """Return the indices of the teachers whose vectors the term needs, of `count` teachers."""
        return list(range(count)) if "vectors" in self.needs else []

    @property
    def projection_of(self) -> str | None:
        """Folder or address of the run whose projection the term uses; None fits one."""
        return None

    @property
    def models(self) -> dict[str, str]:
        """Frozen models that the term loads: their key -> folder or hub id."""
        return {}

    def check_recipe(self, recipe: Recipe) -> None:
        """Check the term against the rest of the recipe. Whether there are teachers is checked already.

        Raises:
            ValueError: The term does not work with another setting.
        """

    def with_absolute_paths(self) -> Self:
        """Return a copy with its folders resolved against the current directory."""
        return self.model_copy(update={key: absolute_folder(model) for key, model in self.models.items()})


@dataclass(frozen=True)
class RegisteredLoss:
    """A key of `objective`.

    Attributes:
        key: The key.
        section: Its settings.
        description: What the key is, for the recipe reference.
        default: Its default; None disables the term.
        order: Position among the keys, and in the sum.
    """

    key: str
    section: type[LossSection]
    description: str
    default: LossSection | None
    order: int


S = TypeVar("S", bound=LossSection)

_REGISTERED: list[RegisteredLoss] = []


def register_loss(
    key: str, description: str, *, on_by_default: bool = False, order: int = 100
) -> Callable[[type[S]], type[S]]:
    """Register a loss under a key of `objective`; a class decorator of its section.

    Args:
        key: The key.
        description: What the key is, for the recipe reference.
        on_by_default: Whether recipes that do not name the key have the term, with its default settings.
        order: Position among the keys, and in the sum; the same order sorts by key. Default: after distcse's own losses.
    """

    def register(section: type[S]) -> type[S]:
        default = section() if on_by_default else None
        _REGISTERED.append(RegisteredLoss(key, section, description, default, order))
        return section

    return register


def registered_losses() -> list[RegisteredLoss]:
    """Return the registered losses in the order of their keys in `objective`."""
    return sorted(_REGISTERED, key=lambda loss: (loss.order, loss.key))
