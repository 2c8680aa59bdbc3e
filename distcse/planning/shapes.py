"""Reads an encoder's sizes from its config.json, on PyTorch's meta device: no weights are read or downloaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from distcse.errors import EncoderError, ModelFormatError
from distcse.model_source import is_hub_id
from distcse.models import Encoder, resolve_model
from distcse.models.factorized_embeddings import factorize_embeddings
from distcse.models.folder import ModelFolder, open_model
from distcse.models.head import Dense, Normalize
from distcse.models.layers import keep_layers, layers_of
from distcse.models.loading import embedding_shape, has_dropout, model_class, refuse_unpooled_prompt
from distcse.models.st_format import Layout, read_layout
from distcse.models.weight_files import has_any_weights
from distcse.recipe import EncoderSection, StudentSection, TrainedSection

_FILES = ["config.json"]
_LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
_ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}
_PUBLISHED: dict[str, tuple[str, dict[str, int]]] = {
    # Part of a hub name -> model type and published sizes: BERT (Devlin et al. 2019, §3), RoBERTa (Liu et al. 2019),
    # DistilBERT (Sanh et al. 2019), MiniLM (Wang et al. 2020). The config classes' defaults are the base models' sizes.
    "distilroberta-base": ("roberta", {**_ROBERTA, "num_hidden_layers": 6}),
    "distilbert-base-uncased": ("distilbert", {}),
    "unsup-promptbert": ("bert", {}),
    "minilm-l6": ("bert", {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}),
    "bert-base-uncased": ("bert", {}),
    "bert-large-uncased": ("bert", _LARGE),
    "roberta-base": ("roberta", _ROBERTA),
    "roberta-large": ("roberta", {**_ROBERTA, **_LARGE}),
}


@dataclass(frozen=True)
class Shape:
    """The sizes of an encoder that determine its cost."""

    name: str
    source: str
    """Where the sizes come from, for the plan's assumptions."""
    layers: int
    width: int
    """h: hidden size."""
    dimension: int
    """d: dimension of a sentence vector."""
    vocabulary: int
    parameters: int
    """Number of trained parameters."""
    frozen_parameters: int
    """Parameters in memory that are not trained: a pooler, which no pooling uses."""
    matrices: int
    """P: parameters of the layers' linear maps, through which every token goes."""
    has_dropout: bool
    """Whether two passes in training mode differ, by the model's config."""


def read_shape(section: EncoderSection) -> Shape:
    """Return the shape of a recipe's encoder, with a student's chosen layers and embedding size.

    The config.json of a hub model comes from the local cache. If it is not there, the shape of a well-known model follows
    from its name, and the config.json of another one is downloaded.

    Raises:
        ModelNotFoundError: There is no such folder or hub model.
        ModelFormatError: The config.json is not that of an encoder.
        EncoderError: A folder with weights would not load (see `ModelFolder.check`), or the prompt would not be pooled.
    """
    folder = folder_of(section.backbone, section.trust_remote_code)
    if folder is not None and not is_hub_id(section.backbone) and has_any_weights(folder):
        # A hub model's tokenizer may be downloaded later, by the run.
        open_model(section.backbone, section.trust_remote_code).check()
    config, source = _config_of(section.backbone, section.trust_remote_code)
    layout = read_layout(folder) if folder else Layout()
    refuse_unpooled_prompt(section.backbone, layout, section.prompt)
    try:
        encoder = _build(section, config, layout)
    except (ValueError, KeyError, ImportError) as error:
        raise ModelFormatError(f"{section.backbone} is not an encoder: {' '.join(str(error).split())[:300]}") from error
    backbone: Any = encoder.backbone
    stack, pooler = layers_of(backbone), getattr(backbone, "pooler", None)
    frozen = sum(parameter.numel() for parameter in pooler.parameters()) if pooler is not None else 0
    return Shape(
        name=section.backbone,
        source=source,
        layers=len(stack),
        width=encoder.width,
        dimension=encoder.dimension,
        vocabulary=embedding_shape(backbone)[0],
        parameters=sum(parameter.numel() for parameter in encoder.parameters()) - frozen,
        frozen_parameters=frozen,
        matrices=sum(weight.numel() for layer in stack for weight in layer.parameters() if weight.dim() > 1),
        has_dropout=has_dropout(backbone.config),
    )


def _build(section: EncoderSection, config: Any, layout: Layout) -> Encoder:
    """Build the product's own encoder on the meta device, without its tokenizer."""
    with torch.device("meta"):
        # Every family has eager attention.
        backbone = model_class(config).from_config(
            config, attn_implementation="eager", trust_remote_code=section.trust_remote_code
        )
        if (layers := _chosen_layers(section)) is not None:
            keep_layers(backbone, layers)
        if isinstance(section, StudentSection) and section.embedding_size is not None:
            backbone = factorize_embeddings(backbone, section.embedding_size)
        head = nn.Sequential(*(Normalize() if dense is None else Dense(dense) for _, dense in layout.head))
    pooling = section.pooling or layout.pooling or "mean"
    encoder = Encoder(backbone, SimpleNamespace(mask_token_id=0), pooling, 512, head=head)
    encoder.take_settings(Layout(truncate_dim=layout.truncate_dim))
    return encoder


def folder_of(name: str, trust_remote_code: bool = False) -> Path | None:
    """Return the local folder with a model's config.json; None if the model would have to be downloaded."""
    try:
        return resolve_model(name, trust_remote_code, _FILES, only_local=True)
    except EncoderError:
        return None


def _config_of(name: str, trust_remote_code: bool) -> tuple[Any, str]:
    from transformers import AutoConfig

    folder = folder_of(name, trust_remote_code)
    if folder is None and not (Path(name).expanduser().is_absolute() or name.startswith((".", "package:"))):
        for part, (family, sizes) in _PUBLISHED.items():
            if part in name.lower():
                return AutoConfig.for_model(family, **sizes), "the sizes published for its name, config.json not read"
    if folder is None:
        folder = resolve_model(name, trust_remote_code, _FILES)
    return ModelFolder.read(folder, trust_remote_code).load_config(), "config.json"


def _chosen_layers(section: EncoderSection) -> Sequence[int] | None:
    if not isinstance(section, TrainedSection) or section.layers is None:
        return None
    if isinstance(section, StudentSection) and section.num_layers is not None:
        return range(section.num_layers)
    return section.named_layers
