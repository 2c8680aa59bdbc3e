"""Import large libraries faster by pausing Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector.

    Importing PyTorch and transformers creates hundreds of thousands of objects, hardly any of them garbage. Without the
    pause, repeated collections take a fifth of the import time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
