"""Imports of large libraries, which come faster while Python does not look for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Within this, Python's collector of cycles stays out.

    PyTorch and transformers make hundreds of thousands of objects when they are imported, hardly one of them garbage, and the
    collector goes through them again and again: a fifth of the time that imports take.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
