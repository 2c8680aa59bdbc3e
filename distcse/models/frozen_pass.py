"""Forward passes of a frozen model over many texts: embedding tables, live lists, scores, evaluations.

On a GPU the host runs ahead of the device. A thread tokenizes the next chunk of texts while the device computes, inputs and
outputs are copied through pinned memory without a wait, and the host waits once per chunk, when the next one is queued. On a
CPU, all of a call's texts are one chunk, and the shards of a table are tokenized one ahead.
"""

from __future__ import annotations

import gc
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from distcse.devices.device import CPU, HostCopies, arithmetic, defaults_of, gpu_module, is_gpu, to_device
from distcse.errors import DeviceMemoryError


def by_length(
    ids: Sequence[Sequence[int]], batch_tokens: int, min_fill: float = CPU.frozen_min_fill
) -> list[list[int]]:
    """Return batches of text indices, longest texts first.

    Args:
        ids: Token ids of each text.
        batch_tokens: Maximum number of tokens per batch, with padding; a longer text is a batch alone.
        min_fill: Smallest share of `batch_tokens` at which a batch ends with its longest texts, and so has no padding.
            1 fills every batch. Default: that of a CPU.
    """
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]), reverse=True)
    lengths = [-len(ids[index]) for index in order]
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        longest = max(1, -lengths[start])
        end = start + max(1, batch_tokens // longest)
        first_shorter = bisect_right(lengths, lengths[start], lo=start)
        if (first_shorter - start) * longest >= min_fill * batch_tokens:
            end = min(end, first_shorter)
        batches.append(order[start:end])
        start = end
    return batches


def padded(fields: Sequence[Sequence[Sequence[int]]], pads: Sequence[int]) -> Tensor:
    """Pad rows of tokens on the right.

    Args:
        fields: F fields of the same B rows, such as token ids and token types; equal lengths in all fields.
        pads: The F numbers that pad them.

    Returns:
        (F + 1, B, L) int64: the fields, and the mask, 1 at tokens and 0 at padding.
    """
    lengths = np.fromiter(map(len, fields[0]), np.int64, len(fields[0]))
    is_token = np.arange(lengths.max()) < lengths[:, None]
    batch = np.empty((len(fields) + 1, *is_token.shape), np.int64)
    for field, rows, pad in zip(batch, fields, pads, strict=False):
        field.fill(pad)
        field[is_token] = np.fromiter(chain.from_iterable(rows), np.int64, lengths.sum())
    batch[-1] = is_token
    return torch.from_numpy(batch)


CHUNK_TEXTS = 16_384
"""Texts that are tokenized, sorted by length and waited for together on a GPU: some six forward passes of sentences."""
FIRST_TEXTS = 2_048
"""Texts of a call's first chunk on a GPU, for whose tokens the device waits: some forward pass of sentences."""

_LOG = logging.getLogger(__name__)
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Chunk:
    """Texts that are computed together, and the place of their results."""

    fields: Sequence[Sequence[Sequence[int]]]
    """Token ids of n texts, and any other fields of their tokens (see `padded`)."""
    out: NDArray[Any]
    """(n, …) results, in the order of the texts; complete when `run_frozen` yields the chunk."""


class TokenBudget:
    """Number of tokens per forward pass of one frozen model; lowered for good when the device runs out of memory."""

    def __init__(self) -> None:
        self._limit: int | None = None

    def tokens(self, requested: int | None, device: torch.device) -> int:
        """Return the number of tokens for a pass."""
        tokens = defaults_of(device).frozen_batch_tokens if requested is None else requested
        return tokens if self._limit is None else min(tokens, self._limit)

    def lower(self, batch: Tensor, problem: str) -> None:
        """Halve the number of tokens, and report it, after a pass ran out of memory."""
        _, texts, length = batch.shape
        if texts == 1:
            raise DeviceMemoryError(
                f"one text of {length:,} tokens does not fit in the device's memory: {problem} Lower max_length, or leave "
                "more memory to this process: fewer processes per GPU, or a smaller model"
            )
        self._limit = texts * length // 2
        _LOG.warning(
            "out of memory in a frozen model's forward pass of %s tokens; its passes have at most %s from now on (%s)",
            f"{texts * length:,}",
            f"{self._limit:,}",
            problem,
        )


def split_chunks(items: Sequence[_Item], device: torch.device) -> Iterator[Sequence[_Item]]:
    """Split a call's texts into those of each chunk: all of them on a CPU.

    On a GPU, chunks grow from `FIRST_TEXTS` by doubling to `CHUNK_TEXTS`: the device begins early, and computes one chunk while
    the next is tokenized, also in calls of few thousand texts.
    """
    size, begin = (min(FIRST_TEXTS, CHUNK_TEXTS) if is_gpu(device) else max(1, len(items))), 0
    while begin < len(items):
        yield items[begin : begin + size]
        begin, size = begin + size, min(2 * size, CHUNK_TEXTS)


def run_frozen(
    model: nn.Module,
    forward: Callable[[Tensor], Tensor],
    chunks: Iterable[Chunk],
    *,
    pads: Sequence[int],
    budget: TokenBudget,
    batch_tokens: int | None,
    precision: str,
    on_progress: Callable[[int], None] | None = None,
    ahead: bool = False,
) -> Iterator[Chunk]:
    """Compute chunks of texts in batches of similar lengths, without dropout or gradient.

    Args:
        model: The model that `forward` calls; it is in evaluation mode during the passes.
        forward: Maps the (F + 1, B, L) tokens of a batch, whose last field is the mask, to a (B, …) output.
        chunks: The texts. On a GPU, or with `ahead`, a thread advances this iterator.
        pads: The numbers that pad the F fields.
        budget: The model's number of tokens per pass.
        batch_tokens: Maximum number of tokens per pass, with padding; None for the device's default.
        precision: `fp32`, or `bf16` / `fp16` for autocast.
        on_progress: Called with the number of texts computed so far, on a GPU of those queued: at most two chunks more.
        ahead: Also on a CPU, a thread makes the next chunk while one is computed and its results are used. Default: False,
            because starting a thread takes as long as a pass of one short text.

    Yields:
        Each chunk, with its results in `out`.

    Raises:
        DeviceMemoryError: A text does not fit in the device's memory.
    """
    device = next(model.parameters()).device
    queued: deque[QueuedChunk] = deque()
    done = 0

    def count(texts: int) -> None:
        nonlocal done
        done += texts
        if on_progress is not None:
            on_progress(done)

    for chunk in _ahead(iter(chunks)) if ahead or is_gpu(device) else chunks:
        queued.append(QueuedChunk(chunk, device))
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), arithmetic(precision, device):
                _queue(queued[-1], forward, pads, budget, batch_tokens, count)
        finally:
            model.train(was_training)
        if len(queued) > is_gpu(device):
            yield queued.popleft().finish()
    for last in queued:
        yield last.finish()


