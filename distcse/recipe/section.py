"""What all parts of a recipe have in common: strictness, and the kinds of values that occur in many."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Precision = Literal["fp32", "bf16"]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
Weight = Annotated[float, Field(ge=0)]
Labels = Annotated[dict[str, str], Field(min_length=1)]
"""Labels of a Ray node, such as {role: students}."""

_MOST = 2**53
"""Whole numbers up to here are exact as floating-point numbers, too."""


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no silent conversion, no change after validation."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*")
    @classmethod
    def _can_be_worked_with(cls, value: Any) -> Any:
        """Text that files and paths can hold, whole numbers that arrays can count."""
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, int) and abs(part) > _MOST:
                raise ValueError(
                    f"got a number of {len(str(abs(part)))} digits; allowed: whole numbers up to {_MOST:,}"
                )
            if isinstance(part, str) and ("\0" in part or any("\ud800" <= sign <= "\udfff" for sign in part)):
                raise ValueError(f"got {part[:60]!r}, with a NUL or half of a surrogate pair in it; take it out")
        return value
