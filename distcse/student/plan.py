"""Which rows are learned from, in which order, by which worker, under which dropout noise: all functions of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.corpus import BatchSampler, Corpus, Tokens, TokenTable, collate, split_held_out
from distcse.recipe import Recipe
from distcse.training.claim import Claim
from distcse.training.noise import noise_seed
from distcse.training.schedule import total_steps

_LISTS = -1
"""Stream of the noise on lists, beside those of the views."""


@dataclass(frozen=True)
class Job:
    """All that a worker is told; the folders are on storage that every worker sees."""

    recipe: Recipe
    run: Path
    corpus: Path
    tokens: Path
    claim: Claim | None = None
    """The right to write in `run`."""


class Plan:
    """A run's order of rows, and one worker's part of it.

    Args:
        job: The run.
        rank: This worker's number.
        workers: How many there are.
    """

    def __init__(self, job: Job, rank: int, workers: int) -> None:
        training = job.recipe.training
        self._seed = job.recipe.seed
        self._shuffle_group = job.recipe.teachers.shuffle_groups
        self._tokens = TokenTable.open(job.tokens)
        self.corpus = Corpus.open(job.corpus)
        train_rows, self.held_out = split_held_out(len(self.corpus), job.recipe.evaluation.held_out, job.recipe.seed)
        self.sampler = BatchSampler(train_rows, training.batch_size, job.recipe.seed)
        self.steps = total_steps(training, self.sampler.steps_per_epoch)
        rows = training.batch_size // workers
        self.places = slice(rank * rows, (rank + 1) * rows)
        """This worker's places in every global batch."""
        self._streams = max(1, (training.dropout_streams or workers) // workers)
        self._first_stream = rank * self._streams

    @property
    def shuffle(self) -> tuple[int, Callable[[int], int]] | None:
        """Group and seeds of the noise on teachers' lists, the same for all workers; None without noise."""
        group = self._shuffle_group
        return None if group is None else (group, lambda step: noise_seed(self._seed, step, _LISTS))

    @property
    def rows(self) -> int:
        """Rows of a batch that are this worker's."""
        return int(self.places.stop - self.places.start)

    def streams(self, step: int, device: torch.device) -> list[tuple[Tokens, int]]:
        """This worker's rows of a step, cut into streams, each with the seed of its dropout noise."""
        rows: NDArray[np.int64] = self.sampler.batch(step)[self.places]
        return [
            (
                collate(self._tokens.rows(part), self._tokens.pad_id).to(device),
                noise_seed(self._seed, step, self._first_stream + number),
            )
            for number, part in enumerate(np.split(rows, self._streams))
        ]