class QueuedChunk:
    """A chunk whose forward passes are queued on the device, or complete on a CPU."""

    def __init__(self, chunk: Chunk, device: torch.device) -> None:
        self.chunk, self.device = chunk, device
        self._batches: list[list[int]] = []
        self._copies = HostCopies(device)

    def add(self, batch: list[int], output: Tensor) -> None:
        if is_gpu(self.device):
            self._copies.add(output)  # first: where it has no memory, the batch is queued again
            self._batches.append(batch)
        else:
            self.chunk.out[batch] = output.cpu().numpy()

    def finish(self) -> Chunk:
        """Wait for the results, and write them to the chunk's `out`."""
        for batch, output in zip(self._batches, self._copies.wait(), strict=True):
            self.chunk.out[batch] = output.numpy()
        return self.chunk


def _queue(
    queued: QueuedChunk,
    forward: Callable[[Tensor], Tensor],
    pads: Sequence[int],
    budget: TokenBudget,
    batch_tokens: int | None,
    count: Callable[[int], None],
) -> None:
    """Queue a chunk's forward passes, in smaller batches from one that runs out of memory on."""
    fields, device = queued.chunk.fields, queued.device
    min_fill = defaults_of(device).frozen_min_fill
    batches = deque(by_length(fields[0], budget.tokens(batch_tokens, device), min_fill))
    while batches:
        batch = batches.popleft()
        tokens = padded([[field[index] for index in batch] for field in fields], pads)
        problem = _attempt(queued, batch, tokens, forward)
        if problem is None:
            count(len(batch))
            continue
        gc.collect()  # some models hold an error's traceback, and with it the pass's tensors, in a cycle
        if is_gpu(device):
            gpu_module(device).empty_cache()
        budget.lower(tokens, problem)
        left = [index for part in (batch, *batches) for index in part]
        smaller = by_length([fields[0][index] for index in left], budget.tokens(batch_tokens, device), min_fill)
        batches = deque([left[position] for position in part] for part in smaller)


def _attempt(queued: QueuedChunk, batch: list[int], tokens: Tensor, forward: Callable[[Tensor], Tensor]) -> str | None:
    """Queue one forward pass; return the problem if the device has too little memory for it.

    The exception ends here: its traceback holds the tensors of the failed pass.
    """
    try:
        queued.add(batch, forward(to_device(tokens, queued.device)))
    except torch.OutOfMemoryError as error:
        return " ".join(str(error).split()).partition(" If reserved")[0]  # PyTorch's advice on its own settings follows
    return None


def _ahead(items: Iterator[_Item]) -> Iterator[_Item]:
    """Yield items; a thread computes the next one while the caller uses the last."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenize-ahead") as thread:
        coming = thread.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = thread.submit(next, items, None)
            yield item
