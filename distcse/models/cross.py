"""The cross-encoder: scores a pair of sentences in one forward pass."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distcse.compat import without_noise
from distcse.errors import EncoderSettingError, UnsupportedModelError
from distcse.models.cpu_kernels import fast_dropout
from distcse.models.fast_layers import can_stop_at_one, prepare_mask, short_cut
from distcse.models.files import check_weights, read_json
from distcse.models.folder import ModelFolder, open_model
from distcse.models.frozen_pass import Chunk, TokenBudget, run_frozen, split_chunks
from distcse.models.loading import (
    load_pretrained,
    position_limit,
    refuse_missing,
    require_finite,
    require_text_encoder,
    set_dropout,
)
from distcse.models.saving import replacing, save_model
from distcse.models.st_format import backbone_folder
from distcse.models.student import keep_layers
from distcse.models.texts import TOKENIZED_TEXTS, as_pairs
from distcse.storage import ArtifactStore
from distcse.text.token_table import tokenizing

_SETTINGS = "config_sentence_transformers.json"
_SIGMOID = "torch.nn.modules.activation.Sigmoid"
"""The default for a head with one label."""
_OLD_KEYS = ("sentence_transformers", "sbert_ce_default_activation_function")
"""Where sentence-transformers 2 to 5.3 name the activation in config.json: a dictionary, and before that the name itself."""
# A fixed table, because a class named by a model's file must not be imported.
_ACTIVATIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "Sigmoid": lambda logits: 1 / (1 + np.exp(-logits)),
    "Identity": lambda logits: logits,
    "Tanh": np.tanh,
}
_FIRST_TOKEN_CLASSIFIERS = tuple(
    f"{family}ForSequenceClassification"
    for family in ("Bert", "Roberta", "XLMRoberta", "Camembert", "Electra", "DistilBert")
)
"""Classes whose head reads only the first token."""


_POSITIVE = re.compile("label_1|1|yes|true|positive|relevant|similar|equivalent|duplicate|paraphrase", re.IGNORECASE)
"""Names of the second of two labels that say that it is the score of similar pairs; the first is the default's."""


