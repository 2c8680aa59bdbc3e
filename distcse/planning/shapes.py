"""Reads what determines an encoder's cost from its config.json, without reading or downloading weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import ImportString

from distcse.compat.torch import fake_tensors
from distcse.errors import EncoderError, ModelLoadError
from distcse.model_source import is_hub_id
from distcse.models import Encoder, resolve_model
from distcse.models.attention import takes_prepared_mask
from distcse.models.factorized_embeddings import factorize_embeddings
from distcse.models.fast.last_layer import can_stop_at_one
from distcse.models.fast.packing import has_known_layers
from distcse.models.fast.switch import forbid_shortcuts
from distcse.models.folder import ModelFolder, open_model
from distcse.models.head import Dense, DenseShape, Normalize
from distcse.models.layers import keep_layers, layers_of
from distcse.models.loading import embedding_shape, has_dropout, model_class, refuse_unpooled_prompt, set_dropout
from distcse.models.pooling import AT_ONE_TOKEN, NEEDS_ALL_LAYERS
from distcse.models.st_format import Layout, read_layout
from distcse.models.weight_files import has_any_weights
from distcse.recipe import EncoderSection, Pooling, StudentSection, TrainedSection

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
class Blueprint:
    """What an encoder is built from, without weights."""

    config_class: ImportString[Any]
    config: str
    """The backbone's transformers config, as JSON."""
    pooling: Pooling = "mean"
    modules: tuple[DenseShape | None, ...] = ()
    """Modules after pooling; None represents `Normalize`."""
    embedding_size: int | None = None
    """Of factorized embeddings; None without."""
    truncate_dim: int | None = None
    """Number of first dimensions that a sentence vector keeps; None keeps all."""
    is_fast: bool = True
    trust_remote_code: bool = False

    @classmethod
    def of(cls, config: Any, **settings: Any) -> Blueprint:
        """Describe a transformers config."""
        return cls(type(config), json.dumps(config.to_dict(), default=str), **settings)

    def build(
        self,
        layers: Sequence[int] | None,
        fake: AbstractContextManager[Any] | None = None,
        *,
        attention: str = "sdpa",
        dropout: float | None = None,
    ) -> Encoder:
        """Build the product's own encoder, without its tokenizer.

        Args:
            layers: Layers to keep; None keeps all.
            fake: Context of `fake_tensors`, in which weights have shapes only. Default: random weights on the CPU.
            attention: transformers' attention implementation. Default: sdpa.
            dropout: Probability of all dropout layers. Default: the config's.
        """
        import torch
        from torch import nn

        config = self.config_class.from_dict(json.loads(self.config))
        if dropout is not None:
            set_dropout(config, dropout)
        with torch.device("cpu" if fake is None else "meta"):
            backbone = model_class(config).from_config(
                config, attn_implementation=attention, trust_remote_code=self.trust_remote_code
            )
        if layers is not None:
            keep_layers(backbone, layers)
        with fake or nullcontext():
            if fake is not None:
                backbone.to_empty(device="cpu")
                backbone.tie_weights()
            if self.embedding_size is not None:
                backbone = factorize_embeddings(backbone, self.embedding_size)
            head = nn.Sequential(*(Normalize() if dense is None else Dense(dense) for dense in self.modules))
        if not self.is_fast:
            forbid_shortcuts(backbone)
        encoder = Encoder(backbone, SimpleNamespace(mask_token_id=0), self.pooling, 512, head=head)
        encoder.take_settings(Layout(truncate_dim=self.truncate_dim))
        return encoder


