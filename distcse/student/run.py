"""One run, from a recipe to a saved student: the stages in their order."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from distcse.corpus import Corpus, TokenTable
from distcse.encoder import Encoder
from distcse.errors import RunError
from distcse.evaluation import Evaluation
from distcse.events import Event, Note, Stage, Watch
from distcse.recipe import Recipe
from distcse.student.dev import check_labelled_data
from distcse.student.finals import final_scores, labelled_tasks
from distcse.student.houses import House, InProcess, OnRay
from distcse.student.model import encoder_weights
from distcse.student.plan import Job, Plan
from distcse.teachers import EmbeddingTable, table_of, uses_table
from distcse.training.checkpoint import Checkpoints, load_state
from distcse.training.claim import Claim
from distcse.training.directory import RunDirectory
from distcse.training.loop import Outcome


@dataclass(frozen=True)
class Result:
    """What a run leaves behind."""

    recipe: Recipe
    directory: RunDirectory
    outcome: Outcome
    evaluation: Evaluation | None
    """Start, student and teachers; None when the run was interrupted or nothing was to be measured."""
    rows: int
    """Sentences in the corpus."""


def run(recipe: Recipe, watch: Watch, resume: RunDirectory | None = None) -> Result:
    """Carry out a recipe, or go on with an interrupted run.

    Raises a `DistcseError` that names what to mend; whatever was finished before it (corpus, tables, checkpoints) stays.
    """
    check_labelled_data(recipe)
    labelled = labelled_tasks(recipe)
    directory = resume or RunDirectory.create(recipe)
    watch = Watch(_logged(directory, watch.post), watch.stop_wished)
    watch.post(Note(f"run directory {directory.path}"))
    claim = Claim.stake(directory.path)
    cache = Path(recipe.storage.cache)
    house, surroundings = _house(recipe)

    corpus = _prepare_corpus(recipe, cache, watch)
    directory.record(corpus.fingerprint)
    start = Encoder.from_section(recipe.student)
    tokens = _prepare_tokens(recipe, corpus, start, cache, watch)
    job = Job(recipe, directory.path, corpus.directory, tokens.directory, claim)
    Plan(job, rank=0, workers=max(1, recipe.training.workers))  # too few rows are told before the teachers work
    with surroundings:
        tables = _prepare_tables(recipe, corpus, cache, house, watch)
        outcome = house.train(job, corpus, tables, watch)
    student = _export(recipe, directory)
    evaluation = None
    if not outcome.interrupted:
        evaluation = final_scores(recipe, corpus, labelled, start, student, directory.model, watch.post)
    if evaluation is not None:
        evaluation.write(directory.evaluation)
    return Result(recipe, directory, outcome, evaluation, len(corpus))


def _house(recipe: Recipe) -> tuple[House, AbstractContextManager[None]]:
    if recipe.training.workers == 0:
        return InProcess(), nullcontext()
    try:
        from distcse.training.cluster import cluster
    except ImportError as missing:
        raise RunError(f'{missing}; pip install "ray[train,default]", or write training.workers=0') from None
    return OnRay(), cluster()


def _prepare_corpus(recipe: Recipe, cache: Path, watch: Watch) -> Corpus:
    corpus = Corpus.prepare(recipe.corpus, cache, _progress(watch, "corpus", recipe.corpus.limit, "sentences"))
    blank = f", {corpus.blank_rows:,} blank rows skipped" if corpus.blank_rows else ""
    note = f"{len(corpus):,} sentences{blank}{', reused' if corpus.reused else ''}"
    watch.post(Stage("corpus", len(corpus), len(corpus), "sentences", finished=True, note=note))
    return corpus


def _prepare_tokens(recipe: Recipe, corpus: Corpus, encoder: Encoder, cache: Path, watch: Watch) -> TokenTable:
    tokens = TokenTable.prepare(
        corpus,
        encoder.tokenizer,
        encoder.max_length,
        cache,
        _progress(watch, "tokens", len(corpus), "sentences"),
        prompt=encoder.prompt,
    )
    note = "reused" if tokens.reused else "tokenised once"
    watch.post(Stage("tokens", len(corpus), len(corpus), "sentences", finished=True, note=note))
    return tokens


def _prepare_tables(
    recipe: Recipe, corpus: Corpus, cache: Path, house: House, watch: Watch
) -> list[EmbeddingTable | None]:
    section = recipe.teachers
    tables: list[EmbeddingTable | None] = []
    for number, teacher in enumerate(section.encoders):
        if not uses_table(section, teacher):
            tables.append(None)
            continue
        table = table_of(teacher, corpus, cache, section.shard_rows)
        stage = f"teacher {number}"
        missing = table.missing_shards()
        rows = sum(len(table.shard_range(shard)) for shard in missing)
        if missing:
            house.build(teacher, section, corpus, table, missing, _progress(watch, stage, rows, "sentences"))
        note = f"{rows:,} embedded, {len(corpus) - rows:,} reused"
        watch.post(Stage(stage, rows, rows, "sentences", finished=True, note=note))
        tables.append(table)
    return tables


def _export(recipe: Recipe, directory: RunDirectory) -> Encoder:
    """The encoder of the best checkpoint (of the latest, where nothing was scored); what trained it stays behind."""
    checkpoints = Checkpoints(directory.path)
    folder = checkpoints.best() or checkpoints.latest()
    if folder is None:
        raise RunError(f"{directory.path} has no checkpoint; run again with --resume {directory.path}")
    encoder = Encoder.from_section(recipe.student)
    encoder.load_state_dict(encoder_weights(load_state(folder).weights))
    encoder.eval().save(directory.model)
    return encoder


def _progress(watch: Watch, stage: str, total: int | None, unit: str) -> Callable[[int], None]:
    return lambda done: watch.post(Stage(stage, done, total, unit))


def _logged(directory: RunDirectory, post: Callable[[Event], None]) -> Callable[[Event], None]:
    def log_and_post(event: Event) -> None:
        directory.log(event)
        post(event)

    return log_and_post
