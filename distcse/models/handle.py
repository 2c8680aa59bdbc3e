"""A handle to an encoder that several processes may need and few should hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distcse.models.encoder import Encoder


class EncoderHandle:
    """A way to load an encoder. The process that loads it keeps it; pickled, a handle is only the way to load it.

    Args:
        load: Loads the encoder; picklable.
    """

    def __init__(self, load: Callable[[], Encoder]) -> None:
        self._load = load
        self._encoder: Encoder | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return EncoderHandle, (self._load,)

    @property
    def is_loaded(self) -> bool:
        """Whether this process holds the encoder."""
        return self._encoder is not None

    def get(self) -> Encoder:
        """Return the encoder, loaded on the first call."""
        if self._encoder is None:
            self._encoder = self._load()
        return self._encoder

    def take(self) -> Encoder:
        """Return the encoder and no longer hold it, so that it is freed after its last use."""
        encoder, self._encoder = self.get(), None
        return encoder
