"""Weights of the teachers, constant or per domain of a row."""

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
        corpus: Gives the rows' domains.

    Raises:
        TeacherWeightError: `alpha_by_domain` is set for a corpus without domains, names a domain that no row has, or all
            weights of a domain are 0.
    """

    def __init__(self, teachers: Sequence[TeacherSection], corpus: Corpus) -> None:
        self.everywhere = [teacher.alpha for teacher in teachers]
        """(T,) weights of rows without a domain."""
        self._corpus = corpus
        self._by_domain: Tensor | None = None
        named_domains = {name for teacher in teachers for name in teacher.alpha_by_domain or {}}
        if not named_domains:
            return
        if not corpus.domains:
            raise TeacherWeightError(
                "alpha_by_domain is set, but the corpus has no domains; write corpus.domain: COLUMN"
            )
        if unknown := sorted(named_domains - set(corpus.domains)):
            known = ", ".join(sorted(corpus.domains)[:20])
            raise TeacherWeightError(
                f"alpha_by_domain names {unknown[0]!r}, a domain that no row has; use one of: {known}"
            )
        self._by_domain = torch.tensor(
            [
                [(teacher.alpha_by_domain or {}).get(name, teacher.alpha) for name in corpus.domains]
                for teacher in teachers
            ]
        )
        if len(unweighted := (self._by_domain.sum(dim=0) == 0).nonzero()):
            raise TeacherWeightError(
                f"alpha and alpha_by_domain of all teachers are 0 in the domain {corpus.domains[int(unweighted[0])]!r}; raise one"
            )

    def of(self, rows: NDArray[np.int64]) -> Sequence[float] | Tensor:
        """Return the weights of R row ids: (T,) if they are the same for all rows, else (T, R)."""
        if self._by_domain is None:
            return self.everywhere
        return self._by_domain[:, torch.from_numpy(self._corpus.domain_ids(rows).astype(np.int64))]
