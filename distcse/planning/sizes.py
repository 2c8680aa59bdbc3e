"""The sizes that a plan follows from: an encoder's, from its config.json on PyTorch's meta device, and a text's token lengths.

No weights are read or downloaded. Lengths are measured on a sample of the text, or assumed if it cannot be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from distcse.errors import DistcseError, ModelFormatError
from distcse.model_source import CONFIG_FILE, is_hub_id
from distcse.models import Encoder, resolve_model
from distcse.models.files import has_any_weights
from distcse.models.folder import ModelFolder, find_local_model, has_tokenizer, model_class, open_model
from distcse.models.loading import embedding_shape, has_dropout, refuse_unpooled_prompt
from distcse.models.pooling import Dense, Normalize
from distcse.models.st_format import Layout, read_layout
from distcse.models.student import depth_of, keep_layers
from distcse.models.texts import apply_prompt
from distcse.recipe import CorpusSection, EncoderSection, TrainedSection
from distcse.text.sources import Source
from distcse.text.token_table import SampledTokens

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
    is_read: bool
    """Whether the sizes come from a config.json; else they are those published for the name."""
    layers: int
    width: int
    """h: hidden size."""
    dimension: int
    """d: dimension of a sentence vector."""
    vocabulary: int
    parameters: int
    """Number of trained parameters: without a pooler, which no pooling uses."""
    matrices: int
    """P: parameters of the linear maps through which every token goes; those that layers share count once for each layer."""
    has_dropout: bool
    """Whether two passes in training mode differ, by the model's config."""


def read_shape(section: EncoderSection) -> Shape:
    """Return the shape of a recipe's encoder, with a student's chosen layers and embedding size.

    The config.json of a hub model comes from the local cache. If it is not there, the shape of a well-known model follows
    from its name, and the config.json of another one is downloaded.
    """
    from transformers import AutoConfig

    name, trusts_code, layout = section.backbone, section.trust_remote_code, Layout()
    folder = find_local_model(name, trusts_code, [CONFIG_FILE])
    if folder is not None and not is_hub_id(name) and has_any_weights(folder):
        # A hub model's tokenizer may be downloaded later, by the run.
        opened = open_model(name, trusts_code)
        opened.load_tokenizer()  # first: where config.json is missing too, this error says more
        opened.supported_config()
    known = [sizes for part, sizes in _PUBLISHED.items() if part in name.lower()] if is_hub_id(name) else []
    if is_read := not (folder is None and known):
        folder = folder or resolve_model(name, trusts_code, [CONFIG_FILE])
        config, layout = ModelFolder.read(folder, trusts_code).load_config(), read_layout(folder)
    else:
        config = AutoConfig.for_model(known[0][0], **known[0][1])
    refuse_unpooled_prompt(section, layout)
    try:
        encoder = _build(section, config, layout)
    except (ValueError, KeyError, ImportError) as error:
        raise ModelFormatError(f"{name} is not an encoder: {' '.join(str(error).split())[:300]}") from error
    backbone: Any = encoder.backbone
    pooler = getattr(backbone, "pooler", None)
    frozen = sum(weight.numel() for weight in pooler.parameters()) if pooler is not None else 0
    return Shape(
        name=name,
        is_read=is_read,
        layers=depth_of(backbone),
        width=encoder.width,
        dimension=encoder.dimension,
        vocabulary=embedding_shape(backbone)[0],
        parameters=sum(weight.numel() for weight in encoder.parameters()) - frozen,
        matrices=_count_matrices(backbone),
        has_dropout=has_dropout(backbone.config),
    )


def _count_matrices(backbone: Any) -> int:
    parts = {name: part for name, part in backbone.named_modules() if not name.startswith("pooler")}
    embeddings = {id(part.weight) for part in parts.values() if isinstance(part, nn.Embedding)}
    # ALBERT applies each group of layers several times, and its map of embeddings once.
    times = backbone.config.num_hidden_layers // getattr(backbone.config, "num_hidden_groups", depth_of(backbone))
    return sum(
        weight.numel() * (1 if "embedding" in name else times)
        for name, part in parts.items()
        for weight in part.parameters(recurse=False)
        if weight.dim() > 1 and id(weight) not in embeddings
    )


def _build(section: EncoderSection, config: Any, layout: Layout) -> Encoder:
    """Build the product's own encoder on the meta device, without its tokenizer."""
    layers = section.layers if isinstance(section, TrainedSection) else None
    with torch.device("meta"):
        # Every family has eager attention.
        backbone = model_class(config).from_config(
            config, attn_implementation="eager", trust_remote_code=section.trust_remote_code
        )
        if layers is not None:
            keep_layers(backbone, layers)
        head = nn.Sequential(*(Normalize() if dense is None else Dense(dense) for _, dense in layout.head))
    pooling = section.pooling or layout.pooling or "mean"
    encoder = Encoder(backbone, SimpleNamespace(mask_token_id=0), pooling, 512, head=head)
    encoder.take_settings(Layout(truncate_dim=layout.truncate_dim))
    return encoder


