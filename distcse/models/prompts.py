"""Prompts: a prefix of each sentence, or a template around it (PromptBERT, Jiang et al. 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcse.errors import EncoderSettingError

SENTENCE = "{sentence}"


def is_template(prompt: str) -> bool:
    """Return whether a prompt is a template with `{sentence}`; otherwise it is a prefix."""
    return SENTENCE in prompt


def apply_prompt(tokenizer: Any, texts: Sequence[str], prompt: str, max_length: int) -> list[str]:
    """Insert each text into the prompt. A template truncates long texts, so that the words after them remain.

    Args:
        tokenizer: A fast Hugging Face tokenizer.
        texts: The texts.
        prompt: A prefix, a template with `{sentence}`, or empty.
        max_length: Maximum number of tokens of the result, with special tokens; used by templates.

    Raises:
        EncoderSettingError: The template leaves no token for the sentence.
    """
    if not prompt:
        return list(texts)
    if not is_template(prompt):
        return [prompt + text for text in texts]
    available = max_length - len(tokenizer(prompt.replace(SENTENCE, ""))["input_ids"])
    if available < 1:
        raise EncoderSettingError(f"prompt {prompt!r} needs all {max_length} tokens; raise max_length")
    truncated = tokenizer(
        list(texts), truncation=True, max_length=available, add_special_tokens=False, return_offsets_mapping=True
    )["offset_mapping"]
    ends = [offsets[-1][1] if offsets else 0 for offsets in truncated]
    return [prompt.replace(SENTENCE, text[:end]) for text, end in zip(texts, ends, strict=True)]
