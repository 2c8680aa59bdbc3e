"""How much each teacher's word counts: the same in all rows, or by a row's domain."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distcse.data import Corpus
from distcse.errors import TeacherWeightError
from distcse.recipe import TeacherSection


class TeacherWeights:
    """Weights of T teachers (RankCSE §4.4); their scale does not matter.

    Args:
        teachers: The recipe's teachers.
        corpus: Where rows have their domains.

    Raises:
        TeacherError: Weights by domain in a corpus without domains, of a domain that no row has, or all 0 in one.
    """

    def __init__(self, teachers: Sequence[TeacherSection], corpus: Corpus) -> None:
        self.everywhere = [teacher.alpha for teacher in teachers]
        """(T,) weights in rows of no domain."""
        self._corpus = corpus
        self._by_domain: Tensor | None = None
        named = {name for teacher in teachers for name in teacher.alpha_by_domain or {}}
        if not named:
            return
        if not corpus.domains:
            raise TeacherWeightError(
                "teachers have alpha_by_domain, but the corpus has no domains; write corpus.domain: COLUMN"
            )
        if unknown := sorted(named - set(corpus.domains)):
            known = ", ".join(sorted(corpus.domains)[:20])
            raise TeacherWeightError(
                f"alpha_by_domain names {unknown[0]!r}, a domain that no row has; there are: {known}"
            )
        self._by_domain = torch.tensor(
            [
                [(teacher.alpha_by_domain or {}).get(name, teacher.alpha) for name in corpus.domains]
                for teacher in teachers
            ]
        )
        if len(silent := (self._by_domain.sum(dim=0) == 0).nonzero()):
            raise TeacherWeightError(
                f"no teacher has a weight above 0 in the domain {corpus.domains[int(silent[0])]!r}"
            )

    def of(self, rows: NDArray[np.int64]) -> Sequence[float] | Tensor:
        """(R,) row ids -> (T,) weights, or (T, R) where they depend on the row."""
        if self._by_domain is None:
            return self.everywhere
        return self._by_domain[:, torch.from_numpy(self._corpus.domain_ids(rows).astype(np.int64))]
