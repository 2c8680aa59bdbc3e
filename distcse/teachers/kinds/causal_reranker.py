"""Reranker that is a language model, whose score is that of "yes" against "no" as its next token (Qwen3-Reranker and others)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.checks import Check, fail
from distcse.devices.device import arithmetic, default_device, defaults_of
from distcse.errors import MissingDependencyError, UnsuitableTeacherError
from distcse.model_source import resolve_model
from distcse.models import model_fingerprint
from distcse.models.files import check_weights, require_weights
from distcse.models.st_format import backbone_folder
from distcse.teachers.kinds.base import PairKind, frozen_weight_dtype
from distcse.teachers.teacher import Pairs, PairScorer

_SORTED = 256
"""Pairs of similar lengths that are scored between two reports of progress."""


class CausalRerankerKind(PairKind):
    """A folder of sentence-transformers' CrossEncoder, from version 6 on, with the module `LogitScore`.

    It is no model of distcse: that library loads and asks it, with the folder's prompt or chat template.
    """

    name = "reranker"

    @property
    def precision(self) -> str:
        """The section's; `auto` is fp32."""
        return "fp32" if self.section.precision == "auto" else self.section.precision

    def source_fingerprint(self) -> str:
        """Hash the model's files."""
        return model_fingerprint(self.section.backbone, self.section.trust_remote_code)

    @property
    def unread_keys(self) -> Mapping[str, str]:
        return {"pooling": "a reranker has no vectors"}

    def check_settings(self) -> None:
        """Check also that sentence-transformers is there.

        Raises:
            MissingDependencyError: It is not, or too old.
        """
        super().check_settings()
        _import_cross_encoder()

    def check_source(self) -> list[Check]:
        """Check, for the doctor, the section's settings, and that sentence-transformers is there."""
        try:
            self.check_settings()
        except (UnsuitableTeacherError, MissingDependencyError) as error:
            return [fail("teacher", str(error), "or use another teacher")]
        return []

    def open_scorer(self) -> PairScorer:
        """Load the reranker, with weights in the teacher's precision."""
        section, device = self.section, default_device()
        folder = resolve_model(section.backbone, section.trust_remote_code)
        require_weights(backbone_folder(folder))
        check_weights(folder)
        model = _import_cross_encoder()(
            str(folder),
            device=device,
            max_length=section.longest,
            trust_remote_code=section.trust_remote_code,
            local_files_only=True,
            model_kwargs={"dtype": frozen_weight_dtype(self.precision, device), "use_safetensors": True},
        )
        return CausalReranker(model.eval())


class CausalReranker:
    """Scores pairs with sentence-transformers, with the `score_each` and `score` methods of a cross-encoder.

    Args:
        model: Its CrossEncoder.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def score_each(
        self,
        groups: Iterable[Pairs],
        *,
        batch_tokens: int | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> Iterator[NDArray[np.float64]]:
        """Score groups of pairs, one after the other; yield the (n,) scores of each: probabilities of "yes", by default.

        Args:
            groups: The pairs.
            batch_tokens: Maximum number of tokens per forward pass, with padding. Default: the device's.
            precision: `fp32`, or `bf16` / `fp16` for autocast.
            on_progress: Called with the number of pairs scored so far.
        """
        device, done = self._model.device, 0
        budget = batch_tokens or defaults_of(device).frozen_batch_tokens
        for pairs in groups:
            scores = np.empty(len(pairs))
            order = np.argsort([len(query) + len(document) for query, document in pairs])
            for places in np.split(order, range(_SORTED, len(order), _SORTED)):
                part = [pairs[place] for place in places]
                longest = self._model.preprocess(part[-1:])["input_ids"].shape[1]  # with the folder's template
                size = max(1, budget // longest)
                with arithmetic(precision, device):
                    scores[places] = self._model.predict(part, batch_size=size, show_progress_bar=False)
                done += len(part)
                if on_progress is not None:
                    on_progress(done)
            yield scores

    def score(
        self, pairs: Pairs, *, precision: str = "fp32", on_progress: Callable[[int], None] | None = None
    ) -> NDArray[np.float64]:
        """Return the (n,) scores of n pairs."""
        (scores,) = self.score_each([pairs], precision=precision, on_progress=on_progress)
        return scores


def _import_cross_encoder() -> Any:
    try:
        from sentence_transformers import CrossEncoder
        from sentence_transformers.cross_encoder.modules import LogitScore  # noqa: F401
    except ImportError:
        raise MissingDependencyError(
            'a reranker that answers yes or no needs sentence-transformers 6; pip install "sentence-transformers>=6.2"'
        ) from None
    return CrossEncoder
