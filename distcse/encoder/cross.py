"""A cross-encoder: both sentences of a pair in one pass, one score out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from distcse.encoder.batching import by_length, padded
from distcse.encoder.folder import refuse_pickled_weights, replacing, written_json
from distcse.encoder.loading import load_tokenizer, position_limit
from distcse.encoder.source import resolve_model
from distcse.errors import EncoderError


class CrossEncoder(nn.Module):
    """Pairs of sentences in, one logit a pair out (Trans-Encoder §3.2).

    Args:
        model: A Hugging Face sequence classifier with one label.
        tokenizer: Its fast tokenizer.
        max_length: Tokens kept of a pair, special tokens included; the longer sentence is cut first.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: int) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = max_length

    @classmethod
    def load(cls, path: str | Path, max_length: int | None = None, trust_remote_code: bool = False) -> CrossEncoder:
        """A cross-encoder from a folder or name; also one that sentence-transformers' CrossEncoder saved.

        Raises:
            EncoderError: Nothing there, no safetensors, a head that is missing or has several labels.
        """
        from transformers import AutoModelForSequenceClassification

        folder = resolve_model(str(path), trust_remote_code)
        refuse_pickled_weights(folder)
        try:
            model, told = AutoModelForSequenceClassification.from_pretrained(
                folder,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                dtype=torch.float32,
            )
        except (OSError, ValueError, KeyError, ImportError) as refused:
            raise EncoderError(
                f"{folder} cannot be loaded as a cross-encoder: {' '.join(str(refused).split())[:400]}"
            ) from refused
        if told["missing_keys"]:
            lacking = sorted(told["missing_keys"])
            raise EncoderError(f"{folder} lacks {len(lacking)} weights, such as {lacking[0]}; they would be random")
        if model.config.num_labels != 1:
            raise EncoderError(
                f"{folder} classifies into {model.config.num_labels} labels; a cross-encoder has one score"
            )
        tokenizer = load_tokenizer(folder, trust_remote_code)
        limits = [max_length, tokenizer.model_max_length, position_limit(model)]
        return cls(model.eval(), tokenizer, min(limit for limit in limits if limit))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        batch_tokens: int = 4096,
        on_progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float64]:
        """(n,) pairs -> (n,) probabilities, sigmoid of the logits, in the pairs' order; without dropout or gradient."""
        if not pairs:
            return np.empty(0)
        encoded = self.tokenizer([first for first, _ in pairs], [second for _, second in pairs], **self._cut())
        ids = encoded["input_ids"]
        kinds = encoded.get("token_type_ids")
        logits, done = np.empty(len(pairs)), 0
        was_training = self.training
        self.eval()
        with torch.no_grad():
            for places in by_length(ids, batch_tokens):
                tokens, mask = padded([ids[place] for place in places], self.tokenizer.pad_token_id or 0, self.device)
                inputs = {"input_ids": tokens, "attention_mask": mask}
                if kinds is not None:
                    inputs["token_type_ids"] = padded([kinds[place] for place in places], 0, self.device)[0]
                logits[places] = self.model(**inputs).logits[:, 0].double().cpu().numpy()
                done += len(places)
                if on_progress is not None:
                    on_progress(done)
        self.train(was_training)
        return np.asarray(1 / (1 + np.exp(-logits)))

    def save(self, path: str | Path) -> None:
        """Write a folder that `AutoModelForSequenceClassification` and sentence-transformers' CrossEncoder read."""
        with replacing(Path(path)) as folder:
            self.model.save_pretrained(folder)  # type: ignore[operator]
            self.tokenizer.model_max_length = self.max_length
            self.tokenizer.save_pretrained(folder)

    def _cut(self) -> dict[str, Any]:
        return {"truncation": "longest_first", "max_length": self.max_length, "padding": False}


def is_cross_encoder(folder: Path) -> bool:
    """Whether a model folder says that it classifies sequences."""
    named = written_json(folder / "config.json").get("architectures") or []
    return any(name.endswith("ForSequenceClassification") for name in named)
