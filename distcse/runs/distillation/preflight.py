"""What a student's run asks before it starts, what `--dry-run` tries in addition, and an embedding pass without a run."""

from __future__ import annotations

from functools import partial

import numpy as np

from distcse.checks import Question
from distcse.devices.cluster import Cluster
from distcse.devices.device import use_available_cpus
from distcse.devices.gpu_plan import PlansOfTrials, report_plans
from distcse.errors import InvalidValueError, TeacherOutputError
from distcse.evaluation import read_dev
from distcse.events import Reporter
from distcse.losses import TRIED_WIDTH, build_objective, try_terms
from distcse.models import Encoder
from distcse.preflight.warnings import report_warnings
from distcse.recipe import Recipe
from distcse.runs.backend import Backend
from distcse.runs.cluster_fit import gpu_policy, report_gpus, waited_for_nodes
from distcse.runs.directory import check_storage, require_lasting
from distcse.runs.distillation.corpus import (
    band_warnings,
    extent_of,
    fit_to_corpus,
    read_corpus,
    teacher_token_warnings,
)
from distcse.runs.distillation.final_evaluation import labelled_tasks
from distcse.runs.distillation.precompute import prepare_candidates, prepare_tables, require_embedding, vector_width
from distcse.runs.distillation.preparation import require_candidates, require_shared_projection, require_vectors
from distcse.runs.distillation.processes import (
    describe_resources,
    joined_for_embedding,
    joined_for_run,
    plans_of_embedding,
    plans_of_run,
    with_precisions,
    with_teacher_precisions,
)
from distcse.runs.distillation.student_model import build_student
from distcse.runs.experiment import TrialGpus, questions_of
from distcse.storage import open_store, resolve_path
from distcse.teachers.candidates import Candidates
from distcse.teachers.comparison import comparable
from distcse.teachers.embedding import table_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import SERVERS, least_embedding
from distcse.teachers.reuse import count_new_rows
from distcse.teachers.table import EmbeddingTable
from distcse.text import Corpus

_SAMPLED_QUERIES, _NEAREST = 3, 3
"""Queries, and documents of each, that a pass with candidates reports."""


def recipe_questions(recipe: Recipe) -> list[Question]:
    """Ask what takes under a second: text and columns, packages, loss terms, the labeled dev set.

    Without it, these errors would end the run only after its teachers have embedded the corpus.
    """

    def ask_objective() -> None:
        objective = build_objective(recipe.objective)
        if objective.needs_lists and not recipe.teachers.encoders:
            raise InvalidValueError(
                "a term of objective.custom needs the teachers' lists, but teachers.encoders is empty; add a teacher or remove "
                "the term"
            )
        width = _vector_width(recipe) if recipe.objective.custom else TRIED_WIDTH
        if width is not None:
            try_terms(objective, recipe.objective, recipe.training.batch_size, width)

    def ask_dev() -> str | None:
        dev = read_dev(recipe)
        return None if dev is None else dev.name

    return [*questions_of(recipe), ("objective", ask_objective), ("dev score", ask_dev)]


def _vector_width(recipe: Recipe) -> int | None:
    """Return the dimension of the student's vectors; None for the index of a teacher that has no configuration file."""
    index_of = recipe.student.index_of
    teacher = None if index_of is None else recipe.teachers.encoders[index_of]
    if teacher is not None and not kind_of(teacher, only_local=True).is_model:
        return None
    return vector_width(teacher or recipe.student)


def rehearse_run(
    recipe: Recipe, backend: Backend, reporter: Reporter, plans_of_trials: PlansOfTrials | None = None
) -> None:
    """Read the corpus and the labeled sets, load the student, query each teacher once and join the cluster.

    The corpus stays in the cache for the run. Arguments and errors are those of `Experiment.check`.
    """
    recipe = with_precisions(recipe, backend.cluster, reporter, _gpus_of_trials(backend.cluster, plans_of_trials))
    tasks = labelled_tasks(recipe)
    if tasks.tasks:
        reporter.found("labelled", f"{len(tasks.tasks)} sets to evaluate on")
    for line in tasks.missing:
        reporter.warn(f"missing: {line}")
    corpus = read_corpus(recipe, reporter)
    recipe = fit_to_corpus(recipe, corpus, reporter)
    require_vectors(recipe)
    steps, warnings = extent_of(recipe, corpus)
    reporter.found("steps", steps)
    encoder = build_student(recipe).encoder
    require_shared_projection(recipe, corpus, dimension=encoder.dimension)
    reporter.found("student", _describe_encoder(encoder))
    report_warnings([*warnings, *band_warnings(recipe, corpus)], reporter)
    for number in range(len(recipe.teachers.encoders)):
        reporter.found(f"teacher {number}", _query_teacher(recipe, corpus, number))
    require_embedding(recipe, corpus, backend.cluster, reporter)
    runs = resolve_path(recipe.storage.runs)
    if (cluster := backend.cluster) is None:
        reporter.found("cluster", "none: the run stays in this process (training.workers is 0)")
        return
    with joined_for_run(recipe, cluster, runs, in_sweep=plans_of_trials is not None) as resources:
        nodes = cluster.nodes()
        if plans_of_trials is not None:
            report_plans(plans_of_trials(nodes), reporter.emit)
        elif resources is not None:
            report_plans(plans_of_run(recipe, nodes), reporter.emit)
        reporter.found("cluster", describe_resources(recipe, resources, nodes))


