"""How much a run trains on: its steps, and the share of its rows that `student.max_length` cuts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distcse.data import BatchSampler, Corpus
from distcse.data.token_table import count_tokens
from distcse.events import Reporter, StageProgress
from distcse.experiments.distillation.batch_loader import split_rows
from distcse.experiments.settings_warnings import SettingsWarning, warn_of_cut_rows, warn_of_few_steps
from distcse.models import TokenizerSpec
from distcse.recipe import Recipe
from distcse.trainer.schedule import total_steps

_SAMPLE = 2000
"""Rows whose tokens are counted; with them, the share is exact to about 2 %."""


@dataclass(frozen=True)
class Extent:
    """How much a run trains on."""

    batch_size: int
    steps: int
    steps_per_epoch: int
    max_length: int
    max_steps: int | None
    """`training.max_steps`."""
    cut_share: float
    """Share of the rows with more than `max_length` tokens, of a sample."""
    num_held_out_twins: int
    """Rows that are not trained on because they equal a held-out row."""

    @classmethod
    def of(cls, recipe: Recipe, corpus: Corpus) -> Extent:
        """Count the steps of a recipe, and the tokens of a sample of its rows.

        Raises:
            CorpusTooSmallError: The corpus has too few rows for the held-out rows or the anchors.
            EncoderError: The student's tokenizer cannot be loaded.
        """
        training, spec = recipe.training, TokenizerSpec.of(recipe.student)
        rows, held_out, anchors = split_rows(recipe, corpus)
        steps_per_epoch = BatchSampler(rows, training.batch_size, recipe.seed).steps_per_epoch
        sample = np.sort(np.random.default_rng(0).choice(len(corpus), min(_SAMPLE, len(corpus)), replace=False))
        lengths = count_tokens(spec.tokenizer, [spec.prompt + text for text in corpus.texts(sample)])
        return cls(
            training.batch_size,
            total_steps(training, steps_per_epoch),
            steps_per_epoch,
            spec.max_length,
            training.max_steps,
            float((lengths > spec.max_length).mean()),
            len(corpus) - len(rows) - len(held_out) - len(anchors),
        )

    def report(self, reporter: Reporter) -> None:
        """Report the steps and the share of cut rows in a line."""
        steps = f"{self.steps:,} steps of {self.batch_size}, {self.steps_per_epoch:,} per epoch"
        cut = f"{self.cut_share:.0%} of the rows have more than {self.max_length} tokens and are cut"
        twins = f"; {self.num_held_out_twins:,} rows equal a held-out one and are left out"
        note = f"{steps}; {cut}{twins if self.num_held_out_twins else ''}"
        reporter.emit(StageProgress("steps", 1, 1, "", finished=True, note=note))

    @property
    def warnings(self) -> list[SettingsWarning]:
        """Warnings of a run that is shorter, or cuts more of its text, than those that were measured."""
        few = warn_of_few_steps(self.steps, self.steps_per_epoch, self.max_steps)
        return [*few, *warn_of_cut_rows(self.cut_share, self.max_length)]
