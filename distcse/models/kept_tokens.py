"""Token ids of texts that a model in training encodes at every dev score: a GPU waits long for them.

The first score tokenizes all texts before it computes, where `Encoder.encode` tokenizes the next chunk meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from distcse.models.encoder import Encoder
from distcse.models.texts import as_texts

MAX_CHARACTERS = 2**22
"""Most characters of the texts whose token ids are kept: in English about a million tokens, of 36 bytes each."""


class KeptTokens:
    """Encodes the same texts with changing weights, and tokenizes them only the first time.

    Args:
        max_characters: Most characters of all texts whose token ids are kept; further ones are tokenized every time.
    """

    def __init__(self, max_characters: int = MAX_CHARACTERS) -> None:
        self._room = max_characters
        self._rows: dict[tuple[str, ...], list[tuple[int, ...]]] = {}

    def encode(
        self, encoder: Encoder, texts: Sequence[str], normalize: bool | None = None, precision: str = "fp32"
    ) -> NDArray[np.float32]:
        """Encode n texts to (n, d) vectors, bitwise those of `Encoder.encode`.

        Args:
            encoder: The encoder; in all calls with the same tokenizer, prompt and `max_length`.
            texts: The texts.
            normalize: See `Encoder.encode`.
            precision: See `Encoder.encode`.

        Raises:
            ArgumentError: `texts` are not texts.
            DeviceMemoryError: A text does not fit in the GPU's memory.
        """
        found = as_texts(texts)
        key = tuple(found)
        if key not in self._rows:
            if (characters := sum(map(len, found))) > self._room:
                return encoder.encode(found, normalize=normalize, precision=precision)
            self._rows[key] = [*map(tuple, encoder.token_ids(found))]
            self._room -= characters
        return encoder.encode_tokens(self._rows[key], normalize=normalize, precision=precision)
