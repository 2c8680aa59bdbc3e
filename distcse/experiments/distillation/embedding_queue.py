"""Vectors beyond the batch that lengthen the student's lists without gradient: a queue of recent batches, and anchors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from distcse.distributed import all_gather_parts, rank, world_size


class EmbeddingQueue(nn.Module):
    """FIFO queue of the last batches' vectors, and vectors of fixed anchor sentences; equal on all workers.

    Both are buffers, so that a checkpoint holds them and a resumed run continues with them.

    Args:
        queue_size: Number of vectors in the queue: batches times batch size.
        num_anchors: Number of anchors, which are in every list.
        dimension: Size of a vector.
    """

    queue: Tensor
    anchors: Tensor

    def __init__(self, queue_size: int, num_anchors: int, dimension: int) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(queue_size, dimension))
        self.register_buffer("anchors", torch.zeros(num_anchors, dimension))

    @property
    def vectors(self) -> Tensor:
        """(queue_size + num_anchors, d) float32: the queue, latest batch first, then the anchors."""
        return torch.cat([self.queue, self.anchors])

    def push(self, batch: Tensor) -> None:
        """Add the (C, d) vectors of the global batch, and remove the oldest ones."""
        # Not in place: the backward pass still needs the old vectors.
        if len(self.queue):
            self.queue = torch.cat([batch.detach().float(), self.queue])[: len(self.queue)]

    def refresh(self, anchors: Tensor) -> None:
        """Replace the anchors' (m, d) vectors by those of the current student."""
        self.anchors = anchors.detach().float()

    def fill(self, queue: Tensor) -> None:
        """Set the initial (queue_size, d) vectors of the queue."""
        self.queue = queue.detach().float()


def rank_slice(rows: int) -> slice:
    """Return this worker's slice of `rows` rows. All slices are equally long; those of the last workers may overlap."""
    per_worker = -(-rows // world_size())
    begin = min(rank() * per_worker, max(0, rows - per_worker))
    return slice(begin, begin + min(per_worker, rows))


def gather_parts(part: Tensor, rows: int) -> Tensor:
    """All-gather the workers' slices (`rank_slice`) into (rows, d) vectors, without gradient.

    Args:
        part: The vectors of this worker's slice.
        rows: Number of rows of all workers together.
    """
    if world_size() == 1:
        return part
    parts = all_gather_parts(part)
    per_worker = len(part)
    gathered = part.new_empty(rows, part.shape[1])
    for number, vectors in enumerate(parts):
        begin = min(number * per_worker, max(0, rows - per_worker))
        gathered[begin : begin + per_worker] = vectors
    return gathered
