"""The sizes that a plan follows from: an encoder's, from its config.json on PyTorch's meta device, and a text's token lengths.

No weights are read or downloaded. Lengths are measured on a sample of the text, or assumed if it cannot be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from distcse.errors import DistcseError, EncoderError, ModelFormatError
from distcse.model_source import is_hub_id
from distcse.models import Encoder, resolve_model
from distcse.models.files import has_any_weights
from distcse.models.folder import ModelFolder, has_tokenizer, model_class, open_model
from distcse.models.loading import embedding_shape, has_dropout, refuse_unpooled_prompt
from distcse.models.pooling import Dense, Normalize
from distcse.models.st_format import Layout, backbone_folder, read_layout
from distcse.models.student import factorize_embeddings, keep_layers, layers_of
from distcse.models.texts import SENTENCE, is_template
from distcse.recipe import CorpusSection, EncoderSection, StudentSection, TrainedSection
from distcse.text import source_rows

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
    """P: parameters of the linear maps through which every token goes; those that layers share count once for each layer."""
    has_dropout: bool
    """Whether two passes in training mode differ, by the model's config."""


def read_shape(section: EncoderSection) -> Shape:
    """Return the shape of a recipe's encoder, with a student's chosen layers and embedding size.

    The config.json of a hub model comes from the local cache. If it is not there, the shape of a well-known model follows
    from its name, and the config.json of another one is downloaded.

    Raises:
        ModelNotFoundError: There is no such folder or hub model.
        ModelFormatError: The config.json is not that of an encoder.
        EncoderError: A folder with weights would not load, or the prompt would not be pooled.
    """
    folder = folder_of(section.backbone, section.trust_remote_code)
    if folder is not None and not is_hub_id(section.backbone) and has_any_weights(folder):
        # A hub model's tokenizer may be downloaded later, by the run.
        opened = open_model(section.backbone, section.trust_remote_code)
        opened.load_tokenizer()  # first: where config.json is missing too, this error says more
        opened.supported_config()
    config, source = _config_of(section.backbone, section.trust_remote_code)
    layout = read_layout(folder) if folder else Layout()
    refuse_unpooled_prompt(section.backbone, layout, section.prompt)
    try:
        encoder = _build(section, config, layout)
    except (ValueError, KeyError, ImportError) as error:
        raise ModelFormatError(f"{section.backbone} is not an encoder: {' '.join(str(error).split())[:300]}") from error
    backbone: Any = encoder.backbone
    matrices, pooler = _layer_matrices(backbone), getattr(backbone, "pooler", None)
    frozen = sum(parameter.numel() for parameter in pooler.parameters()) if pooler is not None else 0
    return Shape(
        name=section.backbone,
        source=source,
        layers=len(matrices),
        width=encoder.width,
        dimension=encoder.dimension,
        vocabulary=embedding_shape(backbone)[0],
        parameters=sum(parameter.numel() for parameter in encoder.parameters()) - frozen,
        frozen_parameters=frozen,
        matrices=sum(matrices),
        has_dropout=has_dropout(backbone.config),
    )


