"""Load a folder's backbone, and refuse folders whose embeddings would differ from the model's."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from distcse.compat import without_noise
from distcse.devices.device import has_gpu
from distcse.devices.process import gc_paused
from distcse.errors import (
    EncoderSettingError,
    ModelFormatError,
    NotFiniteError,
    TokenizerError,
    UnsupportedModelError,
)
from distcse.models.fast_layers import can_stop_at_one
from distcse.models.folder import ModelFolder, model_class
from distcse.models.st_format import Layout
from distcse.models.student import require_layers
from distcse.models.texts import SENTENCE
from distcse.recipe import EncoderSection, Pooling, Role
from distcse.recipe.encoders import TrainedSection
from distcse.text.token_table import Reading

_LOG = logging.getLogger(__name__)
_POOLINGS = "cls, mean, max, last_token, mask"
SHORT_TEXT = 128
"""Tokens up to which a trained model's attention on a CPU is eager; a frozen one's is below them."""
_INSTRUCTOR = "hkunlp/instructor-"
"""These models pool without the prompt, which their folders do not say; sentence-transformers matches the name too."""
_FIRST_POSITION_IS_PADDING = ("roberta", "camembert", "mpnet")
"""Parts of the names of families whose first position follows that of padding (see `position_limit`)."""
_DROPOUT = re.compile("dropout|_pdrop$")
_LAYER_DROPOUT = re.compile("layerdrop$")
_OF_HEADS = ("classifier_", "summary_", "seq_classif_", "qa_", "pooler_", "cls_")
"""Beginnings of the dropout settings of heads, which a backbone does not have; ALBERT has no other one above 0."""


@without_noise()
def load_backbone(
    folder: ModelFolder,
    dropout: float | None,
    max_length: int | None,
    dtype: torch.dtype = torch.float32,
    trains: bool = False,
) -> nn.Module:
    """Load a folder's Hugging Face encoder; `dtype` is that of the matrices of linear layers, all other weights are float32."""
    config = folder.load_config()
    kind = model_class(config)
    if dropout is not None:
        set_dropout(config, dropout)
    model, missing, unexpected = load_pretrained(kind, folder, config, max_length, "an encoder", trains=trains)
    refuse_missing(folder, [key for key in missing if not key.startswith("pooler.")])
    backbone: nn.Module = model
    _report_ignored(folder.backbone, model, unexpected)
    require_finite(folder.backbone, backbone)
    require_text_encoder(folder.backbone, backbone)
    halve_matrices(backbone, dtype)
    if missing:
        backbone.pooler = None  # type: ignore[assignment]
    elif getattr(backbone, "pooler", None) is not None:
        # No pooling uses it: kept so that the saved folder is complete, but not trained.
        backbone.pooler.requires_grad_(False)
    return backbone


def require_text_encoder(folder: Path, backbone: Any) -> None:
    """Try a family on two tokens, because families do not tell that they need more: an image, boxes around words, a language."""
    if can_stop_at_one(backbone):
        return
    ids, output = torch.ones(1, 2, dtype=torch.long), None
    try:
        with torch.inference_mode(), torch.random.fork_rng(devices=[]):  # BigBird draws numbers
            output = backbone(input_ids=ids, attention_mask=torch.ones_like(ids))
        problem = "it has no last_hidden_state"
    except (AttributeError, TypeError, ValueError) as error:  # what families raise for a missing input
        problem = " ".join(str(error).split())[:200]
    if getattr(output, "last_hidden_state", None) is None:
        raise UnsupportedModelError(
            f"{folder} is a {backbone.config.model_type} model, which needs more than a text's tokens ({problem}); "
            "use a text encoder"
        )


def load_pretrained(
    kind: Any,
    folder: ModelFolder,
    config: Any,
    max_length: int | None,
    what: str,
    has_new_head: bool = False,
    trains: bool = False,
) -> tuple[Any, list[str], list[str]]:
    """Load safetensors into a transformers model in float32, and refuse weights of another shape than the config's.

    Returns:
        The model, the names of the weights that the folder lacks, and of those that the model does not use.
    """
    try:
        with gc_paused():  # imports the model family's module
            model, report = kind.from_pretrained(
                folder.backbone,
                config=config,
                use_safetensors=True,
                trust_remote_code=folder.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # refused below, with their names
                dtype=torch.float32,
                attn_implementation=attention_of(max_length, trains),
            )
    except Exception as error:  # the libraries raise many types, tokenizers a bare Exception
        raise ModelFormatError(
            f"{folder.backbone} cannot be loaded as {what}: {' '.join(str(error).split())[:400]}"
        ) from error
    kept = f"{model.base_model_prefix}." if has_new_head and model.base_model_prefix else ""
    if weights := sorted(weight for weight in report["mismatched_keys"] if weight[0].startswith(kept)):
        name, stored, configured = weights[0]
        raise ModelFormatError(
            f"{folder.backbone}: {len(weights)} weights do not have the shape that config.json gives, such as {name}: "
            f"{tuple(stored)}, not {tuple(configured)}; get config.json and weights of the same model"
        )
    return model, sorted(report["missing_keys"]), sorted(report["unexpected_keys"])


