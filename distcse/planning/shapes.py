"""The shape of a backbone, from its config.json alone: no weights are read, and none fetched from a hub."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distcse.errors import EncoderError, ModelLoadError
from distcse.models import resolve_model
from distcse.models.fast.last_layer import can_stop_at_one
from distcse.models.fast.packing import has_known_layers
from distcse.models.pooling import AT_ONE_TOKEN, NEEDS_ALL_LAYERS
from distcse.models.source import is_hub_id
from distcse.models.st_format import Layout, read_layout
from distcse.recipe import EncoderSection, StudentSection, TrainedSection

_DESCRIBING = ["config.json"]

_PUBLISHED: dict[str, tuple[str, dict[str, int]]] = {
    # A name with this in it has the sizes that its paper states: BERT (Devlin et al. 2019, §3), RoBERTa (Liu et al. 2019),
    # DistilBERT (Sanh et al. 2019), MiniLM (Wang et al. 2020). The classes' defaults are those of the base models.
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
    """Sizes of an encoder that decide what it costs."""

    name: str
    family: str
    layers: int
    width: int
    """h: numbers of a token's vector between layers."""
    dimension: int
    """d: numbers of a sentence's vector; h, where no linear map after pooling makes others of it."""
    inner: int
    """Widest linear map inside a layer: the feed-forward part."""
    heads: int
    layer_weights: int
    """Numbers in the matrices of one layer: half its multiply-adds a token, attention's own apart."""
    layer_parameters: int
    """All numbers of one layer."""
    embedding_parameters: int
    """All else: embeddings and their norms, and linear maps after pooling."""
    vocabulary: int
    word_width: int
    """Numbers of a word's vector; h, where the student's words are not narrow."""
    frozen_parameters: int = 0
    """In memory, but not trained: a pooler that no pooling here uses."""
    dropout: float = 0.0
    """Largest dropout probability that the model came with."""
    told_by: str = "config.json"
    at_one: bool = False
    """The last layer is computed at the one token that pooling reads (see models/fast/last_layer.py)."""
    packs: bool = False
    """On a CPU a batch goes through without its padding (see models/fast/packing.py)."""

    @property
    def parameters(self) -> int:
        """Trained numbers."""
        return self.embedding_parameters + self.layers * self.layer_parameters

    @property
    def linear_flops(self) -> int:
        """Forward FLOPs of a token in all layers, attention's products apart: 24 h² a layer where the inner width is 4 h."""
        return round(2 * self.layer_weights * self.linear_layers)

    @property
    def linear_layers(self) -> float:
        """Layers' worth of linear maps: of a last layer at one token, keys and values are those of all tokens."""
        return self.layers - (1 - 2 * self.width**2 / self.layer_weights if self.at_one and self.layers else 0)

    @property
    def attending_layers(self) -> int:
        """Layers in which every token looks at all: with its last at one token, one fewer."""
        return self.layers - (self.at_one and self.layers > 0)

    def attention_flops(self, length: int | float) -> float:
        """Forward FLOPs of a token's attention among `length` tokens in all layers: 4 L h a layer."""
        return 4.0 * length * self.width * self.attending_layers

    def forward_flops(self, length: int | float) -> float:
        """Forward FLOPs of one token in a text of `length` tokens."""
        return self.linear_flops + self.attention_flops(length)

    def with_depth(self, layers: int) -> Shape:
        """The same with another number of layers."""
        return replace(self, layers=layers)


def read_shape(section: EncoderSection) -> Shape:
    """The shape of a recipe's encoder, cut to its layers and with its narrow words where it is a student.

    A hub's model is read from the local cache, else known by its name where it is one of the packaged recipes', else its
    config.json alone is fetched.

    Raises:
        EncoderError: Nothing there, no encoder, or a folder with weights whose tokenizer does not load.
    """
    config, told_by = _config_of(section.backbone, section.trust_remote_code)
    _check_tokenizer(section)
    backbone = _without_numbers(config, section)
    layers = _kept_layers(section)
    if layers is not None:
        from distcse.models.layers import keep_layers

        keep_layers(backbone, layers)
    shape = _measured(section.backbone, backbone, told_by)
    if isinstance(section, StudentSection) and section.embedding_size is not None:
        shape = _with_narrow_words(shape, config, section.embedding_size)
    layout = _layout(section)
    pooling, head = section.pooling or layout.pooling, [dense for _, dense in layout.head if dense is not None]
    return replace(
        shape,
        dimension=head[-1].outputs if head else shape.width,
        embedding_parameters=shape.embedding_parameters + sum(dense.parameters for dense in head),
        at_one=pooling in AT_ONE_TOKEN and can_stop_at_one(backbone),
        packs=pooling not in NEEDS_ALL_LAYERS and has_known_layers(backbone),
    )


