"""How much a group of a mutual distillation trains on: its steps in a cycle, and the share of its texts that are cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distcse.data import Pairs
from distcse.data.token_table import count_tokens
from distcse.events import Reporter, StageProgress
from distcse.experiments.settings_warnings import SettingsWarning, warn_of_cut_rows
from distcse.models import TokenizerSpec, resolve_model
from distcse.models.folder import ModelFolder
from distcse.recipe import GroupSection, MutualRecipe
from distcse.trainer.schedule import total_steps

_SAMPLE = 1000
"""Pairs whose tokens are counted; with them, the share is exact to about 3 %."""


def report_extents(
    recipe: MutualRecipe, groups: Sequence[GroupSection], pairs: Pairs, reporter: Reporter
) -> list[SettingsWarning]:
    """Report a line for each group, and return the warnings of those that cut more than any run that was measured.

    Args:
        recipe: The recipe.
        groups: The groups.
        pairs: The run's pairs.
        reporter: Receives the lines.

    Raises:
        EncoderError: A group's tokenizer cannot be loaded.
    """
    rows = np.sort(np.random.default_rng(0).choice(len(pairs), min(_SAMPLE, len(pairs)), replace=False))
    first, second = (pairs.sentences.texts(side) for side in pairs.rows[rows].T)
    warnings = []
    for group in groups:
        bi, cross, spec = recipe.bi_of(group), recipe.cross_of(group), TokenizerSpec.of(group)
        of_first, of_second = (
            count_tokens(spec.tokenizer, [spec.prompt + text for text in side]) for side in (first, second)
        )
        of_sentences = float((np.concatenate([of_first, of_second]) > spec.max_length).mean())
        start = resolve_model(recipe.cross_start(group), group.trust_remote_code)
        tokenizer = ModelFolder.read(start, group.trust_remote_code).load_tokenizer()
        of_pairs = float((count_tokens(tokenizer, list(zip(first, second, strict=True))) > cross.max_length).mean())
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
        warnings += warn_of_cut_rows(of_sentences, spec.max_length, key, f"sentences of group {group.name}")
    return warnings
