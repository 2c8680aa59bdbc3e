"""MTEB (Muennighoff et al. 2023): run its tasks on distcse's models, and its STS tasks on a local data folder.

Needs the extra `mteb`. Any of MTEB's tasks accepts a student:

    import mteb
    from distcse.models import Encoder
    from distcse.evaluation.mteb import MtebEncoder

    mteb.evaluate(MtebEncoder.of(Encoder.load("runs/my-run/model"), "my-student"), mteb.get_tasks(tasks=["STS22.v2"]))
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.errors import EvaluationDataError, EvaluationDependencyError
from distcse.evaluation.catalogue import STS, KnownSet
from distcse.evaluation.contamination import NOTICED_FROM, Contamination
from distcse.evaluation.evaluation import Candidate
from distcse.evaluation.models import VectorModel
from distcse.evaluation.sts import ScoredPairs
from distcse.evaluation.tables import find_table, read_table
from distcse.models import Encoder

try:
    import mteb
    from mteb.cache import ResultCache
    from mteb.models import ModelMeta
except ImportError as absent:
    raise EvaluationDependencyError(f"{absent}; run pip install 'distcse[mteb]'") from None

_TASKS = {known.name: known.name for known in STS} | {"STS-B": "STSBenchmark"}
_SPLITS = {"SICK-R": ("train", "trial", "test")}
"""MTEB's SICK-R is all of SICK, 9,927 pairs; the papers' is its test split."""


class MtebEncoder:
    """A model for MTEB (implements its `EncoderProtocol`).

    Args:
        model: Encodes the texts.
        name: Name in MTEB's results; `distcse/` is prepended unless it contains a slash.
        dimension: Dimension of the vectors, for MTEB's metadata.
        training_datasets: Names of tasks whose sentences were in the training text, for MTEB's metadata. Default: unknown.
    """

    def __init__(
        self,
        model: VectorModel,
        name: str,
        dimension: int | None = None,
        training_datasets: set[str] | None = None,
    ) -> None:
        self._model = model
        self.mteb_model_meta = ModelMeta(
            loader=None,
            name=name if "/" in name else f"distcse/{name}",
            revision="local",
            release_date=None,
            languages=None,
            n_parameters=None,
            memory_usage_mb=None,
            max_tokens=None,
            embed_dim=dimension,
            license=None,
            open_weights=None,
            public_training_code=None,
            public_training_data=None,
            framework=["PyTorch"],
            similarity_fn_name="cosine",
            use_instructions=False,
            training_datasets=training_datasets,
        )

    @classmethod
    def of(cls, encoder: Encoder, name: str) -> MtebEncoder:
        """Wrap a loaded encoder."""
        return cls(VectorModel.of(encoder), name, encoder.dimension)

    def encode(self, inputs: Iterable[dict[str, Any]], **ignored: Any) -> NDArray[np.float32]:
        """Encode batches with the key `text` into (n, d) vectors; task, split and prompt type are ignored."""
        return self._model.vectors([text for batch in inputs for text in batch["text"]])

    def similarity(self, first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.floating]:
        """Compute the (n, m) cosines of (n, d) and (m, d) vectors."""
        return np.asarray(_unit(first) @ _unit(second).T)

    def similarity_pairwise(self, first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.floating]:
        """Compute the (n,) cosines of n pairs of vectors."""
        return np.asarray((_unit(first) * _unit(second)).sum(axis=1))


def sts_tasks(data: Path) -> list[Any]:
    """Create MTEB's STS tasks whose sentences a data folder contains, on these sentences; nothing is downloaded.

    Raises:
        EvaluationDataError: The folder contains none of them.
    """
    tasks = []
    for known in STS:
        if (pairs := _pairs(data, known)) is not None:
            task = mteb.get_task(_TASKS[known.name])
            task.dataset = {"default": {"test": _dataset(pairs)}}
            task.data_loaded = True
            tasks.append(task)
    if not tasks:
        raise EvaluationDataError(
            f"{data} contains no set of MTEB's STS tasks; see docs/how-to/evaluate.md for its layout"
        )
    return tasks


def write_results(candidates: Sequence[Candidate], data: Path, out: Path) -> Path:
    """Run MTEB's STS tasks on bi-encoders, write MTEB's result files, and return their folder.

    Cross-encoders are skipped, because they have no vectors.
    """
    logging.getLogger("mteb").setLevel(logging.ERROR)  # MTEB warns that the papers' STS-B is superseded
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*superseded")
        for candidate in candidates:
            if isinstance(candidate.model, VectorModel):
                mteb.evaluate(
                    MtebEncoder(
                        candidate.model,
                        candidate.info.name,
                        training_datasets=_trained_on(candidate.contamination, data),
                    ),
                    sts_tasks(data),
                    cache=ResultCache(out),
                    overwrite_strategy="always",
                    co2_tracker=False,
                    show_progress_bar=False,
                )
    return out / "results"


def _trained_on(contamination: Contamination, data: Path) -> set[str] | None:
    """Return the tasks with test sentences in a model's training text; None if it is unknown."""
    if not contamination.overlap:
        return None
    tests = {known.name: find_table(data / known.folder, "test") for known in STS}
    pairs = [ScoredPairs.of(name, read_table(file)) for name, file in tests.items() if file is not None]
    return {_TASKS[test.name] for test in pairs if (contamination.overlap_of(test.unique) or 0.0) >= NOTICED_FROM}


def _pairs(data: Path, known: KnownSet) -> ScoredPairs | None:
    files = [find_table(data / known.folder, split) for split in _SPLITS.get(known.name, ("test",))]
    found = [ScoredPairs.of(known.name, read_table(file)) for file in files if file is not None]
    if len(found) < len(files):
        return None
    first = [text for part in found for text in part.first]
    second = [text for part in found for text in part.second]
    gold = np.concatenate([part.gold for part in found])
    return ScoredPairs(known.name, first, second, gold, np.full(len(gold), ""))


def _dataset(pairs: ScoredPairs) -> Any:
    from datasets import Dataset

    return Dataset.from_dict({"sentence1": pairs.first, "sentence2": pairs.second, "score": pairs.gold.tolist()})


def _unit(vectors: NDArray[np.floating]) -> NDArray[np.floating]:
    vectors = np.asarray(vectors)
    lengths = np.linalg.norm(vectors, axis=-1, keepdims=True)
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1))
