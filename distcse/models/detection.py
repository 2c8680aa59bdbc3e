"""Replaced token detection (DiffCSE): given a sentence's vector, a discriminator finds the edited tokens of the sentence.

The discriminator is a second encoder from the same start as the student. The sentence's vector takes the place of its
[CLS] embedding (after position, layer norm and dropout), by a hook on the embedding module: no patched transformers. The
generator is any masked language model with the student's vocabulary; it stays as it is and is in no checkpoint.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from distcse.compat import without_noise
from distcse.devices.device import default_device, is_gpu
from distcse.errors import TokenizerError, UnsupportedModelError
from distcse.losses.detection import detection
from distcse.losses.views import Detection
from distcse.models import Encoder
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.models.fast_layers import prepare_mask, short_cut
from distcse.models.files import check_weights
from distcse.models.folder import open_model
from distcse.models.loading import load_pretrained, refuse_missing
from distcse.recipe import DetectionSection
from distcse.text.collate import Tokens

Fill = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(B, L) ids, mask and wanted positions -> (B, L) the generator's token at those, what was there elsewhere."""

_RANDOM, _KEPT = 0.1, 0.1
"""Of the chosen tokens one in ten becomes a random one and one in ten stays, as in BERT."""


@dataclass(frozen=True)
class Vocabulary:
    """What edits must know of a tokenizer."""

    size: int
    cls: int
    pad: int
    mask: int
    special: tuple[int, ...]


@dataclass(frozen=True)
class Edited:
    """(B, L) edited ids, their mask, and 1 where an edit is to be found."""

    ids: Tensor
    mask: Tensor
    labels: Tensor

    def padded(self, length: int, pad_id: int) -> Edited:
        """The same, padded on the right to (B, `length`)."""
        more = (0, length - self.ids.shape[1])
        return Edited(pad(self.ids, more, value=pad_id), pad(self.mask, more), pad(self.labels, more))


def replace(ids: Tensor, mask: Tensor, ratio: float, words: Vocabulary, fill: Fill, masked_only: bool) -> Edited:
    """Mask tokens, let the generator fill every position (or the masked ones alone); what differs is replaced."""
    chosen = choose_positions(ids, mask, ratio, words)
    masked = mask_chosen(ids, chosen, words)
    if masked_only:
        return replaced(ids, mask, torch.where(chosen, fill(masked, mask, chosen), ids), words)
    wanted = mask.bool().index_fill(1, torch.zeros(1, dtype=torch.long, device=mask.device), False)
    return replaced(ids, mask, fill(masked, mask, wanted), words)


def replaced(ids: Tensor, mask: Tensor, filled: Tensor, words: Vocabulary) -> Edited:
    """The discriminator's input from what the generator filled in: slot 0 is [CLS], padding is padding."""
    filled = filled.clone()
    filled[:, 0] = words.cls
    seen = mask.bool()
    return Edited(torch.where(seen, filled, words.pad), mask, ((filled != ids) & seen).long())


def choose_positions(ids: Tensor, mask: Tensor, ratio: float, words: Vocabulary) -> Tensor:
    """(B, L) booleans: each token that is no special one with probability `ratio`."""
    # Compared one by one: a tensor of the special ids would be a copy from the host, which no CUDA graph can record.
    special = reduce(operator.or_, (ids == id for id in words.special), torch.zeros_like(ids, dtype=torch.bool))
    return (torch.rand(ids.shape, device=ids.device) < ratio) & mask.bool() & ~special


def mask_chosen(ids: Tensor, chosen: Tensor, words: Vocabulary) -> Tensor:
    """(B, L) ids whose chosen tokens are masked; of these, one in ten is a random one and one in ten stays."""
    lot = torch.rand(ids.shape, device=ids.device)
    random = torch.randint(words.size, ids.shape, device=ids.device)
    masked = torch.where(lot < _RANDOM, random, words.mask)
    return torch.where(chosen & (lot < 1 - _KEPT), masked, ids)


