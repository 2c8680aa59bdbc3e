"""The token tables of a mutual distillation: the pairs are tokenized once per tokenizer, for all groups and workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from distcse.data import Pairs, PairTokenTable, TokenTable, tokenizer_fingerprint
from distcse.data.token_table import SampledTokens
from distcse.events import Reporter, StageProgress
from distcse.experiments.backend import GIB, Backend, DeviceCall
from distcse.experiments.mutual.devices import device_options
from distcse.experiments.mutual.phases import Kind
from distcse.models import TokenizerSpec, resolve_model
from distcse.models.folder import ModelFolder
from distcse.preflight.warnings import report_warnings, warn_of_cut_rows, warn_of_unknown_tokens
from distcse.recipe import GroupSection, MutualRecipe
from distcse.storage import ArtifactStore, open_store, resolve_path, storage_errors
from distcse.trainer.schedule import total_steps

TokenStores = Mapping[Kind, ArtifactStore]
"""The folders of a group's token tables: a `TokenTable` of the sentences, and a `PairTokenTable`."""


def prepare_tokens(
    recipe: MutualRecipe, groups: Sequence[GroupSection], pairs: Pairs, backend: Backend, reporter: Reporter
) -> list[TokenStores]:
    """Tokenize the pairs for groups, or reuse the tables in the cache, and report how much each trains on.

    Groups of different tokenizers are done in parallel.

    Args:
        recipe: The recipe.
        groups: The groups.
        pairs: The run's pairs.
        backend: Where the pairs are tokenized.
        reporter: Receives progress.

    Returns:
        The tables of each group.

    Raises:
        TokenizerError: A sentence has no token.
        StoppedEarlyError: A stop was requested before all pairs were tokenized.
        CorpusCacheError: The cache cannot be written.
    """
    sharing: dict[str, list[GroupSection]] = {}
    for group in groups:
        sharing.setdefault(tokenizer_fingerprint(TokenizerSpec.of(group).tokenizer), []).append(group)
    cache = resolve_path(recipe.storage.cache)
    with storage_errors(cache):
        cache.mkdir(parents=True, exist_ok=True)
    stores = open_store(pairs.directory), open_store(cache)
    prepare = partial(_prepare, recipe, *stores, not backend.is_for_trials)
    calls = [
        DeviceCall(f"tokenization for {members[0].name}", partial(prepare, members), 2 * GIB)
        for members in sharing.values()
    ]
    written = {"storage.runs": pairs.directory.parent, "storage.cache": cache}
    found = backend.run_on_devices(calls, device_options(recipe, groups, written, uses_gpu=False), reporter)
    tables = {name: tables for prepared in found for name, tables in prepared.items()}
    return [tables[group.name] for group in groups]


def _prepare(
    recipe: MutualRecipe,
    stored: ArtifactStore,
    cache: ArtifactStore,
    reports: bool,
    groups: Sequence[GroupSection],
    reporter: Reporter,
) -> dict[str, TokenStores]:
    """Prepare the tables of groups with one tokenizer, one after the other: groups of equal settings share them.

    With `reports`, report each group's steps and what it cuts.
    """
    pairs, prepared = Pairs.open(stored.path), dict[str, TokenStores]()
    for group in groups:
        cross = recipe.cross_of(group)
        orders = 2 if cross.both_orders else 1
        spec = TokenizerSpec.of(group)
        report = partial(reporter.advance, "tokens", total=len(pairs.sentences), unit="sentences")
        sentences = TokenTable.prepare(
            pairs.sentences, spec.tokenizer, spec.max_length, cache.path, report, prompt=spec.prompt
        )
        root = resolve_model(recipe.cross_start(group), group.trust_remote_code)
        tokenizer = ModelFolder.read(root, group.trust_remote_code).load_tokenizer()
        report = partial(reporter.advance, "tokens", total=orders * len(pairs), unit="pairs")
        both = PairTokenTable.prepare(pairs, tokenizer, cross.max_length, orders == 2, cache.path, report)
        note = f"{group.name}: {'reused' if sentences.reused and both.reused else 'tokenized'}"
        reporter.emit(StageProgress("tokens", len(pairs), len(pairs), "pairs", finished=True, note=note))
        if reports:
            report_extent(recipe, group, pairs, spec, tokenizer, reporter)
        prepared[group.name] = {"bi": open_store(sentences.directory), "cross": open_store(both.directory)}
    return prepared


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
    reporter.found("steps", note)
    key = f"groups.{recipe.groups.index(group)}.max_length"
    cut = warn_of_cut_rows(of_sentences, spec.max_length, key, f"sentences of group {group.name}")
    report_warnings([*cut, *warn_of_unknown_tokens({f"group {group.name}": sentences.unknown_share})], reporter)
