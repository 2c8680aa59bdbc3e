"""A cross-encoder: both sentences of a pair in one pass, one score out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distcse.errors import EncoderSettingError, MissingWeightsError, ModelLoadError, UnsupportedModelError
from distcse.models.attention import prepare_mask
from distcse.models.batching import by_length, padded
from distcse.models.fast.dropout import fast_dropout
from distcse.models.fast.last_layer import can_stop_at_one
from distcse.models.fast.packing import short_cut
from distcse.models.layers import keep_layers
from distcse.models.loading import attention_of, load_tokenizer, position_limit, require_finite, set_dropout
from distcse.models.precision import arithmetic
from distcse.models.source import resolve_model
from distcse.models.st_format import check_weights, refuse_pickled_weights, replacing, written_json
from distcse.storage import resolve_path, upload_dir

_READ_FIRST = tuple(
    f"{family}ForSequenceClassification"
    for family in ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "DistilBert", "MPNet")
)
"""Classes whose head reads the first token alone."""


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
        folder = resolve_model(str(path), trust_remote_code)
        model, lacking = _load_scorer(folder, trust_remote_code, max_length)
        if lacking:
            raise MissingWeightsError(
                f"{folder} lacks {len(lacking)} weights, such as {lacking[0]}; they would be random"
            )
        if model.config.num_labels != 1:
            raise UnsupportedModelError(
                f"{folder} classifies into {model.config.num_labels} labels; a cross-encoder has one score"
            )
        tokenizer = load_tokenizer(folder, trust_remote_code)
        limits = [max_length, tokenizer.model_max_length, position_limit(model)]
        return cls(model.eval(), tokenizer, min(limit for limit in limits if limit))

    @classmethod
    def fresh(
        cls,
        path: str | Path,
        max_length: int,
        layers: Sequence[int] | None = None,
        dropout: float | None = None,
        trust_remote_code: bool = False,
    ) -> CrossEncoder:
        """A cross-encoder that is to be trained: an encoder's weights under a head from the current random state.

        Raises:
            EncoderError: The folder does not load, or lacks weights of its encoder.
        """
        folder = resolve_model(str(path), trust_remote_code)
        model, lacking = _load_scorer(folder, trust_remote_code, max_length, labels=1, dropout=dropout)
        prefix = f"{model.base_model_prefix}."
        lost = [key for key in lacking if key.startswith(prefix) and "pooler." not in key]
        if lost:
            raise MissingWeightsError(f"{folder} lacks {len(lost)} weights, such as {lost[0]}; they would be random")
        if layers is not None:
            keep_layers(model.base_model, layers)
        positions = position_limit(model)
        if positions is not None and max_length > positions:
            raise EncoderSettingError(
                f"{path}: cross.max_length is {max_length}; allowed: at most {positions}, the backbone's positions"
            )
        return cls(model, load_tokenizer(folder, trust_remote_code), max_length)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def forward(
        self, ids: Tensor, mask: Tensor, places: Tensor | None = None, *, kinds: Tensor | None = None
    ) -> Tensor:
        """(B, L) token ids, mask and, where the model tells a pair's sentences apart, token types -> (B,) logits.

        With the (T,) places of all tokens in the flat batch, ascending, the pass leaves other padding out where it can.
        """
        inputs = {"input_ids": ids, "attention_mask": prepare_mask(self.model, mask)}
        if kinds is not None:
            inputs["token_type_ids"] = kinds
        reads_first = type(self.model).__name__ in _READ_FIRST and can_stop_at_one(self.model)
        first = ids.new_zeros(len(ids)) if reads_first else None
        with short_cut(self.model, mask, places if reads_first else None, first):
            logits: Tensor = self.model(**inputs).logits[:, 0]
        return logits

    def token_ids(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]] | None]:
        """Token ids of each pair, cut to `max_length`, and token types where the tokenizer has them."""
        encoded = self.tokenizer(
            [first for first, _ in pairs],
            [second for _, second in pairs],
            truncation="longest_first",
            max_length=self.max_length,
            padding=False,
        )
        return encoded["input_ids"], encoded.get("token_type_ids")

    def score(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        batch_tokens: int = 4096,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float64]:
        """(n,) pairs -> (n,) probabilities, sigmoid of the logits, in the pairs' order; without dropout or gradient.

        `precision` is `fp32`, or `bf16` / `fp16` autocast.
        """
        if not pairs:
            return np.empty(0)
        ids, kinds = self.token_ids(pairs)
        logits, done = np.empty(len(pairs)), 0
        was_training = self.training
        self.eval()
        with torch.no_grad(), arithmetic(precision, self.device):
            for places in by_length(ids, batch_tokens):
                tokens, mask = padded([ids[index] for index in places], self.tokenizer.pad_token_id or 0, self.device)
                sides = None
                if kinds is not None:
                    sides = padded([kinds[index] for index in places], 0, self.device)[0]
                logits[places] = self(tokens, mask, kinds=sides).double().cpu().numpy()
                done += len(places)
                if on_progress is not None:
                    on_progress(done)
        self.train(was_training)
        return np.asarray(1 / (1 + np.exp(-logits)))

    def save(self, path: str | Path) -> None:
        """Write a folder that `AutoModelForSequenceClassification` and sentence-transformers' CrossEncoder read."""
        with replacing(resolve_path(path)) as folder:
            self.model.save_pretrained(folder)  # type: ignore[operator]
            self.tokenizer.model_max_length = self.max_length
            self.tokenizer.save_pretrained(folder)
        upload_dir(resolve_path(path))


def is_cross_encoder(folder: Path) -> bool:
    """Whether a model folder says that it classifies sequences."""
    named = written_json(folder / "config.json").get("architectures")
    return isinstance(named, list) and any(
        isinstance(name, str) and name.endswith("ForSequenceClassification") for name in named
    )


def _load_scorer(
    folder: Path,
    trust_remote_code: bool,
    max_length: int | None,
    labels: int | None = None,
    dropout: float | None = None,
) -> tuple[Any, list[str]]:
    """A sequence classifier in float32, and the names of weights that the folder lacks."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    refuse_pickled_weights(folder)
    check_weights(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if labels is not None:
            config.num_labels = labels
        if dropout is not None:
            set_dropout(config, dropout)
        with _silent_report():
            model, told = AutoModelForSequenceClassification.from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                dtype=torch.float32,
                attn_implementation=attention_of(max_length),
            )
    except Exception as refused:  # see load_backbone
        raise ModelLoadError(
            f"{folder} cannot be loaded as a cross-encoder: {' '.join(str(refused).split())[:400]}"
        ) from refused
    require_finite(folder, model)
    fast_dropout(model)
    return model, sorted(told["missing_keys"])


@contextmanager
def _silent_report() -> Iterator[None]:
    """Transformers warns of weights that are fresh; here they are meant to be, or are refused by name."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False