LOGITS_BYTES = 64_000_000
"""Bytes of the generator's logits that are computed at once: those of all positions of a batch are hundreds of MB."""


class EditDetector(nn.Module):
    """Generator, discriminator and its head. The generator's head sees only the positions whose word is asked for."""

    def __init__(self, backbone: nn.Module, generator: nn.Module, words: Vocabulary, section: DetectionSection) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(int(backbone.config.hidden_size), 2)  # type: ignore[union-attr, arg-type]
        self._generator = [generator.requires_grad_(False)]  # in a list: no submodule
        self._words = words
        self._section = section

    @property
    def counts_padding(self) -> bool:
        """Whether the loss is also over padding, so that it depends on the length that a batch is padded to."""
        return self._section.reduction == "all"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EditDetector:
        """Move the generator too: it is no submodule."""
        super()._apply(fn, recurse)
        self._generator[0].to(self.head.weight.device)
        return self

    def forward(self, tokens: Tokens, vectors: Tensor, length: int | Tensor | None = None) -> Detection:
        """(B, L) tokens and (B, H) vectors of the same sentences -> the discriminator's errors, as sums.

        Masks, sampled tokens and dropout are drawn from the current random state.

        Args:
            tokens: The sentences.
            vectors: Their vectors.
            length: Positions of the longest sentence of the batch; None is the longest of these sentences. On a GPU it
                is a scalar, which the host does not wait for: sentences are padded further, and what is beyond is not counted.
        """
        edited = self.edit(tokens)
        if isinstance(length, int):
            edited, length = edited.padded(length, self._words.pad), None
        elif length is None and self.counts_padding and is_gpu(edited.mask.device):
            length = edited.mask.sum(dim=1).max()
        with short_cut(self.backbone, edited.mask, None if self.counts_padding else tokens.token_index, None):
            logits = self.head(self.hidden_states(edited, vectors))
        return detection(logits, edited.labels, edited.mask, self._section.reduction, length)

    def edit(self, tokens: Tokens) -> Edited:
        """Replace tokens of sentences, with the current random state."""
        section, fill = self._section, partial(self.fill, places=tokens.token_index)
        masked_only = section.replace == "masked_only"
        with torch.no_grad():
            return replace(tokens.ids, tokens.mask, section.masking_ratio, self._words, fill, masked_only)

    def fill(self, ids: Tensor, mask: Tensor, wanted: Tensor, places: Tensor | None = None) -> Tensor:
        """Put the generator's tokens at the wanted positions (see `Fill`); `places` are the positions that are no padding."""
        generator: Any = self._generator[0]
        if generator.training != (has_dropout := self.training and self._section.generator_dropout):
            generator.train(has_dropout)
        with short_cut(generator.base_model, mask, places, None):
            hidden = generator.base_model(input_ids=ids, attention_mask=prepare_mask(generator, mask)).last_hidden_state
        if is_gpu(ids.device):  # the host would wait for the number of wanted positions
            return torch.where(wanted, self._choose_tokens(hidden.flatten(0, 1)).view_as(ids), ids)
        return ids.masked_scatter(wanted, self._choose_tokens(hidden[wanted]))

    def _choose_tokens(self, hidden: Tensor) -> Tensor:
        """(M, H) last hidden states of the generator -> (M,) its tokens."""
        at_a_time = max(1, LOGITS_BYTES // (4 * self._words.size))
        choose = sample_tokens if self._section.sampling == "sample" else most_likely_tokens
        return torch.cat([choose(_logits(self._generator[0], part)) for part in hidden.split(at_a_time)])

    def hidden_states(self, edited: Edited, vectors: Tensor) -> Tensor:
        """(B, L, H) last hidden states of the discriminator, which reads (B, H) vectors in place of [CLS]."""

        def put(module: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
            return torch.cat([vectors[:, None].to(embedded.dtype), embedded[:, 1:]], dim=1)

        # An ELECTRA widens its embeddings to the width of the layers, and of the vectors, by a separate module.
        embeddings = getattr(self.backbone, "embeddings_project", self.backbone.embeddings)
        hook = embeddings.register_forward_hook(put)  # type: ignore[union-attr]
        try:
            made = prepare_mask(self.backbone, edited.mask)
            hidden: Tensor = self.backbone(input_ids=edited.ids, attention_mask=made).last_hidden_state
        finally:
            hook.remove()
        return hidden


def most_likely_tokens(logits: Tensor) -> Tensor:
    """(M, V) logits -> (M,) tokens."""
    return logits.argmax(dim=1)


def sample_tokens(logits: Tensor) -> Tensor:
    """(M, V) logits -> (M,) tokens, each drawn with its probability, by one random number a position."""
    # Summed in float64: float32 sums near 1 would lose the unlikely half of a vocabulary.
    cumulative = logits.float().softmax(dim=1).cumsum(dim=1, dtype=torch.float64)
    drawn = torch.rand(len(logits), 1, dtype=torch.float64, device=logits.device) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, drawn, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)


def _logits(generator: Any, hidden: Tensor) -> Tensor:
    """(M, H) last hidden states -> (M, V) logits: the model's head alone, whatever its family calls it.

    The model is asked with its body's answer put in its place.
    """
    from transformers.modeling_outputs import BaseModelOutput

    body = generator.base_model
    body.forward = lambda *inputs, **named: BaseModelOutput(last_hidden_state=hidden[None])
    try:
        logits: Tensor = generator(input_ids=hidden.new_zeros(1, 1, dtype=torch.long)).logits[0]
    finally:
        del body.forward
    return logits


def build_detector(
    section: DetectionSection, student: Encoder, fresh: Encoder, precision: str = "fp32"
) -> EditDetector:
    """The detector of a recipe; `fresh` is a second encoder from the student's start, which becomes the discriminator.

    `precision` is the training's, `fp32` or `bf16`.
    """
    tokenizer = student.tokenizer
    if student.dimension != student.width:
        raise UnsupportedModelError(
            f"objective.detection puts the student's vector among its words' ones: {student.dimension} and {student.width} "
            "numbers; take a student without a Dense module"
        )
    if not isinstance(getattr(fresh.backbone, "embeddings", None), nn.Module):
        raise UnsupportedModelError(
            "objective.detection needs a BERT- or RoBERTa-shaped student: one with an embeddings module"
        )
    if tokenizer.mask_token_id is None or tokenizer.cls_token_id is None:
        raise TokenizerError("objective.detection needs a tokenizer with [CLS] and [MASK]")
    words = Vocabulary(
        len(tokenizer),
        tokenizer.cls_token_id,
        tokenizer.pad_token_id or 0,
        tokenizer.mask_token_id,
        tuple(tokenizer.all_special_ids),
    )
    generator = _load_generator(section, tokenizer, student.max_length)
    if default_device() == "cpu":
        use_mkldnn_linear(generator, precision)
    return EditDetector(fresh.backbone, generator, words, section)


@without_noise()
def _load_generator(section: DetectionSection, tokenizer: Any, max_length: int) -> nn.Module:
    from transformers import AutoModelForMaskedLM

    opened = open_model(section.generator)
    check_weights(opened.root)
    if opened.load_tokenizer().get_vocab() != tokenizer.get_vocab():
        raise TokenizerError(
            f"objective.detection.generator {section.generator} has another vocabulary than the student; "
            "a generator speaks the student's tokens (distilbert-base-uncased for BERT, distilroberta-base for RoBERTa)"
        )
    model, missing, _ = load_pretrained(
        AutoModelForMaskedLM, opened, opened.load_config(), max_length, "a masked language model"
    )
    refuse_missing(opened, missing, "use a masked language model with its head")
    loaded: nn.Module = model
    return loaded
