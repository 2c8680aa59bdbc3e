"""Private and undocumented names of transformers. Tried with transformers 5.23.0; pyproject.toml allows 5."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LIBRARY_LOGGER = "transformers"


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


def only_calls_rust(tokenizer: Any) -> bool:
    """Return whether a fast tokenizer passes texts to its Rust tokenizer as they are: its class replaces no method.

    Private: `TokenizersBackend._encode_plus`, which classes such as CodeLlama's replace.
    """
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

    kind = type(tokenizer)
    return (
        issubclass(kind, PreTrainedTokenizerFast)
        and kind._encode_plus is PreTrainedTokenizerFast._encode_plus
        and kind.__call__ is PreTrainedTokenizerBase.__call__
    )


@contextmanager
def without_noise() -> Iterator[None]:
    """Silence this thread's warnings and all progress bars of transformers while a model is loaded or saved; also a decorator.

    Its load reports advise to train, and name weights that are not used here. `load_backbone` logs those that matter.

    Undocumented: the name of the library's logger, and that it has the handlers (where the environment has CI=1, its records
    reach the root's too). `transformers.logging.set_verbosity_error` would also silence other threads.
    """
    from transformers.utils.logging import disable_progress_bar

    thread, handlers = threading.get_ident(), _handlers_reached(logging.getLogger(LIBRARY_LOGGER))

    def is_shown(record: logging.LogRecord) -> bool:
        is_theirs = record.name.startswith(LIBRARY_LOGGER)  # users may share their handlers with other loggers
        return not is_theirs or record.thread != thread or record.levelno >= logging.ERROR

    disable_progress_bar()
    for handler in handlers:
        handler.addFilter(is_shown)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_shown)


def _handlers_reached(logger: logging.Logger) -> list[logging.Handler]:
    """Return all handlers that a record of this logger reaches: its own, and those of the loggers that it propagates to."""
    found: list[logging.Handler] = []
    above: logging.Logger | None = logger
    while above is not None:
        found += above.handlers
        above = above.parent if above.propagate else None
    return found
