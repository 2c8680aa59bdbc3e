"""Recipe section of the objective: a key for each registered loss, and how they are summed.

The defaults are RankCSE's common setting (paper, Table 9).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from pydantic import Field, create_model, model_validator

from distcse.recipe.losses.custom import CustomLossSection
from distcse.recipe.losses.loss_section import LossSection, Need, Temperature, registered_losses
from distcse.recipe.section import Name, Section

HINGE_TERMS = ("info_nce", "rank_regression")
"""The terms of which `combine: hinge` takes the larger one."""
_OBJECTIVE_METRICS = ("loss", "pos_cos", "neg_cos")
"""Values that every objective reports besides its terms."""

S = TypeVar("S", bound=LossSection)


class _Temperature(Section):
    tau1: Temperature = 0.05
    """Temperature of InfoNCE and of the consistency term."""


_FIELDS: dict[str, Any] = {
    loss.key: (loss.section | None, Field(loss.default, description=loss.description)) for loss in registered_losses()
}
_Losses: Any = create_model("_Losses", __base__=_Temperature, **_FIELDS)
"""`_Temperature` with a key for each registered loss."""


class ObjectiveSection(_Losses):
    """The weighted sum of loss terms; null disables a term."""

    if TYPE_CHECKING:

        def __getattr__(self, key: str) -> Any:
            """Each registered loss's section, by its key."""

    custom: dict[Name, CustomLossSection] = Field(default_factory=dict)
    """Custom terms, by the name that reports use."""
    combine: Literal["sum", "hinge"] = "sum"
    """`sum` of all terms; `hinge` is max(InfoNCE, λ · rank regression) of the batch (RankEncoder Eq. 5), plus the other
    terms."""

    @property
    def unread_keys(self) -> Mapping[str, str]:
        read = {key for section in self.terms.values() for key in section.shared_keys}
        readers = [loss.key for loss in registered_losses() if "tau1" in loss.section.shared_keys]
        return {} if "tau1" in read else {"tau1": f"{' and '.join(readers)} are null"}

    @model_validator(mode="after")
    def _custom_names_are_free(self) -> ObjectiveSection:
        metrics = [name for loss in registered_losses() for name in loss.section.metrics]
        taken = [*type(self).model_fields, *_OBJECTIVE_METRICS, *metrics]
        if named := next((name for name in self.custom if name in taken), None):
            raise ValueError(f"custom has a term called {named!r}, a name that is taken; give it another")
        return self

    @property
    def terms(self) -> dict[str, LossSection]:
        """The terms that are not null, by recipe key relative to `objective`, in the order of the sum."""
        sections = {loss.key: getattr(self, loss.key) for loss in registered_losses()}
        custom = {f"custom.{name}": section for name, section in self.custom.items()}
        return {key: section for key, section in {**sections, **custom}.items() if section is not None}

    @property
    def active_terms(self) -> dict[str, LossSection]:
        """The terms with a weight above 0, as in `terms`."""
        return {key: section for key, section in self.terms.items() if section.weight_in_sum}

    def active(self, kind: type[S]) -> S | None:
        """Return the settings of the active term of this kind; None if the objective has none."""
        return next((section for section in self.active_terms.values() if isinstance(section, kind)), None)

    def keys_that_need(self, *needs: Need, active: bool = False) -> list[str]:
        """Return the recipe keys that ask for one of these; without custom terms, whose classes are not imported here.

        Args:
            needs: What to look for.
            active: Leave out terms of weight 0.
        """
        return list(
            dict.fromkeys(
                f"objective.{key}.{inner}".rstrip(".")
                for key, section in (self.active_terms if active else self.terms).items()
                for need, inner in section.needs.items()
                if need in needs
            )
        )

    def vector_teachers(self, count: int) -> list[int]:
        """Return the indices of the teachers whose vectors a term needs, of `count` teachers; empty without such a term."""
        chosen = (section.vector_teachers(count) for section in self.active_terms.values())
        return next((numbers for numbers in chosen if numbers), [])

    @property
    def projection_of(self) -> str | None:
        """Folder or address of the run whose projection of the teachers' vectors a term uses; None if one is fitted."""
        return next((run for section in self.active_terms.values() if (run := section.projection_of)), None)

    @property
    def models(self) -> list[str]:
        """Folders or hub ids of the frozen models that the terms load."""
        return [model for section in self.terms.values() for model in section.models.values()]

    def with_absolute_paths(self) -> Self:
        """Return a copy with the terms' folders resolved against the current directory."""
        return self.model_copy(
            update={
                key: section.with_absolute_paths()
                for key, section in self.terms.items()
                if key in type(self).model_fields
            }
        )
