"""The unlabeled sentence pairs of a mutual distillation: read or mined, sampled, and stored in the run's folder."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from distcse.devices.device_plan import GIB
from distcse.errors import CorpusNotFoundError
from distcse.evaluation import Tasks, read_dev, stream_texts
from distcse.evaluation.tables import ENDINGS
from distcse.events import LogMessage, Reporter, StageProgress
from distcse.models import TokenizerSpec, model_fingerprint, resolve_model
from distcse.models.folder import ModelFolder
from distcse.preflight.warnings import report_warnings, warn_of_cut_rows, warn_of_unknown_tokens
from distcse.recipe import KINDS, GroupSection, MutualRecipe, labelled_folder
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.mutual.final_evaluation import labelled_tasks
from distcse.runs.mutual.mining import mine_pairs, mining_memory, prepare_mining, sample_pairs
from distcse.runs.mutual.phase_store import TokenStores
from distcse.runs.mutual.processes import group_needs
from distcse.storage import ArtifactStore, open_store, storage_errors
from distcse.text import Pairs, PairTokenTable, TokenTable, tokenizer_fingerprint
from distcse.text.token_table import SampledTokens
from distcse.training.schedule import fitting_batch, total_steps

_SILENT = Reporter()


def read_pairs(recipe: MutualRecipe, folder: ArtifactStore, reporter: Reporter = _SILENT) -> Pairs:
    """Read the different pairs in a recipe's files, in the files' order; `pairs.limit` of them, sampled by the seed."""
    first, second = recipe.pairs.columns
    pairs = ((one, other) for file in _files(recipe) for one, other in stream_texts(file, first, second))
    progress = partial(reporter.advance, "pairs", total=None, unit="sentences")
    return Pairs.write(folder, pairs, lambda number: sample_pairs(number, recipe), progress)


def find_pairs(recipe: MutualRecipe) -> str:
    """Check that the files with a recipe's pairs exist and have its columns, by their first rows, and return their names."""
    files = _files(recipe)
    for file in files:
        next(stream_texts(file, *recipe.pairs.columns), None)
    return ", ".join(map(str, files))


def fit_to_pairs(recipe: MutualRecipe, number: int, reporter: Reporter = _SILENT) -> MutualRecipe:
    """Return the recipe with lower defaults of `bi.batch_size` and `cross.batch_size` where there are few pairs.

    Each is the largest that leaves ten steps in a phase of each group. Values that a user gave are kept.
    """
    fitted = recipe
    for kind in KINDS:
        loops = [recipe.loop_of(group, kind) for group in recipe.groups if group.overrides(kind).batch_size is None]
        if not loops:
            continue
        rows = 2 * number if kind == "cross" and recipe.cross.both_orders else number
        size = fitting_batch(loops, recipe.batch_sizes(kind), rows)
        section = getattr(recipe, kind).model_copy(update={"batch_size": size})
        fitted = fitted.model_copy(update={kind: section})
    if not (lowered := recipe.describe_fitted(fitted)):
        return recipe
    reporter.emit(LogMessage(f"the run has {number:,} different pairs, so {lowered}"))
    return fitted


@contextmanager
def temporary_pairs(recipe: MutualRecipe, reporter: Reporter = _SILENT) -> Iterator[Pairs]:
    """Context manager: read the pairs in a recipe's files into a temporary folder (see `read_pairs`)."""
    with tempfile.TemporaryDirectory() as folder:
        yield read_pairs(recipe, open_store(folder) / "pairs", reporter)


def load_pairs(recipe: MutualRecipe, run: ArtifactStore, backend: Backend, reporter: Reporter) -> Pairs:
    """Load the run's pairs. A new run reads or mines them first, and stores them."""
    store = run / "pairs"
    if not store.fetch_folder():
        if recipe.pairs.mine is None:
            read_pairs(recipe, store, reporter)
        else:
            _mine(recipe, store, backend, reporter)
    pairs = Pairs.open_verified(store)
    reporter.emit(
        StageProgress("pairs", len(pairs), len(pairs), "pairs", finished=True, note=f"{len(pairs):,} different pairs")
    )
    return pairs


def _mine(recipe: MutualRecipe, folder: ArtifactStore, backend: Backend, reporter: Reporter) -> None:
    corpus = prepare_mining(recipe, reporter)
    call = DeviceCall(
        "mining of pairs",
        partial(mine_pairs, recipe, corpus.store, folder),
        mining_memory(recipe, corpus),
    )
    backend.run_on_devices([call], group_needs(recipe, recipe.groups).options(folder.path.parent), reporter)


def _files(recipe: MutualRecipe) -> list[Path]:
    section = recipe.pairs
    if section.task is None:
        paths = [section.path] if isinstance(section.path, str) else section.path or []
        return [Path(path) for path in paths]
    roots = [labelled_folder(recipe.evaluation.data) / suite for suite in ("pairs", "sts")]
    folder = next((root / section.task for root in roots if (root / section.task).is_dir()), roots[0] / section.task)
    files = sorted(file for file in folder.glob("*") if file.name.endswith(ENDINGS))
    if not files:
        available = {entry.name for root in roots for entry in root.glob("*") if entry.is_dir()}
        raise CorpusNotFoundError(
            f"pairs.task is {section.task!r}, but {folder} has no table; choose another "
            f"({roots[0].parent} has {', '.join(sorted(available)) or 'nothing'}), or make it (docs/how-to/data.md)"
        )
    return files


