"""Backbone and tokenizer from a folder, refused with a reason where they would not be the model's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from distcse.errors import (
    EncoderSettingError,
    MissingWeightsError,
    ModelLoadError,
    NotFiniteError,
    TokenizerMismatchError,
    UnsupportedModelError,
)
from distcse.gc_paused import gc_paused
from distcse.models.fast.dropout import fast_dropout
from distcse.models.prompts import SENTENCE
from distcse.models.st_format import Layout, check_weights
from distcse.models.vocabulary import refuse_broken_files, refuse_without_words, unloadable
from distcse.recipe import EncoderSection, Pooling

_CHOICES = "cls, mean, max, last_token, first_last_avg, last_two_avg, mask"
_LONG = 128
_INSTRUCTOR = "hkunlp/instructor-"
"""Models whose folders do not say that they leave the prompt out; sentence-transformers knows them by name too."""
_ENCODE_AND_DECODE = ("t5", "mt5", "umt5")


def load_backbone(
    folder: Path,
    trust_remote_code: bool,
    dropout: float | None,
    max_length: int | None,
    kind: torch.dtype = torch.float32,
) -> nn.Module:
    """The Hugging Face encoder of a folder, its weights of a kind; its dropout set where one is given.

    Raises:
        EncoderError: The folder does not load as an encoder, or lacks weights, which would be random.
    """
    with gc_paused():
        from transformers import AutoConfig
        from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    check_weights(folder)
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        if dropout is not None:
            set_dropout(config, dropout)
        with gc_paused():  # the family's module, which is imported when it is asked for
            model, told = model_class(config).from_pretrained(
                folder,
                config=config,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                dtype=kind,
                attn_implementation=attention_of(max_length),
            )
    except Exception as refused:  # each library has its own, tokenizers a bare one; all mean that it does not load
        raise ModelLoadError(
            f"{folder} cannot be loaded as an encoder: {' '.join(str(refused).split())[:400]}"
        ) from refused
    missing = sorted(told["missing_keys"])
    lacking = [key for key in missing if not key.startswith("pooler.")]
    if lacking:
        raise MissingWeightsError(f"{folder} lacks {len(lacking)} weights, such as {lacking[0]}; they would be random")
    backbone: nn.Module = model
    require_finite(folder, backbone)
    fast_dropout(backbone)
    if missing:
        backbone.pooler = None  # type: ignore[assignment]
    elif getattr(backbone, "pooler", None) is not None:
        # Not used by any pooling here: kept so that the saved folder is complete, but not trained.
        backbone.pooler.requires_grad_(False)
    return backbone


def model_class(config: Any) -> Any:
    """The class of transformers that makes token vectors of a config's texts: of T5's families the encoder alone."""
    from transformers import AutoModel, AutoModelForTextEncoding

    return AutoModelForTextEncoding if config.model_type in _ENCODE_AND_DECODE else AutoModel


def require_finite(folder: Path, model: nn.Module) -> None:
    """Raise `EncoderError` for a weight that is no number: one is enough to make all vectors NaN."""
    broken = next((name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())), None)
    if broken is not None:
        raise NotFiniteError(f"{folder}: weight {broken} holds NaN or infinity; get the model again")


def attention_of(max_length: int | None) -> str | None:
    """How attention is computed for texts of so many tokens; None leaves it to transformers.

    On a CPU the fused kernel's backward is slow where sentences are short: plain attention makes a bf16 step of a
    three-layer MiniLM 1.37 times as fast. Numbers agree to 4e-6.
    """
    return "eager" if not torch.cuda.is_available() and (max_length or _LONG) < _LONG else None


def set_dropout(config: Any, dropout: float) -> None:
    """Every dropout probability of an encoder's config, whatever its family calls them."""
    for key, _ in dropouts(config):
        setattr(config, key, dropout)


def dropouts(config: Any) -> list[tuple[str, float]]:
    """Names and values of all dropout probabilities in a config."""
    return [
        (key, value)
        for key, value in vars(config).items()
        if "dropout" in key and isinstance(value, float | int) and not isinstance(value, bool)
    ]