def refuse_missing(folder: ModelFolder, missing: Sequence[str], way_out: str = "get the model again") -> None:
    """Refuse a model that lacks weights, which transformers would draw at random."""
    if missing:
        raise ModelFormatError(
            f"{folder.backbone} lacks {len(missing)} weights, such as {missing[0]}, which would be random; {way_out}"
        )


def _report_ignored(folder: Path, backbone: Any, unexpected: Sequence[str]) -> None:
    """Log weights of the folder that belong to a part of the backbone and are not used; heads of a task are no part of it."""
    parts = {name for name, _ in backbone.named_children()}
    ignored = [key for key in unexpected if key.removeprefix(f"{backbone.base_model_prefix}.").split(".")[0] in parts]
    if ignored:
        _log_once(
            f"{folder}: {len(ignored)} weights are not used, such as {ignored[0]}, because config.json describes a smaller "
            "model; if that is not intended, get its config.json again"
        )


@cache
def _log_once(message: str) -> None:
    _LOG.warning(message)


def require_finite(folder: Path, model: nn.Module) -> None:
    """Refuse a model with a NaN or infinite weight, because one makes all embeddings NaN."""
    not_finite = next((name for name, weight in model.named_parameters() if not bool(weight.isfinite().all())), None)
    if not_finite is not None:
        raise NotFiniteError(f"{folder}: weight {not_finite} is NaN or infinite; get the model again")


def attention_of(max_length: int | None, trains: bool) -> str | None:
    """Return transformers' attention implementation for texts of up to `max_length` tokens; None for its default.

    On a CPU, the fused kernel's backward pass is slow for short texts, and batches are packed only with eager attention. It
    makes a bf16 training step of a three-layer MiniLM 1.37 times as fast with 32 tokens, and 1.5 times with 128, where frozen
    passes are faster without it; outputs agree to 4e-6.
    """
    longest = SHORT_TEXT if trains else SHORT_TEXT - 1
    return "eager" if not has_gpu() and max_length is not None and max_length <= longest else None


def set_dropout(config: Any, dropout: float) -> None:
    """Set every dropout probability of an encoder's config, under the names of its family."""
    for key, _ in dropouts(config):
        setattr(config, key, dropout)


def dropouts(config: Any) -> list[tuple[str, float]]:
    """Return names and values of all dropout probabilities in a config, with those of heads."""
    return _probabilities(config, _DROPOUT)


def has_dropout(config: Any) -> bool:
    """Return whether two passes of a backbone in training mode differ: it drops values or skips layers at random."""
    drawn = [
        *((key, value) for key, value in dropouts(config) if not key.startswith(_OF_HEADS)),
        *_probabilities(config, _LAYER_DROPOUT),
    ]
    return any(value > 0 for _, value in drawn)


def _probabilities(config: Any, names: re.Pattern[str]) -> list[tuple[str, float]]:
    return [
        (key, value)
        for key, value in vars(config).items()
        if names.search(key) and isinstance(value, float | int) and not isinstance(value, bool)
    ]


def check_vocabulary(folder: Path, tokenizer: Any, backbone: nn.Module) -> None:
    """Refuse a tokenizer with more tokens than the backbone has embeddings."""
    tokens = len(tokenizer)
    rows, _ = embedding_shape(backbone)
    if 0 < rows < tokens:
        raise TokenizerError(
            f"{folder}: the tokenizer has {tokens} tokens, but the backbone has {rows} embeddings; "
            "save the backbone's own tokenizer in the folder"
        )


def embedding_shape(backbone: nn.Module) -> tuple[int, int]:
    """Return the number V of a backbone's word embeddings, 0 if nothing tells it, and their dimension.

    Custom code may not have `get_input_embeddings`, and a family may have other embeddings; the config has both numbers.
    """
    config: Any = backbone.config
    try:
        words = backbone.get_input_embeddings()  # type: ignore[operator]
    except NotImplementedError:
        words = None
    rows: int = getattr(words, "num_embeddings", getattr(config, "vocab_size", 0))
    size: int = getattr(words, "embedding_dim", config.hidden_size)
    return rows, size


def resolve_pooling(section: EncoderSection, layout: Layout) -> Pooling:
    """Return the recipe's pooling, or else the folder's."""
    pooling = section.pooling or layout.pooling
    if pooling is None:
        raise EncoderSettingError(
            f"{section.backbone} does not define its pooling (no Pooling in modules.json); set pooling: {_POOLINGS}"
        )
    return pooling


def refuse_unsupported_preprocessing(section: EncoderSection, layout: Layout, tokenizer: Any) -> None:
    """Refuse a model whose preprocessing distcse does not reproduce, and a prompt without the [MASK] that pooling needs."""
    if resolve_pooling(section, layout) == "mask" and (tokenizer.mask_token or SENTENCE) not in section.prompt:
        raise EncoderSettingError(
            f"pooling mask needs a prompt with {tokenizer.mask_token}, but prompt is {section.prompt!r}; write, for example, "
            f"'This sentence : \"{SENTENCE}\" means {tokenizer.mask_token}.'"
        )
    if any(tokenizer("a", return_token_type_ids=True).get("token_type_ids", ())):
        raise UnsupportedModelError(
            f"{section.backbone}: its tokenizer gives a text other token types than 0, which distcse does not pass on; use "
            "another model"
        )
    refuse_unpooled_prompt(section, layout)


