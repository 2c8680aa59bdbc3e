"""docs/reference/recipe.md is what the types say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from distcse.recipe import MutualRecipe, Recipe, Sweep
from distcse.recipe.schema import describe_type, reference
from distcse.recipe.section import Section, sections_of
from tests.conftest import ROOT

PAGE = ROOT / "docs" / "reference" / "recipe.md"


def test_the_committed_page_is_what_the_types_say() -> None:
    message = "docs/reference/recipe.md is behind the types; run: python -m distcse recipe reference > docs/reference/recipe.md"
    assert PAGE.read_text(encoding="utf-8") == reference(), message


def test_every_key_has_a_description() -> None:
    for document in (Recipe, MutualRecipe, Sweep):
        for path, section in sections_of(document):
            assert section.__doc__, path
            silent = [name for name, field in section.model_fields.items() if not field.description]
            assert not silent, f"{path}: {silent}"


def test_every_section_is_described() -> None:
    page = reference()
    rows = {
        name for document in (Recipe, MutualRecipe, Sweep) for _, s in sections_of(document) for name in s.model_fields
    }
    assert not [name for name in rows if f"| `{name}` |" not in page]


def test_types_are_described_in_words() -> None:
    class Some(Section):
        number: int = 0
        count: Annotated[int, Field(ge=2, le=5000)] | None = None
        layers: list[Annotated[int, Field(ge=0)]] | Literal["auto"] = "auto"
        shares: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
        parts: list[Section] = Field(default_factory=list)

    described = {name: describe_type(field) for name, field in Some.model_fields.items()}
    integer = described.pop("number")
    assert described == {
        "count": f"{integer} ≥ 2, ≤ 5,000 or null",
        "layers": f"list of {integer} ≥ 0 or `auto`",
        "shares": "number > 0 by name",
        "parts": "list of sections",
    }