def load_tokenizer(folder: Path, trust_remote_code: bool) -> Any:
    """The fast tokenizer of a folder.

    Raises:
        EncoderError: There is none: files are missing, broken or without words, or only a slow tokenizer loads.
    """
    with gc_paused():
        from transformers import AutoTokenizer

    refuse_broken_files(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, use_fast=True, trust_remote_code=trust_remote_code)
    except Exception as refused:  # each library has its own, tokenizers a bare one; all mean that it does not load
        raise unloadable(folder, refused) from refused
    if not tokenizer.is_fast:
        raise TokenizerMismatchError(
            f"{folder} has a slow tokenizer only; save it once with a fast one (tokenizer.json)"
        )
    refuse_without_words(folder, tokenizer)
    return tokenizer


def check_vocabulary(folder: Path, tokenizer: Any, backbone: nn.Module) -> None:
    """Raise `EncoderError` where a tokenizer knows more tokens than the backbone embeds."""
    words = len(tokenizer)
    rows = backbone.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if words > rows:
        raise TokenizerMismatchError(
            f"{folder}: the tokenizer has {words} tokens, the backbone {rows} embeddings; they do not belong together"
        )


def pooling_of(section: EncoderSection, layout: Layout) -> Pooling:
    """What the recipe says, else the folder; `EncoderError` where neither does."""
    pooling = section.pooling or layout.pooling
    if pooling is None:
        raise EncoderSettingError(
            f"{section.backbone} does not say how it pools (no modules.json); set pooling: {_CHOICES}"
        )
    return pooling


def refuse_other_reading(section: EncoderSection, layout: Layout, tokenizer: Any) -> None:
    """Raise `EncoderError` where a model reads texts as distcse does not: its vectors would not be the model's own."""
    if pooling_of(section, layout) == "mask" and (tokenizer.mask_token or SENTENCE) not in section.prompt:
        raise EncoderSettingError(
            f"pooling mask wants a prompt with {tokenizer.mask_token} in it, such as "
            f"'This sentence : \"{SENTENCE}\" means {tokenizer.mask_token}.'; got {section.prompt!r}"
        )
    normalizer = tokenizer.backend_tokenizer.normalizer
    if layout.lower_case and (normalizer is None or normalizer.normalize_str("A") != "a"):
        raise UnsupportedModelError(
            f"{section.backbone} lowercases texts (do_lower_case in sentence_bert_config.json) and its tokenizer does not; "
            "save it with a tokenizer that does"
        )
    if (section.prompt or layout.prompt) and (not layout.pools_prompt or section.backbone.startswith(_INSTRUCTOR)):
        raise UnsupportedModelError(
            f"{section.backbone} leaves the prompt's tokens out of its vectors (include_prompt: false), which distcse does not do"
        )


def position_limit(backbone: nn.Module) -> int | None:
    """Tokens that a backbone has positions for; None where its positions are relative."""
    config: Any = backbone.config
    positions: int | None = getattr(config, "max_position_embeddings", None)
    embeddings = next((m for n, m in backbone.named_modules() if n.endswith("position_embeddings")), None)
    padding = getattr(embeddings, "padding_idx", None)
    if positions is not None and padding is not None:
        positions -= padding + 1  # RoBERTa counts positions from padding_idx + 1
    return positions


def length_limit(section: EncoderSection, layout: Layout, tokenizer: Any, backbone: nn.Module) -> int:
    """Tokens kept of a sentence: what the recipe says, else the folder, else the most the backbone takes."""
    positions = position_limit(backbone)
    wished = section.max_length or layout.max_length
    if wished is None:
        limits = [limit for limit in (tokenizer.model_max_length, positions) if limit and limit < 10**6]
        if not limits:
            raise EncoderSettingError(f"{section.backbone} does not say its length; set max_length")
        return int(min(limits))
    if positions is not None and wished > positions:
        raise EncoderSettingError(
            f"{section.backbone}: max_length is {wished}; allowed: at most {positions}, the backbone's positions"
        )
    return int(wished)
