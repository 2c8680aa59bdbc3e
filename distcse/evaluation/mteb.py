"""MTEB (Muennighoff et al. 2023): its tasks on our models, its STS tasks on a local data folder, its form of results.

Needs the extra `mteb`. A student runs any of its tasks:

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
from distcse.evaluation.evaluation import Candidate
from distcse.evaluation.models import VectorModel
from distcse.evaluation.sts import ScoredPairs
from distcse.evaluation.tables import file_of, read_table
from distcse.models import Encoder

try:
    import mteb
    from mteb.cache import ResultCache
    from mteb.models import ModelMeta
except ImportError as absent:
    raise EvaluationDependencyError(f"{absent}; pip install 'distcse[mteb]'") from None

_TASKS = {known.name: known.name for known in STS} | {"STS-B": "STSBenchmark"}
_SPLITS = {"SICK-R": ("train", "trial", "test")}
"""MTEB's SICK-R is the whole of SICK, 9,927 pairs; the papers' is its test split."""


class MtebEncoder:
    """What mteb takes for a model (its `EncoderProtocol`).

    Args:
        model: Gives the vectors.
        name: Name in results, put under the organisation `distcse` unless it has one.
        dimension: Numbers in a vector, for the results' metadata.
    """

    def __init__(self, model: VectorModel, name: str, dimension: int | None = None) -> None:
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
            training_datasets=None,
        )

    @classmethod
    def of(cls, encoder: Encoder, name: str) -> MtebEncoder:
        """An encoder that is loaded already."""
        return cls(VectorModel.of(encoder), name, encoder.dimension)

    def encode(self, inputs: Iterable[dict[str, Any]], **told: Any) -> NDArray[np.float32]:
        """Batches with the key `text` -> (n, d) vectors. What else mteb tells (task, split, prompt type) changes nothing."""
        return self._model.vectors([text for batch in inputs for text in batch["text"]])

    def similarity(self, first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.floating]:
        """(n, m) cosines."""
        return np.asarray(_unit(first) @ _unit(second).T)

    def similarity_pairwise(self, first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.floating]:
        """(n,) cosines."""
        return np.asarray((_unit(first) * _unit(second)).sum(axis=1))


def sts_tasks(data: Path) -> list[Any]:
    """MTEB's STS tasks whose sentences a data folder holds, with these sentences in them: nothing is fetched."""
    tasks = []
    for known in STS:
        if (pairs := _pairs(data, known)) is not None:
            task = mteb.get_task(_TASKS[known.name])
            task.dataset = {"default": {"test": _dataset(pairs)}}
            task.data_loaded = True
            tasks.append(task)
    if not tasks:
        raise EvaluationDataError(f"{data} holds no set of MTEB's STS tasks")
    return tasks


def write_results(candidates: Sequence[Candidate], data: Path, out: Path) -> Path:
    """Run MTEB's STS tasks on models and write their results as MTEB does; the folder of results.

    Cross-encoders, which have no vectors, are left out.
    """
    logging.getLogger("mteb").setLevel(logging.ERROR)  # the papers' STS-B is one that MTEB calls superseded
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*superseded")
        for candidate in candidates:
            if isinstance(candidate.model, VectorModel):
                mteb.evaluate(
                    MtebEncoder(candidate.model, candidate.about.name),
                    sts_tasks(data),
                    cache=ResultCache(out),
                    overwrite_strategy="always",
                    co2_tracker=False,
                    show_progress_bar=False,
                )
    return out / "results"


def _pairs(data: Path, known: KnownSet) -> ScoredPairs | None:
    files = [file_of(data / known.folder, split) for split in _SPLITS.get(known.name, ("test",))]
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