@dataclass(frozen=True)
class Shape:
    """An encoder's blueprint and its sizes."""

    name: str
    source: str
    """Where the sizes come from, for the plan's assumptions."""
    blueprint: Blueprint
    layers: int
    width: int
    """h: hidden size."""
    dimension: int
    """d: dimension of a sentence vector."""
    inner: int
    """Width of a layer's widest linear map: the feed-forward layer."""
    vocabulary: int
    embedding_size: int
    parameters: int
    """Number of trained parameters."""
    frozen_parameters: int
    """Parameters in memory that are not trained: a pooler, which no pooling uses."""
    has_dropout: bool
    """Whether two passes in training mode differ, by the model's config."""
    max_length: int | None
    single_token: bool
    """Whether the last layer is computed only at the token that pooling reads (see models/fast/last_layer.py)."""
    packs: bool
    """Whether a batch on a CPU skips its padding (see models/fast/packing.py)."""
    can_record: bool
    """Whether the forward pass can be recorded as a CUDA graph (see models/attention.py)."""

    def with_all_tokens(self) -> Shape:
        """Return the shape of an encoder whose last layer computes all tokens."""
        return replace(self, blueprint=replace(self.blueprint, pooling="mean"), single_token=False)


def read_shape(section: EncoderSection) -> Shape:
    """Return the shape of a recipe's encoder, with a student's chosen layers and embedding size.

    The config.json of a hub model comes from the local cache. If it is not there, the shape of a well-known model follows
    from its name, and the config.json of another one is downloaded.

    Raises:
        ModelNotFoundError: There is no such folder or hub model.
        ModelLoadError: The config.json is not that of an encoder.
        EncoderError: A folder with weights would not load (see `ModelFolder.check`), or the prompt would not be pooled.
    """
    folder = folder_of(section.backbone, section.trust_remote_code)
    if folder is not None and not is_hub_id(section.backbone) and has_any_weights(folder):
        # A hub model's tokenizer may be downloaded later, by the run.
        open_model(section.backbone, section.trust_remote_code).check()
    config, source = _config_of(section.backbone, section.trust_remote_code)
    layout = read_layout(folder) if folder else Layout()
    refuse_unpooled_prompt(section.backbone, layout, section.prompt)
    blueprint = Blueprint.of(
        config,
        pooling=section.pooling or layout.pooling or "mean",
        modules=tuple(dense for _, dense in layout.head),
        embedding_size=section.embedding_size if isinstance(section, StudentSection) else None,
        truncate_dim=layout.truncate_dim,
        is_fast=section.is_fast,
        trust_remote_code=section.trust_remote_code,
    )
    try:
        # Every family has eager attention.
        encoder = blueprint.build(_chosen_layers(section), fake_tensors(), attention="eager")
    except (ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{section.backbone} is not an encoder: {' '.join(str(error).split())[:300]}") from error
    return _shape_of(section, encoder, blueprint, source, section.max_length or layout.max_length)


def masked_lm_head(shape: Shape) -> tuple[int, int]:
    """Return (multiply-adds per token, parameters without the tied embeddings) of a masked-LM head: h × h, then h × V."""
    transform = shape.width * shape.width
    return transform + shape.width * shape.vocabulary, transform + 3 * shape.width + shape.vocabulary


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


def _shape_of(
    section: EncoderSection, encoder: Encoder, blueprint: Blueprint, source: str, max_length: int | None
) -> Shape:
    backbone: Any = encoder.backbone
    stack = layers_of(backbone)
    pooler = getattr(backbone, "pooler", None)
    vocabulary, embedding_size = embedding_shape(backbone)
    frozen = sum(parameter.numel() for parameter in pooler.parameters()) if pooler is not None else 0
    matrices = [weight for weight in stack[-1].parameters() if weight.dim() > 1]  # GPT-2's are not in linear layers
    return Shape(
        name=section.backbone,
        source=source,
        blueprint=blueprint,
        layers=len(stack),
        width=encoder.width,
        dimension=encoder.dimension,
        inner=max(max(weight.shape) for weight in matrices),
        vocabulary=vocabulary,
        embedding_size=embedding_size,
        parameters=sum(parameter.numel() for parameter in encoder.parameters()) - frozen,
        frozen_parameters=frozen,
        has_dropout=has_dropout(backbone.config),
        max_length=max_length,
        single_token=blueprint.pooling in AT_ONE_TOKEN and can_stop_at_one(backbone),
        packs=section.is_fast and blueprint.pooling not in NEEDS_ALL_LAYERS and has_known_layers(backbone),
        can_record=takes_prepared_mask(backbone),
    )
