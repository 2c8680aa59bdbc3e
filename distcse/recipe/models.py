"""Recipe section of all models of a run, and how its switch reaches the sections that models are loaded from."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from distcse.recipe.encoders import EncoderSection
from distcse.recipe.section import Section


class ModelsSection(Section):
    """How all models of a run are computed: those that are trained, teachers, scorers and evaluated ones."""

    fast: Literal["auto", "off"] = "auto"
    """Exact shortcuts of the forward pass. `auto` uses each where it saves time: no padding in training, oneDNN's weight layout
    for frozen models and dropout from 16-bit random numbers (on CPUs), and a last layer for the one token that is pooled.
    Results differ by rounding, and dropout draws other masks. `off` computes models as transformers does."""

    @field_validator("fast", mode="before")
    @classmethod
    def _off_is_text(cls, value: object) -> object:
        """Accept `off` without quotes, which YAML reads as false."""
        return "off" if value is False else value


def encoders_with_switch(section: Section, is_fast: bool) -> dict[str, Any]:
    """Return the fields of a section that change when `is_fast` is set in all encoder sections below it."""
    fields = {name: getattr(section, name) for name in type(section).model_fields}
    changed = {name: _with_switch(value, is_fast) for name, value in fields.items()}
    return {name: value for name, value in changed.items() if value is not fields[name]}


def _with_switch(value: Any, is_fast: bool) -> Any:
    if isinstance(value, list):
        items = [_with_switch(item, is_fast) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    if isinstance(value, EncoderSection):
        return value if value.is_fast == is_fast else value.with_switch(is_fast)
    if isinstance(value, Section) and (changed := encoders_with_switch(value, is_fast)):
        return value.model_copy(update=changed)
    return value