def refuse_unpooled_prompt(section: EncoderSection, layout: Layout) -> None:
    """Refuse a model that reads texts with a prompt and pools without the prompt's tokens."""
    name, has_prompt = section.backbone, any([section.prompt, layout.prompt, *section.prompts.values()])
    if has_prompt and (not layout.pools_prompt or name.startswith(_INSTRUCTOR)):
        raise UnsupportedModelError(
            f"{name} pools without the prompt's tokens (include_prompt: false), which distcse does not support; "
            "use another model, or one without a prompt"
        )


_ROLE_NAMES: Mapping[Role, Sequence[str]] = {"query": ["query"], "document": ["document", "passage", "corpus"]}
"""Names of the prompts in a folder that sentence-transformers' `encode_query` and `encode_document` take."""


def readings_of(section: EncoderSection, layout: Layout, max_length: int) -> dict[Role, Reading]:
    """Return how an encoder with a maximum length reads each role: by the recipe's prompts, or else by the folder's."""
    readings: dict[Role, Reading] = {}
    for role in get_args(Role):
        prompt = section.role_prompts.get(role, section.prompt or _named(layout.prompts, role, layout.prompt))
        readings[role] = Reading(prompt, section.role_lengths.get(role, max_length))
    return readings


def role_prompts(prompts: Mapping[str, str], readings: Mapping[Role, Reading]) -> dict[str, str]:
    """Return the named prompts of a folder with those of the roles that are not read as named, or as plain texts."""
    changed = {
        role
        for role, names in _ROLE_NAMES.items()
        if readings[role].prompt != _named(prompts, role, readings["text"].prompt)
    }
    others = {
        name: prompt for name, prompt in prompts.items() if all(name not in _ROLE_NAMES[role] for role in changed)
    }
    return {**others, **{role: readings[role].prompt for role in _ROLE_NAMES if role in changed}}


def _named(prompts: Mapping[str, str], role: Role, default: str) -> str:
    """Return the prompt that a folder names for a role. sentence-transformers writes an empty `document` next to a `passage`."""
    found = [prompts[name] for name in _ROLE_NAMES.get(role, ()) if name in prompts]
    return next(filter(None, found), "" if found else default)


def position_limit(backbone: nn.Module) -> int | None:
    """Return the maximum number of tokens by the backbone's position embeddings; None for relative positions."""
    config: Any = backbone.config
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is not None and positions < 1:  # XLNet's -1
        return None
    embeddings = next((m for n, m in backbone.named_modules() if n.endswith("position_embeddings")), None)
    padding = getattr(embeddings, "padding_idx", None)
    if positions is not None and padding is not None:
        positions -= padding + 1  # RoBERTa's positions begin at padding_idx + 1
    return positions


def length_limit(section: EncoderSection, layout: Layout, tokenizer: Any, backbone: nn.Module) -> int:
    """Return the maximum number of tokens per sentence: the recipe's, or else the folder's, or else the backbone's."""
    positions = position_limit(backbone)
    requested = section.longest or layout.max_length
    if requested is None:
        limits = [limit for limit in (tokenizer.model_max_length, positions) if limit and limit < 10**6]
        if not limits:
            raise EncoderSettingError(f"{section.backbone} does not define its maximum length; set max_length")
        return int(min(limits))
    _require_positions(section, requested, positions)
    return int(requested)


def require_fit(section: EncoderSection, config: Any) -> None:
    """Refuse layers and a maximum length that a model does not have, as far as its config tells."""
    depth, positions = (getattr(config, key, None) for key in ("num_hidden_layers", "max_position_embeddings"))
    if isinstance(section, TrainedSection) and section.layers is not None and isinstance(depth, int):
        require_layers(section.layers, depth)
    if section.longest is not None and isinstance(positions, int) and positions > 0:
        if any(name in config.model_type for name in _FIRST_POSITION_IS_PADDING) and config.pad_token_id is not None:
            positions -= config.pad_token_id + 1
        _require_positions(section, section.longest, positions)


def _require_positions(section: EncoderSection, requested: int, positions: int | None) -> None:
    if positions is not None and requested > positions:
        raise EncoderSettingError(
            f"{section.backbone}: max_length is {requested}; allowed: at most {positions}, the backbone's positions"
        )


def halve_matrices(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the weights of a frozen model's linear layers in place, so that autocast does not convert them in every pass.

    Embeddings and norms stay float32: they are a small part of the time, and half of the rounding error. Cosines of
    all-MiniLM-L6-v2 (1,024 sentences, all pairs, autocast as on a GPU, simulated on a CPU) then change by at most 3.3e-4 in
    fp16 and 2.6e-3 in bf16, instead of 5.6e-4 and 4.2e-3. TF32, with the mantissa of fp16, changes them by 3.1e-4.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype)
