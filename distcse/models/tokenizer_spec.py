"""How a model reads texts: its tokenizer, with the prompt and the maximum length of each role. No weights are loaded for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from distcse.models.encoder import Encoder
from distcse.models.folder import open_model
from distcse.models.loading import readings_of, refuse_unsupported_preprocessing, resolve_pooling
from distcse.models.texts import token_ids
from distcse.recipe import EncoderSection, Role
from distcse.text.token_table import Reading


@dataclass(frozen=True)
class TokenizerSpec:
    """Determines the tokens of a text.

    Attributes:
        tokenizer: A fast Hugging Face tokenizer.
        readings: The prompt and maximum length of each role.
    """

    tokenizer: Any
    readings: Mapping[Role, Reading]

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of plain texts, with special tokens."""
        return self.readings["text"].max_length

    @property
    def prompt(self) -> str:
        """Prefix or template of plain texts; may be empty."""
        return self.readings["text"].prompt

    def token_ids(self, texts: Sequence[str], role: Role = "text") -> list[list[int]]:
        """Tokenize texts of a role, as `Encoder.token_ids` does."""
        return token_ids(self.tokenizer, texts, self.readings[role])

    @classmethod
    def of(cls, section: EncoderSection) -> TokenizerSpec:
        """Return the settings that `Encoder.from_section` would use.

        Loads the weights only if neither recipe nor folder has a maximum length.
        """
        folder = open_model(section.backbone, section.trust_remote_code)
        layout = folder.layout
        tokenizer = folder.load_tokenizer()
        resolve_pooling(section, layout)
        max_length = section.longest or layout.max_length
        if max_length is None:
            encoder = Encoder.from_section(section)
            return cls(encoder.tokenizer, {role: encoder.reading(role) for role in get_args(Role)})
        folder.supported_config()
        refuse_unsupported_preprocessing(section, layout, tokenizer)
        return cls(tokenizer, readings_of(section, layout, max_length))
