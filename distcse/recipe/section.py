"""What all parts of a recipe have in common: strictness, and the kinds of values that occur in many."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Precision = Literal["fp32", "bf16"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Weight = Annotated[float, Field(ge=0)]
Labels = Annotated[dict[str, str], Field(min_length=1)]
"""Labels of a Ray node, such as {role: students}."""


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no silent conversion, no change after validation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)