def _gpus_of_trials(cluster: Cluster | None, plans_of_trials: PlansOfTrials | None) -> TrialGpus | None:
    """Return the GPUs of a sweep's trials and their servers; None for a single run, or without a GPU."""
    if cluster is None or plans_of_trials is None or cluster.is_one_cpu():
        return None
    *_, plan = plans_of_trials(cluster.nodes())
    return TrialGpus(plan.gpus[0], plan.of(SERVERS))


def check_embedding(recipe: Recipe, backend: Backend, reporter: Reporter) -> None:
    """Check everything an embedding pass needs without embedding (`--dry-run`).

    Reads the corpus, queries each teacher once, counts the rows missing from its table and joins the cluster. The corpus
    stays in the cache.
    """
    with gpu_policy(recipe.gpu_mode, computes_here=backend.cluster is None):
        check_storage(recipe.storage, ["cache"])
        recipe = with_teacher_precisions(recipe, backend.cluster, reporter)
        report_gpus(backend.cluster, recipe.gpu_mode, partial(plans_of_embedding, recipe), reporter)
        require_candidates(recipe)
        corpus = read_corpus(recipe, reporter)
        report_warnings(teacher_token_warnings(recipe, corpus), reporter)
        for number, teacher in enumerate(recipe.teachers.encoders):
            note = _query_teacher(recipe, corpus, number)
            if kind_of(teacher).uses_table(recipe.teachers.mode):
                cache = open_store(recipe.storage.cache)
                table = table_of(teacher, corpus, cache, recipe.teachers.shard_rows)
                note += f", {count_new_rows(table, corpus, cache):,} of {len(corpus):,} rows to embed"
            reporter.found(f"teacher {number}", note)
        with joined_for_embedding(recipe, backend.cluster):  # checks that the nodes see the cache
            require_embedding(recipe, corpus, backend.cluster, reporter)


def check_comparison(recipe: Recipe, reporter: Reporter) -> None:
    """Check everything a comparison of teachers needs without embedding (`--dry-run`).

    Reads the corpus and queries each teacher that can be compared once. The corpus stays in the cache.
    """
    numbers = comparable(recipe)
    check_storage(recipe.storage, ["cache"])
    with gpu_policy(recipe.gpu_mode, computes_here=True):
        recipe = with_teacher_precisions(recipe, None, reporter)
        corpus = read_corpus(recipe, reporter)
        for number in numbers:
            reporter.found(f"teacher {number}", _query_teacher(recipe, corpus, number))


def _query_teacher(recipe: Recipe, corpus: Corpus, number: int) -> str:
    """Compute one similarity with a teacher, and return a note that it works."""
    teacher = recipe.teachers.encoders[number]
    opened = kind_of(teacher).open_live(corpus, recipe.teachers.tokens_per_batch)
    answer = opened.similarities(np.array([[0, 1]]), slice(0, 1))
    if not np.isfinite(answer).all():
        raise TeacherOutputError(
            f"teacher {number}, {teacher.backbone}, returned a similarity that is not finite; try precision: fp32"
        )
    return f"{teacher.backbone} answers"


def _describe_encoder(encoder: Encoder) -> str:
    weights = sum(parameter.numel() for parameter in encoder.parameters())
    return f"{encoder.dimension} dimensions, {weights / 1e6:.1f} M parameters, at most {encoder.max_length} tokens"


def embed_corpus(recipe: Recipe, backend: Backend, reporter: Reporter) -> list[EmbeddingTable | None]:
    """Embed the corpus with the recipe's teachers, without training: the pass that a run would make first.

    Also finds the candidates of a recipe that compares some, and reports a few.

    Returns:
        One table per teacher; None for a live teacher.
    """
    use_available_cpus()
    require_lasting(recipe.storage, ["cache"])
    check_storage(recipe.storage, ["cache"])
    requests = [least_embedding(recipe.teachers, recipe.gpu_mode)]
    with (
        gpu_policy(recipe.gpu_mode, computes_here=backend.cluster is None),
        waited_for_nodes(backend.cluster, recipe, requests, reporter),
    ):
        recipe = with_teacher_precisions(recipe, backend.cluster, reporter)
        report_gpus(backend.cluster, recipe.gpu_mode, partial(plans_of_embedding, recipe), reporter)
        require_candidates(recipe)
        corpus = read_corpus(recipe, reporter)
        report_warnings(teacher_token_warnings(recipe, corpus), reporter)
        with joined_for_embedding(recipe, backend.cluster):
            tables = prepare_tables(recipe, corpus, backend, reporter)
            if (found := prepare_candidates(recipe, corpus, tables, backend, reporter)) is not None:
                _report_candidates(corpus, found.open(), reporter)
            return tables


def _report_candidates(corpus: Corpus, candidates: Candidates, reporter: Reporter) -> None:
    """Report a few queries with their nearest documents and the teachers' scores."""
    queries = corpus.rows_of_role("query")
    for row in np.unique(np.linspace(0, len(queries) - 1, _SAMPLED_QUERIES).astype(np.int64)):
        (query,) = corpus.texts([queries[row]])
        texts = corpus.texts(candidates.ids[row, :_NEAREST])
        near = [f"{score:.2f} {text:.60}" for score, text in zip(candidates.scores[row], texts, strict=False)]
        reporter.found("query", f"{query:.60}: {' | '.join(near)}")
