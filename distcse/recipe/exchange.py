"""The rule by which groups of a mutual distillation exchange scores: `all`, `quorum(K)` or `stale(S)`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field

_PATTERN = r"^(all|quorum\([1-9][0-9]{0,5}\)|stale\([1-9][0-9]{0,5}\))$"


@dataclass(frozen=True)
class Exchange:
    """Whose scores a group waits for before it trains its next phase.

    Attributes:
        kind: `all` waits for all groups, as in Trans-Encoder (Liu et al. 2022, §2.4). `quorum` waits for `number` groups, and
            leaves out the others. `stale` takes scores of up to `number` cycles ago from groups that are behind, as in
            stale synchronous parallel training (Ho et al. 2013).
        number: K of `quorum(K)`, or S of `stale(S)`. Default: 0, for `all`.
    """

    kind: Literal["all", "quorum", "stale"]
    number: int = 0

    @classmethod
    def parse(cls, rule: str) -> Self:
        """Read a rule such as `quorum(12)`.

        Raises:
            ValueError: The text is not an `ExchangeRule`.
        """
        if not re.fullmatch(_PATTERN, rule):
            raise ValueError(f"got {rule!r}; write all, quorum(K) or stale(S), with K and S from 1")
        kind, _, number = rule.rstrip(")").partition("(")
        return cls(kind, int(number or 0))  # type: ignore[arg-type]  # the pattern admits these three alone


def _checked(rule: str) -> str:
    Exchange.parse(rule)
    return rule


ExchangeRule = Annotated[str, AfterValidator(_checked), Field(json_schema_extra={"pattern": _PATTERN})]
"""Type of a recipe key whose text `Exchange.parse` reads."""