def data_fingerprints(
    recipe: MutualRecipe, groups: Sequence[GroupSection], pairs: Pairs | None, tasks: Tasks
) -> dict[str, str]:
    """Fingerprint the pairs, the dev set, the models and the test sets, by name."""
    fingerprints = {} if pairs is None else {"pairs": pairs.fingerprint}
    if (dev := read_dev(recipe)) is not None:
        fingerprints["dev set"] = dev.fingerprint
    for group in groups:
        fingerprints[f"model of {group.name}"] = model_fingerprint(group.backbone, group.trust_remote_code)
        if (cross_start := recipe.cross_start(group)) != group.backbone:
            fingerprints[f"cross model of {group.name}"] = model_fingerprint(cross_start, group.trust_remote_code)
    return {**fingerprints, **tasks.fingerprints()}


def read_fingerprints(recipe: MutualRecipe, reporter: Reporter) -> dict[str, str]:
    """Read the pairs, or the corpus to mine them from, and the labeled sets; fingerprint them and the models."""
    if recipe.pairs.mine is not None:
        found = {"corpus": prepare_mining(recipe, reporter).fingerprint}
        return found | data_fingerprints(recipe, recipe.groups, None, labelled_tasks(recipe))
    with temporary_pairs(recipe, reporter) as pairs:
        return data_fingerprints(recipe, recipe.groups, pairs, labelled_tasks(recipe))


def prepare_tokens(
    recipe: MutualRecipe, groups: Sequence[GroupSection], pairs: Pairs, backend: Backend, reporter: Reporter
) -> list[TokenStores]:
    """Tokenize the pairs for groups, or reuse the tables in the cache, and report how much each trains on.

    Groups of different tokenizers are done in parallel.

    Returns:
        The tables of each group.
    """
    sharing: dict[str, list[GroupSection]] = {}
    for group in groups:
        sharing.setdefault(tokenizer_fingerprint(TokenizerSpec.of(group).tokenizer), []).append(group)
    cache = open_store(recipe.storage.cache)
    with storage_errors(cache.path):
        cache.path.mkdir(parents=True, exist_ok=True)
    prepare = partial(_prepare, recipe, pairs.store, cache)
    calls = [
        DeviceCall(f"tokenization for {members[0].name}", partial(prepare, members), 2 * GIB)
        for members in sharing.values()
    ]
    options = group_needs(recipe, groups).options(pairs.store.path.parent, uses_gpu=False)
    found = backend.run_on_devices(calls, options, reporter)
    tables = {name: tables for prepared in found for name, tables in prepared.items()}
    return [tables[group.name] for group in groups]


def _prepare(
    recipe: MutualRecipe,
    stored: ArtifactStore,
    cache: ArtifactStore,
    groups: Sequence[GroupSection],
    reporter: Reporter,
) -> dict[str, TokenStores]:
    """Prepare the tables of groups with one tokenizer, one after the other: groups of equal settings share them."""
    pairs, prepared = Pairs.open(stored), dict[str, TokenStores]()
    for group in groups:
        cross = recipe.cross_of(group)
        orders = 2 if cross.both_orders else 1
        spec = TokenizerSpec.of(group)
        report = partial(reporter.advance, "tokens", total=len(pairs.sentences), unit="sentences")
        sentences = TokenTable.prepare(
            pairs.sentences, spec.tokenizer, spec.max_length, cache, report, prompt=spec.prompt
        )
        root = resolve_model(recipe.cross_start(group), group.trust_remote_code)
        tokenizer = ModelFolder.read(root, group.trust_remote_code).load_tokenizer()
        report = partial(reporter.advance, "tokens", total=orders * len(pairs), unit="pairs")
        both = PairTokenTable.prepare(pairs, tokenizer, cross.max_length, orders == 2, cache, report)
        note = f"{group.name}: {'reused' if sentences.reused and both.reused else 'tokenized'}"
        reporter.emit(StageProgress("tokens", len(pairs), len(pairs), "pairs", finished=True, note=note))
        report_extent(recipe, group, pairs, spec, tokenizer, reporter)
        prepared[group.name] = {"bi": sentences.store, "cross": both.store}
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
    """Report a line for a group, and warnings if it cuts, or does not know, more than in any run that was measured."""
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
        f"sentences more than {spec.max_length}, and are truncated"
    )
    reporter.found("steps", note)
    key = f"groups.{recipe.groups.index(group)}.max_length"
    cut = warn_of_cut_rows(of_sentences, spec.max_length, key, f"sentences of group {group.name}")
    report_warnings([*cut, *warn_of_unknown_tokens({f"group {group.name}": sentences.unknown_share})], reporter)
