"""Inference in rank space: pairs scored by cosine and by rank (RankEncoder Eq. 7), the references stored with the model.

<folder>/…                             the encoder, in the sentence-transformers layout
         distcse/rank_space.json            weight, normalize, ranks
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
from distcse.rank_space.device import rank_space
from distcse.rank_space.pairs import pair_similarities
from distcse.rank_space.space import RANKS, Ranker
from distcse.storage import fetch_folder, resolve_path, upload_dir

_ABOUT = Path("distcse") / "ranks.json"
_REFERENCES = Path("distcse") / "references.safetensors"


class RankSpaceEncoder:
    """An encoder and its reference sentences.

    Args:
        encoder: The encoder.
        references: (n, d) its vectors of the reference sentences.
        weight: λ of Eq. 7: 0 scores by cosine alone, 1 by ranks alone; the paper has 0.1.
        normalize: Order references by cosine; False orders them by inner product, as the public code does at inference.
        ranks: `sort`, exact; or `histogram` (see `RankSpace`).
    """

    def __init__(
        self,
        encoder: Encoder,
        references: NDArray[np.floating],
        weight: float = 0.1,
        normalize: bool = True,
        ranks: str = "sort",
    ) -> None:
        if not 0 <= weight <= 1:
            raise EncoderSettingError(f"weight is {weight}; the share of ranks in a score lies between 0 and 1")
        if ranks not in RANKS:
            raise EncoderSettingError(f"ranks is {ranks!r}; allowed: {', '.join(RANKS)}")
        self.encoder = encoder
        self.weight = weight
        self.normalize = normalize
        self.ranks = ranks
        self.references = np.asarray(references, dtype=np.float32)
        self.space = self._space_on(str(encoder.device))

    @classmethod
    def over(
        cls,
        encoder: Encoder,
        sentences: Sequence[str],
        weight: float = 0.1,
        normalize: bool = True,
        ranks: str = "sort",
        on_progress: Callable[[int], None] | None = None,
    ) -> RankSpaceEncoder:
        """With these sentences as references."""
        references = encoder.encode(sentences, normalize=False, on_progress=on_progress)
        return cls(encoder, references, weight, normalize, ranks)

    @classmethod
    def load(cls, path: str | Path, trust_remote_code: bool = False) -> RankSpaceEncoder:
        """What `save` wrote; code that its encoder brings is run where that is trusted.

        Raises:
            EncoderError: A folder has no references.
        """
        folder = resolve_path(path)
        fetch_folder(folder)
        if not is_rank_space(folder):
            raise ModelFormatError(
                f"{folder} has no {_ABOUT}; make it with RankSpaceEncoder.over(encoder, sentences).save"
            )
        about = json.loads((folder / _ABOUT).read_text())
        references = load_file(folder / _REFERENCES)["references"]
        encoder = Encoder.load(folder, trust_remote_code=trust_remote_code)
        return cls(encoder, references, about["weight"], about["normalize"], about.get("ranks", "sort"))

    def to(self, device: str) -> RankSpaceEncoder:
        """Encode and rank there: on a CPU, or on a GPU. Returns itself."""
        self.encoder.to(device)
        self.space = self._space_on(device)
        return self

    def _space_on(self, device: str) -> Ranker:
        return rank_space(unit(self.references) if self.normalize else self.references, self.ranks, device)

    def save(self, path: str | Path) -> None:
        """Write encoder and references; other tools read the folder as the encoder alone."""
        folder = resolve_path(path)
        self.encoder.save(folder)
        (folder / "distcse").mkdir(exist_ok=True)
        save_file({"references": np.ascontiguousarray(self.references)}, folder / _REFERENCES)
        about = {"weight": self.weight, "normalize": self.normalize, "ranks": self.ranks}
        (folder / _ABOUT).write_text(json.dumps(about))
        upload_dir(folder)

    def similarities(self, first: Sequence[str], second: Sequence[str]) -> NDArray[np.float64]:
        """(p,) scores of p pairs of sentences; each different sentence is encoded and ranked once."""
        unique, left, right = numbered(first, second)
        return self.scores(unit(self.encoder.encode(unique, normalize=False)), left, right)

    def scores(
        self, vectors: NDArray[np.floating], first: NDArray[np.int64], second: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """(p,) λ · Spearman + (1 - λ) · cosine (Eq. 7) of p pairs of rows of (m, d) unit vectors."""
        cosines = np.einsum("pd,pd->p", vectors[first], vectors[second], dtype=np.float64)
        spearman = pair_similarities(self.space, vectors, first, second) if self.weight else np.zeros(len(cosines))
        return np.asarray(self.weight * spearman + (1 - self.weight) * cosines)


def numbered(first: Sequence[str], second: Sequence[str]) -> tuple[list[str], NDArray[np.int64], NDArray[np.int64]]:
    """Different sentences of p pairs, and the places among them of each pair's two."""
    unique = list(dict.fromkeys([*first, *second]))
    index = {text: number for number, text in enumerate(unique)}
    left, right = (np.array([index[text] for text in side], dtype=np.int64) for side in (first, second))
    return unique, left, right


def is_rank_space(folder: Path) -> bool:
    """Whether a model folder has reference sentences with it."""
    return (folder / _ABOUT).is_file()


def unit(vectors: NDArray[np.floating]) -> NDArray[np.float32]:
    """(n, d) vectors of length 1; a zero vector stays zero."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1), dtype=np.float32)
