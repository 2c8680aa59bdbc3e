"""Streams, events, pinned memory, and copies between it and the device, which nothing waits for.

A copy to pinned memory arrives when the host waits for its stream or an event: until then, the memory holds NaN or the smallest
integer. On a side stream it also reads its source as late as the program allows: when the host or another stream waits for it.
A copy from pinned memory must find it unchanged when the host waits. Races of a program thus become wrong numbers or errors.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tests.gpusim.simulation import active

_pinned: set[int] = set()
"""Addresses of pinned storages."""
_local = threading.local()


class CopyToHost:
    """A copy from the device to pinned memory that has not arrived."""

    def __init__(self, source: Tensor, target: Tensor) -> None:
        self._source, self._target = source, target
        self._is_read = self._is_done = False
        with torch.no_grad():
            target.fill_(_poison(target.dtype))

    def read(self) -> None:
        """Read the source: what is written to it later no longer counts."""
        if not self._is_read:
            self._source, self._is_read = self._source.clone(), True

    def finish(self) -> None:
        """Let the copy arrive."""
        self.read()
        if not self._is_done:
            with torch.no_grad():
                self._target.copy_(self._source)
            self._is_done = True


class CopyToDevice:
    """A copy from pinned memory to the device, which must not be overwritten before."""

    def __init__(self, source: Tensor) -> None:
        self._source, self._copied = source, source.clone()
        self._is_done = False

    def read(self) -> None:
        """Do nothing: the device has its copy."""

    def finish(self) -> None:
        """Check that the memory still holds what was copied."""
        if not self._is_done and not torch.equal(_bytes(self._source), _bytes(self._copied)):
            raise RuntimeError(
                f"{tuple(self._source.shape)} in pinned memory were overwritten before their copy to the device was "
                "waited for: a GPU may read the new values"
            )
        self._is_done = True


Copy = CopyToHost | CopyToDevice


class Stream:
    """A queue of the device. Operations run at once; copies to the host arrive later."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.copies: list[Copy] = []

    def add(self, copy: Copy) -> None:
        """Queue a copy."""
        self.copies.append(copy)
        if self is default_stream():
            copy.read()  # nothing on this stream can write to the source before

    def finish(self) -> None:
        """Let all copies arrive."""
        _finish(self.copies)
        self.copies.clear()

    def synchronize(self) -> None:
        """Wait for all copies."""
        active().wait("stream.synchronize")
        self.finish()

    def wait_stream(self, stream: Stream) -> None:
        """Order this stream's next work behind all of another stream's."""
        self._order_behind(stream.copies)

    def _order_behind(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            copy.read()
        self.copies.extend(copy for copy in copies if copy not in self.copies)


class Event:
    """A point in a stream that the host or another stream can wait for."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.copies: list[Copy] = []
        self._recorded_at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Record the work that is queued on a stream so far."""
        self.copies = list((stream or current_stream()).copies)
        self._recorded_at = time.perf_counter()

    def synchronize(self) -> None:
        """Wait for the recorded work."""
        active().wait("event.synchronize")
        _finish(self.copies)

    def elapsed_time(self, end: Event) -> float:
        """Return the host's milliseconds between two records, at least a thousandth."""
        return max(1e-3, 1000 * (end._recorded_at - self._recorded_at))


_default = Stream()


def default_stream(device: object = None) -> Stream:
    """Return the stream that all threads start with."""
    return _default


def current_stream(device: object = None) -> Stream:
    """Return this thread's stream."""
    found: Stream = getattr(_local, "stream", _default)
    return found


def set_stream(stream: Stream) -> None:
    """Make a stream this thread's."""
    _local.stream = stream


@contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    """Context manager: make a stream this thread's."""
    before = current_stream()
    set_stream(before if stream is None else stream)
    try:
        yield
    finally:
        set_stream(before)


def pin(tensor: Tensor) -> Tensor:
    """Mark a CPU tensor's memory as pinned."""
    if active().is_recording():
        raise RuntimeError("operation not permitted when stream is capturing: an allocation of pinned memory")
    storage = tensor.untyped_storage()
    _pinned.add(storage.data_ptr())
    weakref.finalize(storage, _pinned.discard, storage.data_ptr()).atexit = False
    return tensor


def is_pinned(tensor: Tensor) -> bool:
    """Return whether a CPU tensor's memory is pinned."""
    return tensor.untyped_storage().data_ptr() in _pinned


def _finish(copies: Iterable[Copy]) -> None:
    for copy in copies:
        copy.finish()


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
