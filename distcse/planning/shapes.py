"""Reads the shape of a backbone from its config.json, without reading or downloading weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distcse.errors import EncoderError, ModelLoadError
from distcse.models import resolve_model
from distcse.models.attention import takes_prepared_mask
from distcse.models.fast.last_layer import can_stop_at_one
from distcse.models.fast.packing import has_known_layers
from distcse.models.pooling import AT_ONE_TOKEN, NEEDS_ALL_LAYERS
from distcse.models.source import is_hub_id
from distcse.models.st_format import Layout, read_layout
from distcse.recipe import EncoderSection, StudentSection, TrainedSection

_FILES = ["config.json"]

_PUBLISHED: dict[str, tuple[str, dict[str, int]]] = {
    # Part of a hub name -> model type and published sizes: BERT (Devlin et al. 2019, §3), RoBERTa (Liu et al. 2019),
    # DistilBERT (Sanh et al. 2019), MiniLM (Wang et al. 2020). The config classes' defaults are the base models' sizes.
    "distilroberta-base": (
        "roberta",
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "num_hidden_layers": 6},
    ),
    "distilbert-base-uncased": ("distilbert", {}),
    "unsup-promptbert": ("bert", {}),
    "minilm-l6": ("bert", {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536}),
    "bert-base-uncased": ("bert", {}),
    "bert-large-uncased": (
        "bert",
        {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096},
    ),
    "roberta-base": ("roberta", {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1}),
    "roberta-large": (
        "roberta",
        {
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
}


@dataclass(frozen=True)
class Shape:
    """Sizes of an encoder that determine its cost."""

    name: str
    family: str
    layers: int
    width: int
    """h: hidden size."""
    dimension: int
    """d: dimension of a sentence vector; h without a linear map after pooling."""
    inner: int
    """Width of a layer's widest linear map: the feed-forward layer."""
    heads: int
    layer_weights: int
    """Elements of one layer's weight matrices: its multiply-adds per token, without attention's products."""
    layer_parameters: int
    """Parameters of one layer."""
    embedding_parameters: int
    """All other parameters: embeddings and their norms, and linear maps after pooling."""
    vocabulary: int
    embedding_size: int
    """Embedding size; h without factorized embeddings."""
    frozen_parameters: int = 0
    """Parameters in memory that are not trained: a pooler, which no pooling uses."""
    dropout: float = 0.0
    """Largest dropout probability in the model's config."""
    source: str = "config.json"
    """Where the sizes come from, for the plan's assumptions."""
    single_token: bool = False
    """Whether the last layer is computed only at the token that pooling reads (see models/fast/last_layer.py)."""
    packs: bool = False
    """Whether a batch on a CPU skips its padding (see models/fast/packing.py)."""
    can_record: bool = False
    """Whether the forward pass can be recorded as a CUDA graph (see models/attention.py)."""
    config: Any = field(default=None, repr=False, compare=False)
    """The backbone's transformers config, from which launches are counted."""
    trust_remote_code: bool = False

    @property
    def parameters(self) -> int:
        """Number of trained parameters."""
        return self.embedding_parameters + self.layers * self.layer_parameters

    @property
    def linear_flops(self) -> int:
        """Forward FLOPs per token in the linear maps of all layers: 24 h² per layer where the inner width is 4 h."""
        return round(2 * self.layer_weights * self.linear_layers)

    @property
    def linear_layers(self) -> float:
        """Number of layers of linear maps; a last layer at one token still computes keys and values of all tokens."""
        return self.layers - (1 - 2 * self.width**2 / self.layer_weights if self.single_token and self.layers else 0)

    @property
    def attending_layers(self) -> int:
        """Number of layers in which every token attends to all; without a last layer at one token."""
        return self.layers - (self.single_token and self.layers > 0)

    def attention_flops(self, length: int | float) -> float:
        """Return the forward FLOPs of a token's attention to `length` tokens in all layers: 4 L h per layer."""
        return 4.0 * length * self.width * self.attending_layers

    def forward_flops(self, length: int | float) -> float:
        """Return the forward FLOPs per token in a text of `length` tokens."""
        return self.linear_flops + self.attention_flops(length)

    def launches(self, training: bool, half: bool) -> int:
        """Return the operations that the host launches in a pass (see `count_launches`).

        Args:
            training: Whether gradients are computed.
            half: Whether the pass runs in a half precision.
        """
        from distcse.planning.launches import count_launches

        return count_launches(self.config, self.layers, training, half, self.trust_remote_code)

    def with_depth(self, layers: int) -> Shape:
        """Return this shape with another number of layers."""
        return replace(self, layers=layers)


