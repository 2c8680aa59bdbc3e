"""Inference in rank space: score pairs by cosine and rank (RankEncoder Eq. 7), with references stored in the model's folder.

<folder>/…                             the encoder, in the sentence-transformers layout
         distcse/ranks.json                 weight, normalize, ranks (the rank method)
         distcse/references.safetensors
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from distcse.errors import EncoderSettingError, ModelFormatError
from distcse.models import Encoder
from distcse.models.saving import replacing
from distcse.rank_space.space import RANK_METHODS, Ranker, rank_space
from distcse.storage import ArtifactStore, open_store

_SETTINGS = Path("distcse") / "ranks.json"
_REFERENCES = Path("distcse") / "references.safetensors"
BLOCK_BYTES = 256 * 2**20
"""Memory for a chunk of rank vectors, and the similarities they are computed from."""
_FLOAT32_TERMS = 4096
"""Number of terms of an inner product that are summed in float32."""


class RankSpaceEncoder:
    """Scores pairs of sentences with an encoder and reference sentences (RankEncoder Eq. 7).

    Args:
        encoder: The encoder.
        references: (n, d) vectors of the reference sentences, by the same encoder.
        weight: λ of Eq. 7, from 0 (cosine only) to 1 (ranks only). Default: the paper's 0.1.
        normalize: Whether to rank references by cosine (default), or by inner product, like the public code at inference.
        rank_method: `sort` (default), exact; or `histogram` (see `RankSpace`).

    Raises:
        EncoderSettingError: `weight` or `rank_method` is not allowed.
    """

    def __init__(
        self,
        encoder: Encoder,
        references: NDArray[np.floating],
        weight: float = 0.1,
        normalize: bool = True,
        rank_method: str = "sort",
    ) -> None:
        _check_settings(weight, rank_method)
        self.encoder = encoder
        self.weight = weight
        self.normalize = normalize
        self.rank_method = rank_method
        self.references = np.asarray(references, dtype=np.float32)
        self.space = self._create_space(str(encoder.device))

    @classmethod
    def from_sentences(
        cls,
        encoder: Encoder,
        sentences: Sequence[str],
        weight: float = 0.1,
        normalize: bool = True,
        rank_method: str = "sort",
        on_progress: Callable[[int], None] | None = None,
    ) -> RankSpaceEncoder:
        """Encode reference sentences, and create a `RankSpaceEncoder` with them.

        Args:
            encoder: The encoder.
            sentences: The n reference sentences.
            weight: See `RankSpaceEncoder`.
            normalize: See `RankSpaceEncoder`.
            rank_method: See `RankSpaceEncoder`.
            on_progress: Called with the number of distinct sentences encoded so far.

        Raises:
            EncoderSettingError: `weight` or `rank_method` is not allowed.
        """
        _check_settings(weight, rank_method)
        references = encoder.encode(sentences, normalize=False, on_progress=on_progress)
        return cls(encoder, references, weight, normalize, rank_method)

    @classmethod
    def load(cls, path: str | Path, trust_remote_code: bool = False) -> RankSpaceEncoder:
        """Load a folder that `save` wrote.

        Args:
            path: The folder.
            trust_remote_code: Whether to run the encoder's own Python code.

        Raises:
            ModelFormatError: The folder has no references.
        """
        store = open_store(path)
        store.fetch_folder()
        folder = store.path
        if not is_rank_space(folder):
            raise ModelFormatError(
                f"{store} has no {_SETTINGS}; write it with RankSpaceEncoder.from_sentences(encoder, sentences).save"
            )
        settings = json.loads((folder / _SETTINGS).read_text())
        references = load_file(folder / _REFERENCES)["references"]
        encoder = Encoder.load(folder, trust_remote_code=trust_remote_code)
        return cls(encoder, references, settings["weight"], settings["normalize"], settings.get("ranks", "sort"))

    def to(self, device: str) -> RankSpaceEncoder:
        """Move the encoder and the references to a device, and return self."""
        self.encoder.to(device)
        self.space = self._create_space(device)
        return self

    def _create_space(self, device: str) -> Ranker:
        references = unit(self.references) if self.normalize else self.references
        return rank_space(references, self.rank_method, device)

    def save(self, path: str | Path | ArtifactStore) -> None:
        """Write encoder and references to a folder, replacing it atomically; other tools load it as the encoder alone."""
        settings = {"weight": self.weight, "normalize": self.normalize, "ranks": self.rank_method}
        with replacing(path) as folder:
            self.encoder.write(folder)
            (folder / "distcse").mkdir()
            save_file({"references": np.ascontiguousarray(self.references)}, folder / _REFERENCES)
            (folder / _SETTINGS).write_text(json.dumps(settings))

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """Score p pairs of sentences; each distinct sentence is encoded and ranked once.

        Args:
            first: First sentence of each pair.
            second: Second sentence of each pair.

        Returns:
            (p,) scores.
        """
        unique, left, right = index_pairs(first, second)
        return self.scores(unit(self.encoder.encode(unique, normalize=False)), left, right)

    def scores(
        self, vectors: NDArray[np.floating], first: NDArray[np.int64], second: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Compute λ · Spearman + (1 - λ) · cosine (Eq. 7).

        Args:
            vectors: (m, d) unit vectors.
            first: (p,) row index of each pair's first sentence.
            second: (p,) row index of each pair's second sentence.

        Returns:
            (p,) scores.
        """
        cosines = np.einsum("pd,pd->p", vectors[first], vectors[second], dtype=np.float64)
        spearman = pair_similarities(self.space, vectors, first, second) if self.weight else np.zeros(len(cosines))
        return np.asarray(self.weight * spearman + (1 - self.weight) * cosines)