class CrossEncoder(nn.Module):
    """Scores pairs of sentences, one logit per pair (Trans-Encoder, Liu et al. 2022, §3.2).

    Args:
        model: A Hugging Face sequence classifier with one label, or with two, whose logits' difference it takes.
        tokenizer: Its fast tokenizer.
        max_length: Maximum number of tokens per pair, with special tokens; the longer sentence is truncated first.
        activation: Qualified name of the function between logits and scores. Default: the sigmoid.
    """

    def __init__(self, model: nn.Module, tokenizer: Any, max_length: int, activation: str = _SIGMOID) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.activation = activation
        self.token_budget = TokenBudget()

    @classmethod
    def load(
        cls,
        path: str | Path,
        max_length: int | None = None,
        trust_remote_code: bool = False,
    ) -> CrossEncoder:
        """Load a trained cross-encoder, also one that sentence-transformers' CrossEncoder saved.

        Args:
            path: Folder or name (see `resolve_model`).
            max_length: Maximum number of tokens per pair. Default: the tokenizer's or the backbone's limit.
            trust_remote_code: Whether to run the model's own Python code.

        Raises:
            ModelNotFoundError: No such model exists.
            PickledWeightsError: The weights are not safetensors.
            ModelFormatError: Weights are missing, such as those of the head.
            UnsupportedModelError: It does not score pairs as sentence-transformers' CrossEncoder would (see `check_scorer`).
        """
        folder = open_model(str(path), trust_remote_code)
        activation = check_scorer(folder)
        model, missing = _load_classifier(folder, max_length)
        refuse_missing(folder, missing, "train it first")
        tokenizer = folder.load_tokenizer()
        limits = [max_length, folder.layout.max_length, tokenizer.model_max_length, position_limit(model)]
        return cls(model.eval(), tokenizer, min(limit for limit in limits if limit), activation)

    @classmethod
    def fresh(
        cls,
        path: str | Path,
        max_length: int,
        layers: Sequence[int] | None = None,
        dropout: float | None = None,
        trust_remote_code: bool = False,
    ) -> CrossEncoder:
        """Create a cross-encoder for training from an encoder's weights and a randomly initialized head; it scores by sigmoid.

        Args:
            path: Folder or name of the encoder (see `resolve_model`).
            max_length: Maximum number of tokens per pair.
            layers: Indices of the layers to keep. Default: all.
            dropout: Dropout probability of all dropout layers. Default: the config's.
            trust_remote_code: Whether to run the model's own Python code.

        Raises:
            ModelNotFoundError: No such model exists.
            ModelFormatError: transformers cannot load it as a sequence classifier, or weights of the encoder are missing.
            EncoderSettingError: `layers` or `max_length` does not fit the backbone.
        """
        folder = open_model(str(path), trust_remote_code)
        model, missing = _load_classifier(folder, max_length, labels=1, dropout=dropout)
        prefix = f"{model.base_model_prefix}."
        refuse_missing(folder, [key for key in missing if key.startswith(prefix) and "pooler." not in key])
        if layers is not None:
            keep_layers(model.base_model, layers)
        positions = position_limit(model)
        if positions is not None and max_length > positions:
            raise EncoderSettingError(
                f"{path}: cross.max_length is {max_length}; allowed: at most {positions}, the backbone's positions"
            )
        return cls(model, folder.load_tokenizer(), max_length)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def forward(
        self, ids: Tensor, mask: Tensor, token_index: Tensor | None = None, *, kinds: Tensor | None = None
    ) -> Tensor:
        """Return (B,) logits.

        Args:
            ids: (B, L) token ids.
            mask: (B, L), 1 at tokens and 0 at padding.
            token_index: (T,) ascending indices of all tokens in the flattened batch, to skip padding where the model can
                (see `Tokens`). Default: compute the padded batch.
            kinds: (B, L) token type ids, for tokenizers that have them.
        """
        inputs = {"input_ids": ids, "attention_mask": prepare_mask(self.model, mask)}
        if kinds is not None:
            inputs["token_type_ids"] = kinds
        knows_head = type(self.model).__name__ in _FIRST_TOKEN_CLASSIFIERS
        reads_first = knows_head and can_stop_at_one(self.model)
        first = ids.new_zeros(len(ids)) if reads_first else None
        with short_cut(self.model, mask, token_index if reads_first else None, first):
            logits: Tensor = self.model(**inputs).logits
        # Of two labels, the sigmoid of the difference is the probability of the second.
        return logits[:, 0] if logits.shape[1] == 1 else logits[:, 1] - logits[:, 0]

    def token_ids(self, pairs: Sequence[tuple[str, str]]) -> tuple[list[list[int]], list[list[int]] | None]:
        """Return the token ids of each pair, truncated to `max_length`, and token type ids if the tokenizer has them."""
        ids: list[list[int]] = []
        kinds: list[list[int]] = []
        for begin in range(0, len(pairs), TOKENIZED_TEXTS):
            with tokenizing(self.tokenizer, self.max_length) as backend:
                encodings = backend.encode_batch_fast(list(pairs[begin : begin + TOKENIZED_TEXTS]))
            ids += [encoding.ids for encoding in encodings]
            kinds += [encoding.type_ids for encoding in encodings]
        return ids, kinds if "token_type_ids" in self.tokenizer.model_input_names else None

    def score(
        self,
        pairs: Iterable[Sequence[str]],
        *,
        batch_tokens: int | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float64]:
        """Score n pairs; return (n,) activated logits, without dropout or gradient: probabilities, unless the folder differs.

        Args:
            pairs: The pairs.
            batch_tokens: Maximum number of tokens per forward pass, with padding. Default: 2048 on a CPU, 65536 on a GPU;
                halved where the GPU's memory does not suffice.
            precision: `fp32` (default), or `bf16` / `fp16` for autocast.
            on_progress: Called with the number of pairs scored so far.

        Raises:
            ArgumentError: `pairs` are not pairs of texts; names the first that is none.
            DeviceMemoryError: A pair does not fit in the GPU's memory.
        """
        parts = self.score_each(
            split_chunks(as_pairs(pairs), self.device),
            batch_tokens=batch_tokens,
            precision=precision,
            on_progress=on_progress,
        )
        return np.concatenate([np.empty(0), *parts])

    def score_each(
        self,
        groups: Iterable[Sequence[tuple[str, str]]],
        *,
        batch_tokens: int | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> Iterator[NDArray[np.float64]]:
        """Score groups of pairs, one after the other, as `score` does.

        On a GPU, the next group is tokenized and queued before a group's scores are yielded.

        Args:
            groups: The groups, such as the lists of several steps. On a GPU, a thread advances this iterator.
            batch_tokens: See `score`.
            precision: See `score`.
            on_progress: Called with the number of pairs scored so far, of all groups.

        Yields:
            The (n,) scores of each group's n pairs.

        Raises:
            DeviceMemoryError: A pair does not fit in the GPU's memory.
        """

        def chunks() -> Iterator[Chunk]:
            for pairs in groups:
                ids, kinds = self.token_ids(pairs)
                yield Chunk([ids] if kinds is None else [ids, kinds], np.empty(len(pairs)))

        def forward(tokens: Tensor) -> Tensor:
            ids, *kinds, mask = tokens
            logits: Tensor = self(ids, mask, kinds=kinds[0] if kinds else None)
            return logits.double()

        for chunk in run_frozen(
            self,
            forward,
            chunks(),
            pads=[self.tokenizer.pad_token_id or 0, 0],
            budget=self.token_budget,
            batch_tokens=batch_tokens,
            precision=precision,
            on_progress=on_progress,
        ):
            yield _ACTIVATIONS[self.activation.rpartition(".")[2]](chunk.out)

    @without_noise()
    def save(self, path: str | Path | ArtifactStore) -> None:
        """Write a folder that `AutoModelForSequenceClassification` and sentence-transformers' CrossEncoder load."""
        settings: Any = vars(self.model.config)
        for key in _OLD_KEYS:
            settings.pop(key, None)
        if self.activation != _SIGMOID:  # every version of sentence-transformers that reads our folders finds it here
            settings[_OLD_KEYS[0]] = {"activation_fn": self.activation}
        with replacing(path) as folder:
            save_model(self.model, self.tokenizer, folder, self.max_length)


def is_cross_encoder(folder: Path) -> bool:
    """Return whether the architecture in a folder's config.json is a sequence classifier."""
    names = read_json(backbone_folder(folder) / "config.json").get("architectures")
    return isinstance(names, list) and any(
        isinstance(name, str) and name.endswith("ForSequenceClassification") for name in names
    )


def is_causal_reranker(folder: Path) -> bool:
    """Return whether a folder is a language model whose next token scores a pair, as sentence-transformers 6 saves it."""
    modules = read_json(folder / "modules.json", list)
    return any(isinstance(module, dict) and str(module.get("type")).endswith(".LogitScore") for module in modules)


def check_scorer(folder: ModelFolder) -> str:
    """Check that a folder's settings are those of a cross-encoder that distcse can use; return the name of its activation."""
    if folder.layout.prompt:
        raise UnsupportedModelError(
            f"{folder.root} has the default prompt {folder.layout.prompt!r:.60}, which distcse does not put before pairs; use a "
            "cross-encoder without one"
        )
    config = folder.load_config()
    if config.num_labels not in (1, 2):
        raise UnsupportedModelError(
            f"{folder.backbone} has {config.num_labels} labels, but a cross-encoder has one or two; use a model with one label"
        )
    if config.num_labels == 2 and not _POSITIVE.fullmatch(config.id2label[1]):
        raise UnsupportedModelError(
            f"{folder.backbone} has the labels {config.id2label[0]!r:.40} and {config.id2label[1]!r:.40}, and a cross-encoder's "
            "second one is that of similar pairs, such as 'relevant'; rename it in config.json if it is, or use another model"
        )
    old, oldest = (getattr(config, key, None) for key in _OLD_KEYS)
    named = old.get("activation_fn", oldest) if isinstance(old, dict) else oldest
    if (folder.root / "modules.json").is_file():  # else, sentence-transformers does not read the settings
        named = read_json(folder.root / _SETTINGS).get("activation_fn") or named
    name = _SIGMOID if named is None else named
    if not isinstance(name, str) or not name.startswith("torch.nn.") or name.rpartition(".")[2] not in _ACTIVATIONS:
        raise UnsupportedModelError(
            f"{folder.root} turns logits into scores by {name!r:.100}, which distcse does not compute; supported: "
            f"{', '.join(_ACTIVATIONS)}"
        )
    return name


@without_noise()
def _load_classifier(
    folder: ModelFolder, max_length: int | None, labels: int | None = None, dropout: float | None = None
) -> tuple[Any, list[str]]:
    """Return a sequence classifier in float32, and the names of the weights that the folder lacks."""
    from transformers import AutoModelForSequenceClassification

    check_weights(folder.root)
    config = folder.load_config()
    has_new_head = labels is not None and config.num_labels != labels
    if has_new_head:
        config.num_labels = labels
    if dropout is not None:
        set_dropout(config, dropout)
    model, missing, _ = load_pretrained(
        AutoModelForSequenceClassification,
        folder,
        config,
        max_length,
        "a cross-encoder",
        has_new_head,
        trains=labels is not None,
    )
    require_finite(folder.backbone, model)
    require_text_encoder(folder.backbone, model.base_model)
    fast_dropout(model)
    return model, missing
