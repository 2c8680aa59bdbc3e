"""Runs the writing of a checkpoint in a thread, while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_running: set[Future[Any]] = set()
"""The writes that run in this process."""


def is_writing() -> bool:
    """Return whether this process writes a checkpoint now."""
    return bool(_running)


class CheckpointWriter(Generic[T]):
    """Runs one write after the other, at most one at once. Only one thread may use it.

    Args:
        in_background: Whether calls run in a thread; otherwise `start` runs them.
        name: Name of the thread.
        is_write: Whether calls count for `is_writing`. Default: True.
    """

    def __init__(self, in_background: bool, name: str = "checkpoint-writer", is_write: bool = True) -> None:
        self._in_background, self._name, self._is_write = in_background, name, is_write
        self._write: Future[T] | None = None

    def start(self, write: Callable[[], T]) -> None:
        """Start a write. The result of the previous one must have been taken."""
        assert self._write is None
        self._write = future = Future[T]()

        def run() -> None:
            if self._is_write:
                _running.add(future)
            try:
                future.set_result(write())
            except BaseException as error:  # raised by `take`
                future.set_exception(error)
            finally:
                _running.discard(future)

        if self._in_background:
            # A daemon, so that a process can end without it: storage shows a complete checkpoint or none.
            threading.Thread(target=run, name=self._name, daemon=True).start()
        else:
            run()

    def is_busy(self, patience_s: float = 0.0) -> bool:
        """Return whether a write is running, after waiting at most `patience_s` seconds for it. Default: 0."""
        if self._write is None:
            return False
        wait([self._write], patience_s)
        return not self._write.done()

    def take(self) -> T | None:
        """Wait for the write, and return its result; None if there is none, or its result was taken before.

        Raises:
            BaseException: The write raised it.
        """
        if self._write is None:
            return None
        write = self._write
        try:
            return write.result()
        finally:
            if write.done():
                self._write = None