_ASSUMED_ROWS = 1_000_000
_SAMPLE = 2000
_SAMPLED_FROM = 20_000
_READ_AT_MOST = 5_000_000
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
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the rows that have each role."""

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
        return replace(self, tokens=2 * self.tokens - 1, bytes_per_row=2 * self.bytes_per_row)


def read_lengths(corpus: CorpusSection, encoder: EncoderSection, rows: int | None) -> Lengths:
    """Measure the lengths of a corpus's sentences with an encoder's tokenizer, or assume them if it cannot be read."""
    texts, counts, why = _sample(corpus)
    by_role = Counter[str]()
    for section, count in zip(corpus.all_sources, counts, strict=True):
        by_role[section.role] += count
    shares = {role: count / max(1, by_role.total()) for role, count in by_role.items()}
    if not texts:
        known = rows or corpus.limit_of_all
        why += "" if known else f"; {_ASSUMED_ROWS:,} sentences assumed: give --corpus-rows"
        return replace(assumed_lengths(known or _ASSUMED_ROWS, why), shares=shares)
    size = float(np.mean([len(text.encode()) for text in texts]))
    tokens, by = _tokens(texts, encoder)
    source = f"lengths of {len(texts):,} sentences of the corpus {by}{f', {why}' if why else ''}"
    return Lengths(np.sort(tokens), rows or sum(counts), source, size, shares)


def assumed_lengths(rows: int, why: str) -> Lengths:
    """Return the lengths of Wikipedia's sentences, for a corpus that is not read; `why` states the reason."""
    from scipy.stats import norm

    quantiles = norm.ppf((np.arange(_SAMPLE) + 0.5) / _SAMPLE)
    tokens = np.maximum(3, np.rint(_MEDIAN * np.exp(_SPREAD * quantiles))).astype(np.int64)
    source = f"lengths assumed: those of Wikipedia's sentences (median {_MEDIAN:g} tokens), as {why}"
    return Lengths(tokens, rows, source, _MEDIAN * np.exp(_SPREAD**2 / 2) * _BYTES_PER_TOKEN)


def _sample(corpus: CorpusSection) -> tuple[list[str], list[int], str]:
    """Return sentences of the corpus, each source's rows, or its limit where nothing was read, and why not."""
    limits = [source.limit or 1 for source in corpus.all_sources]
    unopened = next((source.dataset for source in corpus.all_sources if source.dataset is not None), None)
    if unopened is not None or not corpus.all_sources:
        why = "the recipe names no text" if unopened is None else f"data set {unopened} is not opened"
        return [], limits, why
    parts: list[tuple[list[str], int]] = []
    why = ""
    for source in corpus.all_sources:
        limit = min(source.limit or _READ_AT_MOST, _READ_AT_MOST)
        try:
            rows = (row for row in Source.of(source, identified=False).rows() if row is not None)
            texts = list(islice(rows, min(limit, _SAMPLED_FROM)))
            count = len(texts) + sum(1 for _ in islice(rows, limit - len(texts)))
        except DistcseError as error:
            return [], limits, f"the text cannot be read ({error})"
        parts.append((texts, count))
        if count == _READ_AT_MOST != source.limit:
            why = f"read up to row {count:,}: give --corpus-rows if there are more"
    total, random = sum(count for _, count in parts), np.random.default_rng
    chosen = [
        texts[index]
        for texts, count in parts
        for index in random(0).permutation(len(texts))[: round(_SAMPLE * count / max(1, total))]
    ]
    return chosen, [count for _, count in parts], why


def _tokens(texts: list[str], encoder: EncoderSection) -> tuple[NDArray[np.int64], str]:
    """Return (n,) lengths and the method: the encoder's tokenizer, or bytes if it is not local."""
    folder = find_local_model(encoder.backbone, encoder.trust_remote_code, [CONFIG_FILE])
    opened = None if folder is None else ModelFolder.read(folder, encoder.trust_remote_code)
    if opened is None or not has_tokenizer(opened.backbone):
        by_bytes = np.array([2 + len(text.encode()) / _BYTES_PER_TOKEN for text in texts])
        return by_bytes.round().astype(np.int64), f"by their bytes, {_BYTES_PER_TOKEN:g} a token (assumed)"
    tokenizer, prompt = opened.load_tokenizer(), encoder.prompt or opened.layout.prompt
    prompted = apply_prompt(tokenizer, texts, prompt, encoder.longest or 512)
    return SampledTokens.of(tokenizer, prompted).lengths, "by the student's tokenizer"
