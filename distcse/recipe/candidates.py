"""The section `candidates`: the documents that a query's ranking losses compare."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from distcse.recipe.section import Section


class CandidatesSection(Section):
    """For each query of the corpus its nearest documents by the teachers together, and some at random."""

    per_query: Annotated[int, Field(ge=2, le=1024)] = 32
    """Documents that are found for each query."""
    random: Annotated[int, Field(ge=0)] = 4
    """How many of them are drawn at random, the same for every seed."""
    per_step: Annotated[int, Field(ge=2)] = 7
    """How many of a query's candidates a step compares, drawn in every epoch. The `training.batch_size` rows of a batch are
    queries with these."""

    @model_validator(mode="after")
    def _has_enough(self) -> Self:
        if self.random >= self.per_query:
            raise ValueError(
                f"random is {self.random} of {self.per_query} per query, so none is near; write a smaller random"
            )
        if self.per_step > self.per_query:
            raise ValueError(f"per_step is {self.per_step}, but a query has {self.per_query}; write a smaller per_step")
        return self

    @property
    def rows_per_query(self) -> int:
        """Rows of a batch that belong to one query: itself, and its candidates."""
        return 1 + self.per_step
