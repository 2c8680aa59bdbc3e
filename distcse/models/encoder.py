"""The sentence encoder: tokenizer, Hugging Face backbone, pooling, and optional modules after pooling."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn.functional import normalize as unit

from distcse.compat import without_noise
from distcse.errors import EncoderSettingError, UnsupportedModelError
from distcse.models.cpu_kernels import fast_dropout
from distcse.models.fast_layers import can_stop_at_one, prepare_mask, short_cut
from distcse.models.files import check_weights
from distcse.models.folder import open_model
from distcse.models.frozen_pass import Chunk, TokenBudget, run_frozen, split_chunks
from distcse.models.loading import (
    check_vocabulary,
    has_dropout,
    length_limit,
    load_backbone,
    readings_of,
    refuse_unsupported_preprocessing,
    require_finite,
    resolve_pooling,
    role_prompts,
)
from distcse.models.pooling import AT_ONE_TOKEN, Dense, build_head, pool, token_position
from distcse.models.saving import replacing, save_model, write_layout
from distcse.models.st_format import Layout, find_prompt
from distcse.models.student import keep_layers
from distcse.models.texts import as_texts, is_template, token_ids
from distcse.recipe import EncoderSection, Pooling, Role, TrainedSection
from distcse.recipe.validation_errors import explain
from distcse.storage import ArtifactStore
from distcse.text.token_table import Reading


class Encoder(nn.Module):
    """Encodes texts or token ids into one vector per sentence.

    Args:
        backbone: A Hugging Face encoder.
        tokenizer: Its fast tokenizer.
        pooling: How token vectors are pooled.
        max_length: Maximum number of tokens per sentence, with special tokens.
        prompt: Prefix of every sentence, or a template with `{sentence}` in it. Default: none.
        normalize: Whether `encode`, and other readers of the saved folder, return unit vectors. Default: False.
        head: Modules from pooled vectors to sentence vectors. Default: none.
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
        self._readings: Mapping[Role, Reading] = {}
        self._settings = Layout()
        self.token_budget = TokenBudget()

    @classmethod
    def load(cls, path: str | Path, **settings: Any) -> Encoder:
        """Load an encoder from a folder or by name.

        Args:
            path: Folder, URI, `package:NAME/FOLDER` or hub id (see `resolve_model`).
            settings: Further fields of `EncoderSection`, such as pooling="mean".

        Raises:
            EncoderError: As for `from_section`.
        """
        try:
            section = EncoderSection(backbone=str(path), **settings)
        except ValidationError as invalid:
            raise EncoderSettingError(explain(invalid, EncoderSection, source="Encoder.load")) from None
        return cls.from_section(section)

    @classmethod
    def from_section(cls, section: EncoderSection, dtype: torch.dtype = torch.float32) -> Encoder:
        """Load the encoder that a recipe names; a student gets its selected layers, embedding size and dropout.

        Args:
            section: The recipe's settings of the encoder.
            dtype: Type of the matrices of linear layers; only frozen models use another than float32.

        Raises:
            ModelNotFoundError: No such model exists.
            PickledWeightsError: The weights are not safetensors.
            ModelFormatError: Weights are missing.
            EncoderSettingError: The pooling is unknown, or max_length exceeds the backbone's positions.
            EncoderError: Another problem of the model (see `distcse.errors`).
        """
        folder = open_model(section.backbone, section.trust_remote_code)
        check_weights(folder.root)
        layout = folder.layout
        tokenizer = folder.load_tokenizer()  # first: without one, the folder's pooling does not matter
        pooling = resolve_pooling(section, layout)
        dropout = section.dropout if isinstance(section, TrainedSection) else None
        configured_length = section.longest or layout.max_length
        trains = isinstance(section, TrainedSection)
        backbone = load_backbone(folder, dropout, configured_length, dtype, trains)
        if isinstance(section, TrainedSection) and section.layers is not None:
            keep_layers(backbone, section.layers)
        fast_dropout(backbone)
        check_vocabulary(folder.backbone, tokenizer, backbone)
        refuse_unsupported_preprocessing(section, layout, tokenizer)
        max_length = length_limit(section, layout, tokenizer, backbone)
        prompt, head = section.prompt or layout.prompt, build_head(folder.root, layout.head, _width(backbone))
        require_finite(folder.root, head)
        encoder = cls(backbone, tokenizer, pooling, max_length, prompt, layout.normalize, head)
        readings = readings_of(section, layout, max_length)
        encoder._readings = {role: each for role, each in readings.items() if each != Reading(prompt, max_length)}
        prompts = role_prompts(layout.prompts, readings)
        encoder.take_settings(replace(layout, prompts=prompts))
        return encoder

    def take_settings(self, source: Layout | Encoder) -> None:
        """Take the named prompts, truncation and similarity of a folder or another encoder, and of an encoder its roles."""
        self._settings = source._settings if isinstance(source, Encoder) else source
        self._readings = source._readings if isinstance(source, Encoder) else self._readings

    def append_linear(self, matrix: NDArray[np.float32]) -> None:
        """Map the vectors on to another model's space, by a module that is trained and saved with the others.

        Args:
            matrix: (D, d) its initial weights, from this encoder's d dimensions to D.

        Raises:
            UnsupportedModelError: The folder truncates its vectors, after all modules.
        """
        if self._settings.truncate_dim is not None:
            raise UnsupportedModelError(
                f"the model truncates its vectors to {self._settings.truncate_dim} dimensions, and no map can follow; "
                "remove truncate_dim from its config_sentence_transformers.json"
            )
        self.head.append(Dense.linear_map(matrix))

    def reading(self, role: Role) -> Reading:
        """Return how the texts of a role are read: all alike, unless recipe or folder say otherwise."""
        return self._readings.get(role, Reading(self.prompt, self.max_length))

    @property
    def roles_apart(self) -> set[Role]:
        """The roles that are not read as plain texts are."""
        return {role for role in get_args(Role) if self.reading(role) != self.reading("text")}

    @property
    def prompts(self) -> Mapping[str, str]:
        """Named prompts, for `prompt_name`."""
        return self._settings.prompts

    @property
    def similarity(self) -> str:
        """Name of the function with which the folder compares vectors, such as `cosine` or `dot`."""
        return self._settings.similarity

    @property
    def dimension(self) -> int:
        """Dimension d of a sentence vector."""
        size = next(
            (module.shape.out_features for module in reversed(self.head) if isinstance(module, Dense)), self.width
        )
        return min(size, self._settings.truncate_dim or size)

    @property
    def width(self) -> int:
        """Dimension H of token vectors and pooled vectors."""
        return _width(self.backbone)

    @property
    def has_dropout(self) -> bool:
        """Whether two passes of the backbone in training mode differ."""
        return has_dropout(self.backbone.config)

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.parameters()).device

    def forward(self, ids: Tensor, mask: Tensor, token_index: Tensor | None = None) -> Tensor:
        """Return (B, d) float32 sentence vectors, not normalized.

        Args:
            ids: (B, L) token ids.
            mask: (B, L), 1 at tokens and 0 at padding.
            token_index: (T,) ascending indices of all tokens in the flattened batch, to skip padding where the backbone
                can (see `Tokens`). Default: compute the padded batch.
        """
        return self._truncate(self._all_dimensions(ids, mask, token_index))

    def _all_dimensions(self, ids: Tensor, mask: Tensor, token_index: Tensor | None = None) -> Tensor:
        """Return the vectors of `forward` before their truncation."""
        position = None
        if self.pooling in AT_ONE_TOKEN and can_stop_at_one(self.backbone):
            position = token_position(self.pooling, mask, self._is_mask_token(ids))
        with short_cut(self.backbone, mask, token_index, position):
            states = self._hidden_states(ids, mask)
        if position is not None:
            return self._apply_head(states[:, 0].float())
        return self._apply_head(pool(self.pooling, states, mask, self._is_mask_token(ids)))

    def _truncate(self, vectors: Tensor) -> Tensor:
        size = self._settings.truncate_dim
        return vectors if size is None else vectors[:, :size]

    def tokens_and_vectors(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last layer's (B, L, H) token vectors and the (B, d) float32 sentence vectors of (B, L) ids and mask."""
        states = self._hidden_states(ids, mask)
        pooled = pool(self.pooling, states, mask, self._is_mask_token(ids))
        return states, self._truncate(self._apply_head(pooled))

    def _apply_head(self, pooled: Tensor) -> Tensor:
        vectors: Tensor = self.head(pooled).float()
        return vectors

    def _hidden_states(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the (B, L, H) hidden states of the last layer."""
        states: Tensor = self.backbone(
            input_ids=ids, attention_mask=prepare_mask(self.backbone, mask)
        ).last_hidden_state
        return states

    def _is_mask_token(self, ids: Tensor) -> Tensor | None:
        return ids == self.tokenizer.mask_token_id if self.pooling == "mask" else None

    def token_ids(self, texts: Sequence[str], prompt: str | None = None, role: Role = "text") -> list[list[int]]:
        """Tokenize texts of a role, truncated to its maximum length; another prompt replaces the role's."""
        reading = self.reading(role)
        return token_ids(self.tokenizer, texts, reading if prompt is None else replace(reading, prompt=prompt))

    def encode(
        self,
        texts: str | Iterable[str],
        *,
        role: Role = "text",
        prompt_name: str | None = None,
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """Encode n texts to (n, d) float32 vectors, or one text to its (d,) vector, without dropout or gradient.

        Texts with equal tokens are encoded once, and have bitwise equal vectors.

        Args:
            texts: A text; or a list, tuple, array, pandas Series or generator of texts.
            role: What the texts are to a search: `query`, `document`, or `text` (default) for neither.
            prompt_name: Name of the folder's prompt to use, such as `query`. Default: the role's prompt.
            batch_tokens: Maximum number of tokens per forward pass, with padding. Default: 2048 on a CPU, 65536 on a GPU;
                halved where the GPU's memory does not suffice.
            normalize: Whether to return unit vectors. Default: the model's own setting.
            precision: `fp32` (default), or `bf16` / `fp16` for autocast with float32 pooling.
            on_progress: Called with the number of distinct texts encoded so far.

        Raises:
            ArgumentError: `texts` are not texts; names the first that is none.
            EncoderSettingError: There is no prompt or precision of this name.
            DeviceMemoryError: A text does not fit in the GPU's memory.
        """
        prompt = None if prompt_name is None else self._prompt_named(prompt_name)
        found = as_texts([texts] if isinstance(texts, str) else texts)
        index_of: dict[tuple[int, ...], int] = {}
        indices: list[int] = []
        vectors = np.empty((len(found), self.dimension), dtype=np.float32)

        def chunks() -> Iterator[Chunk]:
            for part in split_chunks(found, self.device):
                known = len(index_of)
                new, part_indices = _distinct(self.token_ids(part, prompt, role), index_of)
                indices.extend(part_indices)
                yield Chunk([new], vectors[known : len(index_of)])

        for _ in self._run(chunks(), batch_tokens, normalize, precision, on_progress):
            pass
        if len(index_of) < len(found):
            vectors = vectors[indices]
        return np.asarray(vectors[0]) if isinstance(texts, str) else vectors

    def _prompt_named(self, name: str) -> str:
        prompt = find_prompt(self.prompts, name) if isinstance(name, str) else None
        if prompt is None:
            raise EncoderSettingError(
                f"the model has no prompt {name!r}; its prompts: {', '.join(self.prompts) or 'none'}"
            )
        if prompt and not self._settings.pools_prompt:
            raise UnsupportedModelError(
                "the model pools without the prompt's tokens (include_prompt: false), which distcse does not support; "
                "encode without a prompt"
            )
        return prompt

    def encode_each(
        self,
        groups: Iterable[Sequence[str]],
        *,
        roles: Iterable[Role] = repeat("text"),
        batch_tokens: int | None = None,
        normalize: bool | None = None,
        precision: str = "fp32",
        on_progress: Callable[[int], None] | None = None,
    ) -> Iterator[NDArray[np.float32]]:
        """Encode groups of texts, one after the other, as `encode` does.

        A thread reads and tokenizes the next group while one is computed. On a GPU, the next group is also queued before a
        group's vectors are yielded, so that the device computes while the caller stores them.

        Args:
            groups: The groups, such as the shards of a table. A thread advances this iterator.
            roles: The role of each group's texts. Default: `text`.
            batch_tokens: See `encode`.
            normalize: See `encode`.
            precision: See `encode`.
            on_progress: See `encode`.

        Yields:
            The (n, d) float32 vectors of each group's n texts.

        Raises:
            ArgumentError: A group is not texts; names the first of its texts that is none.
            DeviceMemoryError: A text does not fit in the GPU's memory.
        """
        indices: deque[list[int]] = deque()

        def chunks() -> Iterator[Chunk]:
            for texts, role in zip(groups, roles, strict=False):
                rows, group_indices = _distinct(self.token_ids(as_texts(texts), role=role), {})
                indices.append(group_indices)
                yield Chunk([rows], np.empty((len(rows), self.dimension), dtype=np.float32))

        for chunk in self._run(chunks(), batch_tokens, normalize, precision, on_progress, ahead=True):
            group_indices = indices.popleft()
            yield chunk.out if len(chunk.out) == len(group_indices) else chunk.out[group_indices]

    def _run(
        self,
        chunks: Iterable[Chunk],
        batch_tokens: int | None,
        normalize: bool | None,
        precision: str,
        on_progress: Callable[[int], None] | None = None,
        ahead: bool = False,
    ) -> Iterator[Chunk]:
        is_normalized = self.normalize if normalize is None else normalize
        # sentence-transformers truncates unit vectors, unless the caller asks for unit vectors.
        truncates_last = normalize is None and self.normalize and self._settings.truncate_dim is not None

        def forward(tokens: Tensor) -> Tensor:
            if truncates_last:
                return self._truncate(unit(self._all_dimensions(*tokens), dim=1))
            encoded: Tensor = self(*tokens)
            return unit(encoded, dim=1) if is_normalized else encoded

        return run_frozen(
            self,
            forward,
            chunks,
            pads=[self.tokenizer.pad_token_id or 0],
            budget=self.token_budget,
            batch_tokens=batch_tokens,
            precision=precision,
            on_progress=on_progress,
            ahead=ahead,
        )

    def save(self, path: str | Path | ArtifactStore) -> None:
        """Write the folder that sentence-transformers 2 to 6, TEI, vLLM and llama.cpp read, replacing it atomically.

        Raises:
            UnsupportedModelError: The layout cannot express the model's prompt template or [MASK] pooling.
        """
        with replacing(path) as folder:
            self.write(folder)

    @without_noise()
    def write(self, folder: Path) -> None:
        """Write the files of `save` into an existing folder."""
        if self.pooling == "mask" or is_template(self.prompt):
            raise UnsupportedModelError(
                "the sentence-transformers layout cannot express a prompt template or pooling mask; "
                "save a model with another pooling and a prefix as its prompt"
            )
        save_model(self.backbone, self.tokenizer, folder, self.max_length)
        write_layout(folder, self._layout(), self.width, self.head)

    def _layout(self) -> Layout:
        return replace(
            self._settings,
            pooling=self.pooling,
            max_length=self.max_length,
            normalize=self.normalize,
            prompt=self.prompt,
        )


class EncoderHandle:
    """A way to load an encoder. The process that loads it keeps it; pickled, a handle is only the way to load it."""

    def __init__(self, load: Callable[[], Encoder]) -> None:
        self._load = load
        self._encoder: Encoder | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return EncoderHandle, (self._load,)

    def get(self) -> Encoder:
        """Return the encoder, loaded on the first call."""
        if self._encoder is None:
            self._encoder = self._load()
        return self._encoder

    def take(self) -> Encoder:
        """Return the encoder and no longer hold it, so that it is freed after its last use."""
        encoder, self._encoder = self.get(), None
        return encoder


def _width(backbone: nn.Module) -> int:
    return int(backbone.config.hidden_size)  # type: ignore[union-attr, arg-type]


def _distinct(
    rows: Iterable[Sequence[int]], index_of: dict[tuple[int, ...], int]
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Add rows of token ids to an index of distinct rows; return the new ones, and each row's number in the index."""
    new: list[tuple[int, ...]] = []
    indices: list[int] = []
    for row in map(tuple, rows):
        if row not in index_of:
            index_of[row] = len(index_of)
            new.append(row)
        indices.append(index_of[row])
    return new, indices
