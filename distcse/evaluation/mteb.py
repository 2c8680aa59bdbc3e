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

from distcse.devices.host import pip_install
from distcse.errors import EvaluationDataError, MissingDependencyError
from distcse.evaluation.candidates import LoadOptions
from distcse.evaluation.contamination import NOTICED_FROM, Contamination
from distcse.evaluation.evaluation import Candidate
from distcse.evaluation.models import VectorModel
from distcse.evaluation.suites import STS, KnownSet
from distcse.evaluation.tables import find_table, read_table
from distcse.evaluation.tasks.sts import ScoredPairs
from distcse.models import Encoder, model_fingerprint
from distcse.models.texts import is_template
from distcse.storage import content_key

try:
    import mteb
    from mteb.cache import ResultCache
    from mteb.models import ModelMeta
    from mteb.models.abs_encoder import AbsEncoder
except ImportError as absent:
    raise MissingDependencyError(f"{absent}; {pip_install('mteb')}") from None

_TASKS = {known.name: known.name for known in STS} | {"STS-B": "STSBenchmark"}
_SPLITS = {"SICK-R": ("train", "trial", "test")}
"""MTEB's SICK-R is all of SICK, 9,927 pairs; the papers' is its test split."""


class MtebEncoder(AbsEncoder):  # type: ignore[misc]
    """A model for MTEB, which reads texts as MTEB's wrapper of sentence-transformers does.

    Args:
        model: Encodes the texts.
        name: Name in MTEB's results; `distcse/` is prepended unless it contains a slash.
        revision: Identifies the weights in MTEB's results, which are reused for the same name and revision.
        dimension: Dimension of the vectors, for MTEB's metadata.
        training_datasets: Names of tasks whose sentences were in the training text, for MTEB's metadata. Default: unknown.
    """

    def __init__(
        self,
        model: VectorModel,
        name: str,
        revision: str,
        dimension: int | None = None,
        training_datasets: set[str] | None = None,
    ) -> None:
        self._model = model
        encoder = model.encoder
        self.model_prompts = {} if encoder is None else dict(encoder.prompts)
        self.mteb_model_meta = ModelMeta(
            loader=None,
            name=name if "/" in name else f"distcse/{name}",
            revision=revision,
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
            similarity_fn_name="dot" if encoder is not None and encoder.similarity == "dot" else "cosine",
            use_instructions=False,
            training_datasets=training_datasets,
        )

    @classmethod
    def of(cls, encoder: Encoder, name: str) -> MtebEncoder:
        """Wrap a loaded encoder. Its revision is a hash of the weights and of all other settings of its vectors."""
        return cls(VectorModel.of(encoder), name, encoder.fingerprint(), encoder.dimension)

    def encode(
        self, inputs: Iterable[dict[str, Any]], *, task_metadata: Any, prompt_type: Any = None, **ignored: Any
    ) -> NDArray[np.float32]:
        """Encode batches with the key `text` into (n, d) vectors.

        The folder's prompt for the task, the task's type or the type of text (`query`, `document`) is put before each text. A
        text of a type that the folder has no prompt for has none; a text without a type has the encoder's own prompt.

        Args:
            inputs: The batches.
            task_metadata: MTEB's description of the task.
            prompt_type: MTEB's type of the texts; None in tasks that don't distinguish queries from documents.
            ignored: Further arguments of MTEB's protocol.
        """
        texts = [text for batch in inputs for text in batch["text"]]
        name = self.get_prompt_name(task_metadata, prompt_type) or (prompt_type and prompt_type.value)
        encoder = self._model.encoder
        if name is None or encoder is None or encoder.pooling == "mask" or is_template(encoder.prompt):
            return self._model.vectors(texts)
        return self._model.with_prompt(name).vectors(texts)


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


def write_results(candidates: Sequence[Candidate], data: Path, out: Path, options: LoadOptions) -> Path:
    """Run MTEB's STS tasks on bi-encoders, write MTEB's result files, and return their folder.

    Cross-encoders are skipped, because they have no vectors.

    Args:
        candidates: The models.
        data: Folder with the published sets.
        out: Folder of MTEB's cache.
        options: How the models were loaded, which is a part of their revisions.
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
                        _revision(candidate, options),
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


def _revision(candidate: Candidate, options: LoadOptions) -> str:
    if candidate.folder is not None:  # the loaded weights may be in another layout, such as oneDNN's
        model = model_fingerprint(candidate.folder, options.trust_remote_code)
    else:
        assert isinstance(candidate.model, VectorModel) and candidate.model.encoder is not None
        model = candidate.model.encoder.fingerprint()
    prompt = options.prompt_of(candidate.info.name)
    return content_key([model, options.pooling, options.max_length, prompt, options.resolved_precision])


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