def read_shape(section: EncoderSection) -> Shape:
    """Return the shape of a recipe's encoder, with a student's chosen layers and embedding size.

    The config.json of a hub model comes from the local cache. If it is not there, the shape of a well-known model follows
    from its name, and the config.json of another one is downloaded.

    Raises:
        ModelNotFoundError: There is no such folder or hub model.
        ModelLoadError: The config.json is not that of an encoder.
        TokenizerMismatchError: A folder with weights has a tokenizer that does not load.
    """
    config, source = _config_of(section.backbone, section.trust_remote_code)
    _check_tokenizer(section)
    backbone = _meta_model(config, section)
    layers = _chosen_layers(section)
    if layers is not None:
        from distcse.models.layers import keep_layers

        keep_layers(backbone, layers)
    shape = _shape_of(section.backbone, backbone, source)
    if isinstance(section, StudentSection) and section.embedding_size is not None:
        shape = _with_embedding_size(shape, config, section.embedding_size)
    layout = _layout(section)
    pooling, head = section.pooling or layout.pooling, [dense for _, dense in layout.head if dense is not None]
    return replace(
        shape,
        dimension=head[-1].outputs if head else shape.width,
        embedding_parameters=shape.embedding_parameters + sum(dense.parameters for dense in head),
        single_token=section.is_fast and pooling in AT_ONE_TOKEN and can_stop_at_one(backbone),
        packs=section.is_fast and pooling not in NEEDS_ALL_LAYERS and has_known_layers(backbone),
        can_record=takes_prepared_mask(backbone),
        config=config,
        trust_remote_code=section.trust_remote_code,
    )


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
    if folder is None and (known := _published(name)) is not None:
        return known, "the sizes published for its name, config.json not read"
    if folder is None:
        folder = resolve_model(name, trust_remote_code, _FILES)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code), "config.json"
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{name}: its config.json cannot be read: {' '.join(str(error).split())[:300]}") from error


def _check_tokenizer(section: EncoderSection) -> None:
    """Load the tokenizer of a folder with weights; a hub model's tokenizer may be downloaded later, by the run."""
    from distcse.models.loading import load_tokenizer

    folder = folder_of(section.backbone, section.trust_remote_code)
    if folder is not None and not is_hub_id(section.backbone) and any(folder.glob("*.safetensors")):
        load_tokenizer(folder, section.trust_remote_code)


def _published(name: str) -> Any:
    from transformers import AutoConfig

    if Path(name).expanduser().is_absolute() or name.startswith((".", "package:")):
        return None
    for part, (family, sizes) in _PUBLISHED.items():
        if part in name.lower():
            return AutoConfig.for_model(family, **sizes)
    return None


def _meta_model(config: Any, section: EncoderSection) -> Any:
    """Return the model of a config on torch's meta device: parameters have shapes but no storage."""
    import torch

    from distcse.models.loading import model_class

    try:
        with torch.device("meta"):
            return model_class(config).from_config(config, trust_remote_code=section.trust_remote_code)
    except (ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{section.backbone} is not an encoder: {' '.join(str(error).split())[:300]}") from error


def _layout(section: EncoderSection) -> Layout:
    folder = folder_of(section.backbone, section.trust_remote_code)
    return read_layout(folder) if folder else Layout()


def _chosen_layers(section: EncoderSection) -> Sequence[int] | None:
    if not isinstance(section, TrainedSection) or section.layers is None:
        return None
    if isinstance(section, StudentSection) and section.num_layers is not None:
        return range(section.num_layers)
    return section.named_layers


def _shape_of(name: str, backbone: Any, source: str) -> Shape:
    from torch import nn

    from distcse.models.layers import layers_of
    from distcse.models.loading import dropouts

    stack = layers_of(backbone)
    pooler = getattr(backbone, "pooler", None)
    frozen = sum(parameter.numel() for parameter in pooler.parameters()) if pooler is not None else 0
    # The last layer represents all: ModernBERT's first lacks a norm. The difference is counted with the embeddings.
    linears = [module for module in stack[-1].modules() if isinstance(module, nn.Linear)]
    layer = sum(parameter.numel() for parameter in stack[-1].parameters())
    total = sum(parameter.numel() for parameter in backbone.parameters())
    config = backbone.config
    return Shape(
        name=name,
        family=str(config.model_type),
        layers=len(stack),
        width=int(config.hidden_size),
        dimension=int(config.hidden_size),
        inner=max(max(linear.in_features, linear.out_features) for linear in linears),
        heads=int(config.num_attention_heads),
        layer_weights=sum(linear.weight.numel() for linear in linears),
        layer_parameters=layer,
        embedding_parameters=total - frozen - len(stack) * layer,
        vocabulary=int(backbone.get_input_embeddings().num_embeddings),
        embedding_size=int(backbone.get_input_embeddings().embedding_dim),
        frozen_parameters=frozen,
        dropout=max((float(value) for _, value in dropouts(config)), default=0.0),
        source=source,
    )


def _with_embedding_size(shape: Shape, config: Any, dimension: int) -> Shape:
    """Return the shape with embeddings of `dimension`, their norm and projection (see models/factorized_embeddings.py)."""
    positions = int(config.max_position_embeddings)
    if config.model_type != "bert":
        positions -= int(config.pad_token_id) + 1  # RoBERTa's positions start after the padding id
    rows = shape.vocabulary + positions + int(config.type_vocab_size)
    return replace(
        shape,
        family="electra",
        embedding_parameters=rows * dimension + 2 * dimension + dimension * shape.width + shape.width,
        embedding_size=dimension,
        frozen_parameters=0,
    )