def _check_settings(weight: float, rank_method: str) -> None:
    if not 0 <= weight <= 1:
        raise EncoderSettingError(f"weight is {weight}; allowed: 0 to 1")
    if rank_method not in RANK_METHODS:
        raise EncoderSettingError(f"rank_method is {rank_method!r}; allowed: {', '.join(RANK_METHODS)}")


def index_pairs(first: Sequence[str], second: Sequence[str]) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """Return the distinct sentences of p pairs, and each pair's (p,) first and (p,) second index among them."""
    unique = list(dict.fromkeys([*first, *second]))
    index = {text: number for number, text in enumerate(unique)}
    left, right = (np.array([index[text] for text in side], dtype=np.int64) for side in (first, second))
    return unique, left, right


def is_rank_space(folder: Path) -> bool:
    """Return whether a model's folder has reference sentences."""
    return (folder / _SETTINGS).is_file()


def unit(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    """Normalize (n, d) vectors; a zero vector stays zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(norms > 0, norms, 1), dtype=np.float32)


def pair_similarities(
    space: Ranker, vectors: NDArray[np.floating], first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Compute the Spearman correlations of p pairs of sentences.

    Each sentence is ranked once. Paired sentences are ranked close together, so that few rank vectors are kept at once:
    about a hundred for STS-B, 0.4 MB each with 100,000 references.

    Args:
        space: The rank space.
        vectors: (m, d) unit vectors of the sentences.
        first: (p,) row index of each pair's first sentence.
        second: (p,) row index of each pair's second sentence.

    Returns:
        (p,) correlations in [-1, 1].
    """
    if not len(first):
        return np.empty(0)
    order = _order_by_pairs(len(vectors), first, second)
    position = np.argsort(order)
    earlier, later = np.sort(np.stack([position[first], position[second]]), axis=0)
    needed_until = np.arange(len(vectors))
    np.maximum.at(needed_until, earlier, later)
    by_later = np.argsort(later, kind="stable")
    similarities = np.empty(len(first), dtype=np.float64)
    step = max(1, BLOCK_BYTES // (8 * len(space)))
    kept: dict[int, NDArray[np.float32]] = {}
    for begin in range(0, len(vectors), step):
        end = min(begin + step, len(vectors))
        ranks = space.ranks(vectors[order[begin:end]])
        for pair in by_later[slice(*np.searchsorted(later, (begin, end), sorter=by_later))]:
            row = int(earlier[pair])
            other = ranks[row - begin] if row >= begin else kept[row]
            similarities[pair] = _product(ranks[later[pair] - begin], other)
        kept = {row: vector for row, vector in kept.items() if needed_until[row] >= end}
        for row in (begin + np.flatnonzero(needed_until[begin:end] >= end)).tolist():
            kept[row] = ranks[row - begin].copy()
    return np.clip(similarities, -1.0, 1.0)


def _order_by_pairs(rows: int, first: NDArray[np.int64], second: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return an order of all rows in which paired rows are close (reverse Cuthill-McKee)."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    ends = np.concatenate([first, second]), np.concatenate([second, first])
    paired = coo_array((np.ones(len(ends[0]), dtype=np.bool_), ends), shape=(rows, rows)).tocsr()
    return np.asarray(reverse_cuthill_mckee(paired, symmetric_mode=True), dtype=np.intp)


def _product(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Compute an inner product, in float32 within blocks and in float64 over blocks; the error is at most 1e-8."""
    blocked = len(one) // _FLOAT32_TERMS * _FLOAT32_TERMS
    parts = np.vecdot(one[:blocked].reshape(-1, _FLOAT32_TERMS), other[:blocked].reshape(-1, _FLOAT32_TERMS))
    return float(parts.sum(dtype=np.float64)) + float(one[blocked:] @ other[blocked:])
