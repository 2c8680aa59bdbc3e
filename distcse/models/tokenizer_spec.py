"""A model's tokenizer, length and prompt, loaded without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from distcse.models.encoder import Encoder
from distcse.models.folder import open_model
from distcse.models.loading import refuse_unsupported_preprocessing, resolve_pooling
from distcse.recipe import EncoderSection


@dataclass(frozen=True)
class TokenizerSpec:
    """Determines the tokens of a text.

    Attributes:
        tokenizer: A fast Hugging Face tokenizer.
        max_length: Maximum number of tokens, with special tokens.
        prompt: Prefix or template of the texts; may be empty.
    """

    tokenizer: Any
    max_length: int
    prompt: str

    @classmethod
    def of(cls, section: EncoderSection) -> TokenizerSpec:
        """Return the settings that `Encoder.from_section` would use.

        Loads the weights only if neither recipe nor folder has a maximum length.

        Raises:
            ModelNotFoundError: No such model exists.
            PickledWeightsError: The weights are not safetensors.
            TokenizerMismatchError: The tokenizer does not load, or is slow.
            UnsupportedModelError: The model preprocesses texts in an unsupported way.
            EncoderSettingError: The pooling is unknown.
        """
        folder = open_model(section.backbone, section.trust_remote_code)
        layout = folder.layout
        tokenizer = folder.load_tokenizer()
        resolve_pooling(section, layout)
        max_length = section.max_length or layout.max_length
        if max_length is None:
            encoder = Encoder.from_section(section)
            return cls(encoder.tokenizer, encoder.max_length, encoder.prompt)
        folder.check_config()
        refuse_unsupported_preprocessing(section, layout, tokenizer)
        return cls(tokenizer, max_length, section.prompt or layout.prompt)
