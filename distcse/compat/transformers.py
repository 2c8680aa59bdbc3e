"""Private and undocumented names of transformers. Tried with transformers 5.23.0; pyproject.toml allows 5."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LOAD_REPORT_LOGGER = "transformers.modeling_utils"


def attention_implementation(config: Any) -> str | None:
    """Return the attention that a loaded model computes: `eager`, `sdpa` or another.

    Private: `PretrainedConfig._attn_implementation`. `attn_implementation` is an argument of `from_pretrained`, and nothing
    public says what its default was resolved to.
    """
    chosen: str | None = config._attn_implementation
    return chosen


def rotary_embedding() -> Callable[..., Any]:
    """Return ModernBERT's function that rotates queries and keys by their positions.

    Undocumented: a function of a model's module. It is part of the model's definition, and no layer offers it.
    """
    from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

    rotate: Callable[..., Any] = apply_rotary_pos_emb
    return rotate


@contextmanager
def without_load_report() -> Iterator[None]:
    """Silence the warning of missing weights: they are intended here, or raise an error.

    Undocumented: the logger's name. `transformers.logging.set_verbosity_error` would also silence all other warnings, in all
    threads.
    """
    logger = logging.getLogger(LOAD_REPORT_LOGGER)
    logger.addFilter(_reject)
    try:
        yield
    finally:
        logger.removeFilter(_reject)


def _reject(record: logging.LogRecord) -> bool:
    return False
