"""How much a group of a mutual distillation trains on: its steps in a cycle, and the share of its texts that are cut."""

from __future__ import annotations

from typing import Any

import numpy as np

from distcse.data import Pairs
from distcse.data.token_table import SampledTokens
from distcse.events import Reporter, StageProgress
from distcse.experiments.settings_warnings import report_warnings, warn_of_cut_rows, warn_of_unknown_tokens
from distcse.models import TokenizerSpec
from distcse.recipe import GroupSection, MutualRecipe
from distcse.trainer.schedule import total_steps

_SAMPLE = 1000
"""Pairs whose tokens are counted; with them, the share is exact to about 3 %."""


def report_extent(
    recipe: MutualRecipe,
    group: GroupSection,
    pairs: Pairs,
    spec: TokenizerSpec,
    cross_tokenizer: Any,
    reporter: Reporter,
) -> None:
    """Report a line for a group, and warnings if it cuts, or does not know, more than in any run that was measured.

    Args:
        recipe: The recipe.
        group: The group.
        pairs: The run's pairs.
        spec: The tokenizer of its bi-encoders, with length and prompt.
        cross_tokenizer: The tokenizer of its cross-encoders.
        reporter: Receives the line and the warnings.
    """
    rows = np.sort(np.random.default_rng(0).choice(len(pairs), min(_SAMPLE, len(pairs)), replace=False))
    first, second = (pairs.sentences.texts(side) for side in pairs.rows[rows].T)
    bi, cross = recipe.bi_of(group), recipe.cross_of(group)
    sentences = SampledTokens.of(spec.tokenizer, [spec.prompt + text for text in (*first, *second)])
    of_sentences = float((sentences.lengths > spec.max_length).mean())
    of_pairs = float(
        (SampledTokens.of(cross_tokenizer, list(zip(first, second, strict=True))).lengths > cross.max_length).mean()
    )
    orders = 2 if cross.both_orders else 1
    cross_steps = total_steps(cross, orders * len(pairs) // cross.batch_size)
    bi_steps = total_steps(bi, len(pairs) // bi.batch_size)
    note = (
        f"{group.name}: in a cycle {cross_steps:,} of {cross.batch_size} pairs (cross) and {bi_steps:,} of {bi.batch_size} "
        f"(bi); {of_pairs:.0%} of the pairs have more than {cross.max_length} tokens, {of_sentences:.0%} of the "
        f"sentences more than {spec.max_length}, and are cut"
    )
    reporter.emit(StageProgress("steps", 1, 1, "", finished=True, note=note))
    key = f"groups.{recipe.groups.index(group)}.max_length"
    cut = warn_of_cut_rows(of_sentences, spec.max_length, key, f"sentences of group {group.name}")
    report_warnings([*cut, *warn_of_unknown_tokens({f"group {group.name}": sentences.unknown_share})], reporter)
