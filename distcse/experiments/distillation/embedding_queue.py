"""Vectors beyond the batch: a queue of recent ones, and landmarks. They lengthen the student's lists and take no gradient."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distcse.trainer.distributed import rank, world_size


class EmbeddingQueue(nn.Module):
    """The same on all workers; its vectors are buffers, so that a checkpoint holds them and a resumed run goes on with them.

    Args:
        queued: Places of the queue: batches times their size.
        anchors: Sentences that are in every list.
        dimension: Numbers in a vector.
    """

    queue: Tensor
    anchors: Tensor

    def __init__(self, queued: int, anchors: int, dimension: int) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(queued, dimension))
        self.register_buffer("landmarks", torch.zeros(anchors, dimension))

    @property
    def vectors(self) -> Tensor:
        """(queued + landmarks, d) float32, the latest batch first."""
        return torch.cat([self.queue, self.anchors])

    def push(self, batch: Tensor) -> None:
        """(C, d) vectors of the global batch enter the queue, the oldest leave it."""
        # Bound anew, not written into: the batch's gradient still wants the old ones.
        if len(self.queue):
            self.queue = torch.cat([batch.detach().float(), self.queue])[: len(self.queue)]

    def refresh(self, anchors: Tensor) -> None:
        """(m, d) vectors of the landmarks by the student as it is."""
        self.anchors = anchors.detach().float()

    def fill(self, queue: Tensor) -> None:
        """(queued, d) vectors to begin with."""
        self.queue = queue.detach().float()


def this_ranks_part(rows: int) -> slice:
    """Which of so many rows this worker encodes; all workers as many, the last ones some twice."""
    each = -(-rows // world_size())
    begin = min(rank() * each, max(0, rows - each))
    return slice(begin, begin + min(each, rows))


def gather_parts(part: Tensor, rows: int) -> Tensor:
    """This worker's `this_ranks_part` of some rows' vectors -> the (rows, d) vectors of all, on every worker; without gradient."""
    workers = world_size()
    if workers == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(workers)]
    dist.all_gather(parts, part.contiguous())
    each = len(part)
    whole = part.new_empty(rows, part.shape[1])
    for number, vectors in enumerate(parts):
        begin = min(number * each, max(0, rows - each))
        whole[begin : begin + each] = vectors
    return whole
