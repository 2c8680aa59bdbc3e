"""How a model reads a text: its tokenizer, length and prompt, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distcse.models.encoder import Encoder
from distcse.models.loading import load_tokenizer, pooling_of, refuse_other_reading
from distcse.models.source import resolve_model
from distcse.models.st_format import read_layout, refuse_pickled_weights, refuse_weights_elsewhere
from distcse.recipe import EncoderSection


@dataclass(frozen=True)
class TokenizerSpec:
    """What decides a text's tokens."""

    tokenizer: Any
    max_length: int
    """Tokens kept, special tokens included."""
    prompt: str

    @classmethod
    def of(cls, section: EncoderSection) -> TokenizerSpec:
        """As `Encoder.from_section` reads. Only where neither recipe nor folder says a length are the weights loaded.

        Raises:
            EncoderError: Nothing there, no safetensors, no fast tokenizer, a reading that is not ours, or a pooling that nobody
                says. Whether weights load is not asked.
        """
        folder = resolve_model(section.backbone, section.trust_remote_code)
        refuse_pickled_weights(folder)
        refuse_weights_elsewhere(folder)
        layout = read_layout(folder)
        pooling_of(section, layout)
        max_length = section.max_length or layout.max_length
        if max_length is None:
            encoder = Encoder.from_section(section)
            return cls(encoder.tokenizer, encoder.max_length, encoder.prompt)
        tokenizer = load_tokenizer(folder, section.trust_remote_code)
        refuse_other_reading(section, layout, tokenizer)
        return cls(tokenizer, max_length, section.prompt or layout.prompt)