def masked_lm_head(shape: Shape) -> tuple[int, int]:
    """(multiply-adds a token, numbers beside the shared word matrix) of a generator's head: h × h, then h × V."""
    transform = shape.width * shape.width
    return transform + shape.width * shape.vocabulary, transform + 3 * shape.width + shape.vocabulary


def folder_of(name: str, trust_remote_code: bool = False) -> Path | None:
    """Where a model's small files are, without asking a network; None for what only a hub has."""
    try:
        return resolve_model(name, trust_remote_code, _DESCRIBING, only_local=True)
    except EncoderError:
        return None


def _config_of(name: str, trust_remote_code: bool) -> tuple[Any, str]:
    from transformers import AutoConfig

    folder = folder_of(name, trust_remote_code)
    if folder is None and (known := _published(name)) is not None:
        return known, "its name: the published sizes, config.json not seen"
    if folder is None:
        folder = resolve_model(name, trust_remote_code, _DESCRIBING)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code), "config.json"
    except (OSError, ValueError, KeyError, ImportError) as refused:
        raise ModelLoadError(
            f"{name} has no config.json that is read: {' '.join(str(refused).split())[:300]}"
        ) from refused


def _check_tokenizer(section: EncoderSection) -> None:
    """Load the tokenizer of a folder that holds weights. What a hub's cache lacks is fetched when the run starts."""
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


def _without_numbers(config: Any, section: EncoderSection) -> Any:
    """The model of a config on torch's meta device: every parameter has a shape and no storage."""
    import torch

    from distcse.models.loading import model_class

    try:
        with torch.device("meta"):
            return model_class(config).from_config(config, trust_remote_code=section.trust_remote_code)
    except (ValueError, KeyError, ImportError) as refused:
        raise ModelLoadError(f"{section.backbone} is no encoder: {' '.join(str(refused).split())[:300]}") from refused


def _layout(section: EncoderSection) -> Layout:
    folder = folder_of(section.backbone, section.trust_remote_code)
    return read_layout(folder) if folder else Layout()


def _kept_layers(section: EncoderSection) -> Sequence[int] | None:
    if not isinstance(section, TrainedSection) or section.layers is None:
        return None
    if isinstance(section, StudentSection) and section.num_layers is not None:
        return range(section.num_layers)
    return section.named_layers


def _measured(name: str, backbone: Any, told_by: str) -> Shape:
    from torch import nn

    from distcse.models.layers import layers_of
    from distcse.models.loading import dropouts

    stack = layers_of(backbone)
    pooler = getattr(backbone, "pooler", None)
    frozen = sum(parameter.numel() for parameter in pooler.parameters()) if pooler is not None else 0
    # The last layer stands for all: ModernBERT's first has no norm before attention. What they differ by counts with the rest.
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
        word_width=int(backbone.get_input_embeddings().embedding_dim),
        frozen_parameters=frozen,
        dropout=max((float(value) for _, value in dropouts(config)), default=0.0),
        told_by=told_by,
    )


def _with_narrow_words(shape: Shape, config: Any, dimension: int) -> Shape:
    """Embeddings of `dimension` numbers, their norm, and the matrix that widens them (see models/factorized_embeddings.py)."""
    positions = int(config.max_position_embeddings)
    if config.model_type != "bert":
        positions -= int(config.pad_token_id) + 1  # RoBERTa counts positions from there
    rows = shape.vocabulary + positions + int(config.type_vocab_size)
    return replace(
        shape,
        family="electra",
        embedding_parameters=rows * dimension + 2 * dimension + dimension * shape.width + shape.width,
        word_width=dimension,
        frozen_parameters=0,
    )
