"""Formats of an index's vectors: fewer dimensions, int8, or bits, by the quantization of sentence-transformers.

Retrieval is measured in each format from vectors that were computed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationOptionError, MissingDependencyError
from distcse.evaluation.exact_search import DocumentVectors

Quantization = Literal["int8", "binary"]


@dataclass(frozen=True)
class VectorFormat:
    """How an index stores its documents' vectors; by default as they are, in float32."""

    dimensions: int | None = None
    """The first dimensions are kept, and normalized again; None keeps all."""
    quantization: Quantization | None = None

    def __str__(self) -> str:
        kept = [] if self.dimensions is None else [f"{self.dimensions} dimensions"]
        return ", ".join([*kept, *filter(None, [self.quantization])])

    @classmethod
    def parse(cls, dimensions: Sequence[int], quantize: Sequence[str]) -> list[VectorFormat]:
        """Return the formats with each of some numbers of dimensions, or all, and each quantization, or none.

        Raises:
            EvaluationOptionError: A number is below 1, or a quantization has another name.
            MissingDependencyError: sentence-transformers is not installed, and a quantization is named.
        """
        if low := [number for number in dimensions if number < 1]:
            raise EvaluationOptionError(f"--dimensions is {low[0]}; write a number above 0")
        known = get_args(Quantization)
        if unknown := [name for name in quantize if name not in known]:
            raise EvaluationOptionError(f"--quantize is {unknown[0]!r}; choose from {', '.join(known)}")
        if quantize and find_spec("sentence_transformers") is None:
            raise MissingDependencyError("--quantize needs sentence-transformers; pip install sentence-transformers")
        kept: list[int | None] = [None, *dict.fromkeys(dimensions)]
        quantizations = [None, *(name for name in known if name in quantize)]
        formats = [cls(number, quantization) for number in kept for quantization in quantizations]
        return formats[1:]

    def size_bytes(self, width: int) -> int:
        """Return the bytes of a stored vector of a model with `width` dimensions."""
        kept = self.dimensions or width
        return {None: 4 * kept, "int8": kept, "binary": -(-kept // 8)}[self.quantization]

    def apply(
        self, queries: NDArray[np.float32], documents: DocumentVectors, blocks: Iterable[slice]
    ) -> tuple[NDArray[np.float32], DocumentVectors]:
        """Return vectors whose inner products rank as a search in an index of this format.

        int8 has one range per dimension, that of the documents; queries stay float32, as in the rescoring of
        sentence-transformers. Bits, of queries too, are compared by Hamming distance.

        Args:
            queries: (n, d) unit vectors.
            documents: Unit vectors of the documents.
            blocks: Slices that contain all documents, by which their ranges are found.
        """

        def kept(places: slice) -> NDArray[np.float32]:
            return self._truncate(documents(places))

        queries = self._truncate(queries)
        if self.quantization == "int8":
            return _as_int8(queries, kept, blocks)
        if self.quantization == "binary":
            return _signs(queries), lambda places: _signs(kept(places))
        return queries, kept

    def _truncate(self, vectors: NDArray[np.floating]) -> NDArray[np.float32]:
        if self.dimensions is None:
            return np.asarray(vectors, dtype=np.float32)
        first = np.asarray(vectors[:, : self.dimensions], dtype=np.float32)
        lengths = np.linalg.norm(first, axis=1, keepdims=True)
        return np.asarray(first / np.where(lengths > 0, lengths, 1.0), dtype=np.float32)


def _as_int8(
    queries: NDArray[np.float32], documents: DocumentVectors, blocks: Iterable[slice]
) -> tuple[NDArray[np.float32], DocumentVectors]:
    """Return the queries times the steps of the dimensions' ranges, and the documents' int8 numbers.

    The inner product of a query and a document in float32 again differs from theirs by a number that all documents share.
    """
    from sentence_transformers import quantize_embeddings  # takes seconds

    found = [(block.min(axis=0), block.max(axis=0)) for block in map(documents, blocks)]
    ranges = np.stack([np.min([low for low, _ in found], axis=0), np.max([high for _, high in found], axis=0)])
    steps = (ranges[1] - ranges[0]) / 255
    return queries * steps, lambda places: quantize_embeddings(documents(places), "int8", ranges=ranges)


def _signs(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return -1 and 1 for the bits of quantized vectors: the inner product is the dimension minus twice the Hamming distance."""
    from sentence_transformers import quantize_embeddings

    bits = np.unpackbits(quantize_embeddings(vectors, "ubinary"), axis=1, count=vectors.shape[1])
    return 2 * bits.astype(np.float32) - 1
