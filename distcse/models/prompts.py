"""Words around a sentence: a prefix, or a template that the sentence stands in (PromptBERT)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distcse.errors import EncoderSettingError

SENTENCE = "{sentence}"


def is_template(prompt: str) -> bool:
    """Whether a prompt has a place for the sentence; else it is put before."""
    return SENTENCE in prompt


def prompted(tokenizer: Any, texts: Sequence[str], prompt: str, max_length: int) -> list[str]:
    """Each text in its prompt. In a template a long text is cut, so that the words behind it are still there.

    Raises:
        EncoderError: A template that leaves no token for a sentence.
    """
    if not prompt:
        return list(texts)
    if not is_template(prompt):
        return [prompt + text for text in texts]
    room = max_length - len(tokenizer(prompt.replace(SENTENCE, ""))["input_ids"])
    if room < 1:
        raise EncoderSettingError(f"prompt {prompt!r} takes all of {max_length} tokens; raise max_length")
    cut = tokenizer(
        list(texts), truncation=True, max_length=room, add_special_tokens=False, return_offsets_mapping=True
    )["offset_mapping"]
    ends = [offsets[-1][1] if offsets else 0 for offsets in cut]
    return [prompt.replace(SENTENCE, text[:end]) for text, end in zip(texts, ends, strict=True)]
