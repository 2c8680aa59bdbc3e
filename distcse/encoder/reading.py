"""How a model reads a text: its tokenizer, length and prompt, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distcse.encoder.encoder import Encoder
from distcse.encoder.folder import check_weights, read_layout, refuse_pickled_weights
from distcse.encoder.loading import load_tokenizer
from distcse.encoder.source import resolve_model
from distcse.recipe import EncoderSection


@dataclass(frozen=True)
class TextReading:
    """What decides a text's tokens."""

    tokenizer: Any
    max_length: int
    """Tokens kept, special tokens included."""
    prompt: str

    @classmethod
    def of(cls, section: EncoderSection) -> TextReading:
        """As `Encoder.from_section` reads. Only where neither recipe nor folder says a length are the weights loaded.

        Raises:
            EncoderError: Nothing there, no safetensors, or no fast tokenizer. Whether weights load is not asked.
        """
        folder = resolve_model(section.backbone, section.trust_remote_code)
        refuse_pickled_weights(folder)
        check_weights(folder)
        layout = read_layout(folder)
        max_length = section.max_length or layout.max_length
        if max_length is None:
            encoder = Encoder.from_section(section)
            return cls(encoder.tokenizer, encoder.max_length, encoder.prompt)
        return cls(load_tokenizer(folder, section.trust_remote_code), max_length, section.prompt or layout.prompt)