def _layer_matrices(backbone: Any) -> list[int]:
    """Return the parameters of each layer's linear maps, in the order of the forward pass."""
    groups = getattr(getattr(backbone, "encoder", None), "albert_layer_groups", None)
    if groups is None:
        return [_count_matrices(layer) for layer in layers_of(backbone)]
    depth = backbone.config.num_hidden_layers  # ALBERT applies one group of layers again and again
    repeated = [groups[number * len(groups) // depth] for number in range(depth)]
    first, *rest = [_count_matrices(layer) for group in repeated for layer in group.albert_layers]
    return [first + _count_matrices(backbone.encoder.embedding_hidden_mapping_in), *rest]


def _count_matrices(part: nn.Module) -> int:
    return sum(weight.numel() for weight in part.parameters() if weight.dim() > 1)


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


ASSUMED_ROWS = 1_000_000
_SAMPLE = 2000
_READ_AT_MOST = 5_000_000
_THIN = 20_000
"""Sentences held while reading; at this many, every other one is dropped."""

# A log-normal with the median (28) and mean (30.5) of 100,000 Wikipedia sentences in BERT's WordPiece tokens.
_MEDIAN, _SPREAD = 28.0, 0.415
_BYTES_PER_TOKEN = 4.3


@dataclass(frozen=True)
class Lengths:
    """Token lengths of a corpus's sentences, special tokens included, before truncation."""

    tokens: NDArray[np.int64]
    """(n,) lengths of a sample, ascending."""
    rows: int
    """Sentences of the corpus."""
    source: str
    """How the lengths and the number of rows were obtained, for the plan's assumptions."""
    bytes_per_row: float
    """UTF-8 bytes of text."""

    def cut(self, max_length: int | None) -> NDArray[np.int64]:
        """Return the sample's lengths after truncation to `max_length` tokens; None truncates nothing."""
        return self.tokens if max_length is None else np.minimum(self.tokens, max_length)

    def mean(self, max_length: int | None) -> float:
        """Return the mean length in tokens, after truncation to `max_length`."""
        return float(self.cut(max_length).mean())

    def expected_longest(self, rows: int, max_length: int | None) -> float:
        """Return the expected length of the longest of `rows` sentences, to which a batch is padded.

        E[max] = Σ l · (F(l)^rows − F(l−1)^rows) over the sample's cumulative distribution F.
        """
        cut = self.cut(max_length)
        reached = (np.arange(1, len(cut) + 1) / len(cut)) ** rows
        return float((cut * np.diff(reached, prepend=0.0)).sum())

    def pairs(self) -> Lengths:
        """Return the lengths of two sentences as one text, as a cross-encoder reads them."""
        other = np.random.default_rng(0).permutation(self.tokens)
        return Lengths(np.sort(self.tokens + other - 1), self.rows, self.source, 2 * self.bytes_per_row)


def read_lengths(corpus: CorpusSection, encoder: EncoderSection, rows: int | None) -> Lengths:
    """Measure the lengths of a corpus's sentences with an encoder's tokenizer, or assume them if it cannot be read.

    Args:
        corpus: The recipe's corpus section.
        encoder: The encoder whose tokens are counted.
        rows: Sentences to plan for; None counts those of the corpus.
    """
    texts, counted, why = _sample(corpus)
    row_count = rows if rows is not None else counted
    if not texts:
        why += "" if row_count is not None else f"; {ASSUMED_ROWS:,} sentences assumed: give --corpus-rows"
        return assumed_lengths(row_count or ASSUMED_ROWS, why)
    size = float(np.mean([len(text.encode()) for text in texts]))
    tokens, by = _tokens(texts, encoder)
    source = f"lengths of {len(texts):,} sentences of the corpus {by}{f', {why}' if why else ''}"
    return Lengths(np.sort(tokens), row_count or len(texts), source, size)


def assumed_lengths(rows: int, why: str) -> Lengths:
    """Return the lengths of Wikipedia's sentences, for a corpus that is not read; `why` states the reason."""
    source = f"lengths assumed: those of Wikipedia's sentences (median {_MEDIAN:g} tokens), as {why}"
    return Lengths(_assumed(), rows, source, _MEDIAN * np.exp(_SPREAD**2 / 2) * _BYTES_PER_TOKEN)


def _sample(corpus: CorpusSection) -> tuple[list[str], int | None, str]:
    """Return sentences spread over the corpus, the number of rows, and why anything was not read."""
    if corpus.path is None:
        why = "the recipe names no text" if corpus.dataset is None else f"data set {corpus.dataset} is not opened"
        return [], corpus.limit if corpus.dataset is not None else None, why
    sampled, count, thin = [], 0, 1
    limit = min(corpus.limit or _READ_AT_MOST, _READ_AT_MOST)
    try:
        for text in islice((row for row in source_rows(corpus) if row is not None), limit):
            if count % thin == 0:
                sampled.append(text)
            if len(sampled) == _THIN:
                sampled, thin = sampled[::2], 2 * thin
            count += 1
    except DistcseError as error:
        return [], None, f"the text cannot be read ({error})"
    chosen = np.random.default_rng(0).permutation(len(sampled))[:_SAMPLE]
    more = count == _READ_AT_MOST and corpus.limit != _READ_AT_MOST
    why = f"read up to row {count:,}: give --corpus-rows if there are more" if more else ""
    return [sampled[index] for index in chosen], count, why


def _tokens(texts: list[str], encoder: EncoderSection) -> tuple[NDArray[np.int64], str]:
    """Return (n,) lengths and the method: the encoder's tokenizer, or bytes if it is not local."""
    folder = folder_of(encoder.backbone, encoder.trust_remote_code)
    if folder is not None and has_tokenizer(backbone_folder(folder)):
        from distcse.models.folder import ModelFolder

        opened = ModelFolder.read(folder, encoder.trust_remote_code)
        prompt = encoder.prompt or opened.layout.prompt
        template = prompt if is_template(prompt) else prompt + SENTENCE
        prompted = [template.replace(SENTENCE, text) for text in texts]
        ids = opened.load_tokenizer()(prompted, truncation=False, padding=False, verbose=False)
        return np.array([len(row) for row in ids["input_ids"]], dtype=np.int64), "by the student's tokenizer"
    by_bytes = [2 + len(text.encode()) / _BYTES_PER_TOKEN for text in texts]
    return np.array(by_bytes).round().astype(np.int64), f"by their bytes, {_BYTES_PER_TOKEN:g} a token (assumed)"


def _assumed() -> NDArray[np.int64]:
    """Return 2,000 quantiles of the assumed distribution."""
    from scipy.stats import norm

    shares = (np.arange(_SAMPLE) + 0.5) / _SAMPLE
    return np.asarray(np.maximum(3, np.rint(_MEDIAN * np.exp(_SPREAD * norm.ppf(shares)))), dtype=np.int64)
