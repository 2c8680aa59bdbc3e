"""A sentence encoder: tokenizer, Hugging Face backbone, pooling, and what its folder has after that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import normalize as unit

from distcse.errors import EncoderSettingError, UnsupportedModelError
from distcse.models.attention import prepare_mask
from distcse.models.batching import by_length, padded
from distcse.models.factorized_embeddings import factorize_embeddings
from distcse.models.fast.last_layer import can_stop_at_one
from distcse.models.fast.packing import short_cut
from distcse.models.head import Dense, build_head
from distcse.models.layers import depth_of, keep_layers
from distcse.models.loading import (
    check_vocabulary,
    dropouts,
    length_limit,
    load_backbone,
    load_tokenizer,
    pooling_of,
    refuse_other_reading,
    require_finite,
)
from distcse.models.pooling import AT_ONE_TOKEN, NEEDS_ALL_LAYERS, place_of, pool
from distcse.models.precision import arithmetic
from distcse.models.prompts import is_template, prompted
from distcse.models.source import resolve_model
from distcse.models.st_format import Layout, read_layout, refuse_pickled_weights, replacing, write_layout
from distcse.recipe import EncoderSection, Pooling, StudentSection, TrainedSection
from distcse.storage import resolve_path, upload_dir


class Encoder(nn.Module):
    """Texts or token ids in, one vector a sentence out.

    Args:
        backbone: A Hugging Face encoder.
        tokenizer: Its fast tokenizer.
        pooling: How token vectors become one.
        max_length: Tokens kept of a sentence, special tokens included.
        prompt: Text put before every sentence, or a template with `{sentence}` in it.
        normalize: Whether `encode` and readers of the saved folder give unit vectors.
        head: From a pooled vector to the model's; None, or an empty one, leaves it as it is.
    """

    def __init__(
        self,
        backbone: nn.Module,
        tokenizer: Any,
        pooling: Pooling,
        max_length: int,
        prompt: str = "",
        normalize: bool = False,
        head: nn.Sequential | None = None,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Sequential() if head is None else head
        self.tokenizer = tokenizer
        self.pooling = pooling
        self.max_length = max_length
        self.prompt = prompt
        self.normalize = normalize

    @classmethod
    def load(cls, path: str | Path, **knobs: Any) -> Encoder:
        """An encoder from a folder or name; `knobs` are those of `EncoderSection`, such as pooling="mean"."""
        return cls.from_section(EncoderSection(backbone=str(path), **knobs))

    @classmethod
    def from_section(cls, section: EncoderSection, kind: torch.dtype = torch.float32) -> Encoder:
        """The encoder a recipe names, cut to its layers and with its dropout where it is a student.

        Args:
            section: The recipe's part.
            kind: Of the weights; another than float32 is for frozen models.

        Raises:
            EncoderError: Nothing there, no safetensors, weights missing, pooling unknown, or a length beyond the
                backbone's positions.
        """
        folder = resolve_model(section.backbone, section.trust_remote_code)
        refuse_pickled_weights(folder)
        layout = read_layout(folder)
        pooling = pooling_of(section, layout)
        dropout = section.dropout if isinstance(section, TrainedSection) else None
        length_told = section.max_length or layout.max_length
        backbone = load_backbone(folder, section.trust_remote_code, dropout, length_told, kind)
        if isinstance(section, TrainedSection) and section.layers is not None:
            if section.layers == "auto":
                raise EncoderSettingError("layers: auto is what a run chooses; name the layers, such as [0, 2, 4]")
            keep_layers(backbone, section.layers)
        if isinstance(section, StudentSection) and section.embedding_size is not None:
            backbone = factorize_embeddings(backbone, section.embedding_size)
        tokenizer = load_tokenizer(folder, section.trust_remote_code)
        check_vocabulary(folder, tokenizer, backbone)
        refuse_other_reading(section, layout, tokenizer)
        max_length = length_limit(section, layout, tokenizer, backbone)
        prompt, head = section.prompt or layout.prompt, build_head(folder, layout.head, _width(backbone))
        require_finite(folder, head)
        return cls(backbone, tokenizer, pooling, max_length, prompt, layout.normalize, head)

    @property
    def dimension(self) -> int:
        """Numbers in one vector."""
        return next((module.shape.outputs for module in reversed(self.head) if isinstance(module, Dense)), self.width)

    @property
    def width(self) -> int:
        """Numbers in a token's vector, and in a pooled one."""
        return _width(self.backbone)

    @property
    def has_dropout(self) -> bool:
        """Whether two passes over a sentence differ in training mode."""
        return any(value > 0 for _, value in dropouts(self.backbone.config))

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    def forward(self, ids: Tensor, mask: Tensor, places: Tensor | None = None) -> Tensor:
        """(B, L) token ids and mask -> (B, d) float32 vectors, not normalised.

        With the (T,) places of all tokens in the flat batch, ascending, the pass leaves other padding out where it can.
        """
        at_one = None
        if self.pooling in AT_ONE_TOKEN and can_stop_at_one(self.backbone):
            at_one = place_of(self.pooling, mask, self._marked(ids))
        with short_cut(self.backbone, mask, None if self.pooling in NEEDS_ALL_LAYERS else places, at_one):
            states = self._states(ids, mask)
        if at_one is not None:
            return self._vectors(states[-1][:, 0].float())
        return self._vectors(pool(self.pooling, states, mask, self._marked(ids)))

    def tokens_and_vectors(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """(B, L) token ids and mask -> (B, L, H) vectors of the tokens in the last layer, (B, d) float32 ones of the texts."""
        states = self._states(ids, mask)
        return states[-1], self._vectors(pool(self.pooling, states, mask, self._marked(ids)))

    def _vectors(self, pooled: Tensor) -> Tensor:
        vectors: Tensor = self.head(pooled).float()
        return vectors

    def _states(self, ids: Tensor, mask: Tensor) -> Sequence[Tensor]:
        """(B, L, H) states of all layers where pooling wants them, else of the last one."""
        made, all_layers = prepare_mask(self.backbone, mask), self.pooling in NEEDS_ALL_LAYERS
        output = self.backbone(input_ids=ids, attention_mask=made, output_hidden_states=all_layers)
        return output.hidden_states if all_layers else [output.last_hidden_state]

    def _marked(self, ids: Tensor) -> Tensor | None:
        return ids == self.tokenizer.mask_token_id if self.pooling == "mask" else None

    def token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text in its prompt, cut to `max_length`."""
        if not texts:
            return []
        encoded = self.tokenizer(
            prompted(self.tokenizer, texts, self.prompt, self.max_length),
            truncation=True,
            max_length=self.max_length,
            padding=False,
            return_attention_mask=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        return ids

    def encode(
        self,
        texts: Sequence[str],
        *,
        batch_tokens: int = 4096,
        normalize: bool | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """(n,) texts -> (n, d) float32 vectors, in the texts' order; without dropout or gradient.

        Texts of the same tokens go through once and have the same vector, to the last bit.

        Args:
            texts: What to encode.
            batch_tokens: Tokens, padding included, of one forward pass.
            normalize: Unit vectors; None follows the model.
            precision: `fp32`, or `bf16` / `fp16` autocast with float32 pooling.
            on_progress: Told the number of different texts done.
        """
        everything = self.token_ids(texts)
        place_of = {row: index for index, row in enumerate(dict.fromkeys(map(tuple, everything)))}
        ids = [list(row) for row in place_of]
        vectors = np.empty((len(ids), self.dimension), dtype=np.float32)
        was_training, done, pad = self.training, 0, self.tokenizer.pad_token_id or 0
        self.eval()
        with torch.no_grad(), arithmetic(precision, self.device):
            for places in by_length(ids, batch_tokens):
                found = self(*padded([ids[index] for index in places], pad, self.device))
                found = unit(found, dim=1) if (self.normalize if normalize is None else normalize) else found
                vectors[places] = found.cpu().numpy()
                done += len(places)
                if on_progress is not None:
                    on_progress(done)
        self.train(was_training)
        return vectors if len(ids) == len(everything) else vectors[[place_of[tuple(row)] for row in everything]]

    def save(self, path: str | Path) -> None:
        """Write the folder that sentence-transformers 2 to 6, TEI, vLLM and llama.cpp read; replaces an older one whole."""
        if self.pooling == "mask" or is_template(self.prompt):
            raise UnsupportedModelError(
                "a template, or pooling at [MASK], has no place in the sentence-transformers layout"
            )
        with replacing(resolve_path(path)) as folder:
            self.backbone.save_pretrained(folder)  # type: ignore[operator]
            self.tokenizer.model_max_length = self.max_length
            self.tokenizer.save_pretrained(folder)
            layout = Layout(self.pooling, self.max_length, self.normalize, self.prompt)
            write_layout(folder, layout, self.width, depth_of(self.backbone), self.head)
        upload_dir(resolve_path(path))


def _width(backbone: nn.Module) -> int:
    return int(backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]
