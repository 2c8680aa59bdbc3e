"""All that a run needs, tried without the run: `--dry-run`, and the part of it that every run begins with."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from distcse.data import BatchSampler, Corpus
from distcse.errors import InvalidValueError, TeacherOutputError
from distcse.events import LogMessage, Reporter, StageProgress
from distcse.experiments.distillation.backends import describe_resources, make_backend
from distcse.experiments.distillation.batch_loader import rows_of
from distcse.experiments.distillation.dev_metric import check_labelled_data
from distcse.experiments.distillation.final_evaluation import labelled_tasks
from distcse.experiments.distillation.model import build_student
from distcse.experiments.distillation.preparation import read_corpus, require_vectors
from distcse.experiments.distillation.roles import with_precisions, with_teacher_precisions
from distcse.losses import build_objective
from distcse.models import Encoder
from distcse.recipe import Recipe
from distcse.runs.directory import check_storage, require_lasting
from distcse.storage import resolve_path
from distcse.teachers.comparison import comparable
from distcse.teachers.embedding import table_of
from distcse.teachers.factory import live, uses_table
from distcse.teachers.knn import require_faiss
from distcse.teachers.teacher_weights import TeacherWeights
from distcse.tracking import require_packages
from distcse.trainer.engines import uses_deepspeed
from distcse.trainer.schedule import total_steps


def check_recipe(recipe: Recipe) -> None:
    """What can be known in a second: terms, libraries, folders, the labelled dev set.

    Raises a `DistcseError` for what would otherwise end the run after its teachers have embedded the corpus.
    """
    if build_objective(recipe.objective).needs_lists and not recipe.teachers.encoders:
        raise InvalidValueError(
            "a term of objective.custom needs the teachers' lists; add teachers.encoders, or take it away"
        )
    require_packages(recipe.loggers)
    uses_deepspeed(recipe.training)
    if recipe.training.neighbor_batching is not None:
        require_faiss("training.neighbor_batching")
    check_storage(recipe.storage)
    check_labelled_data(recipe)


def check_run(recipe: Recipe, reporter: Reporter, lost_gpus: Callable[[], list[str]] | None = None) -> None:
    """Read the text and the labelled sets, load the student, ask each teacher once, join the cluster; train nothing.

    The corpus that was read stays in the cache, for the run. Raises a `DistcseError` that names what to mend.

    Args:
        recipe: What would be run.
        reporter: Receives what was found.
        lost_gpus: Makes the warnings of a sweep, whose trials are placed in another way than a single run; None warns of the run.
    """
    require_lasting(recipe.storage)
    check_recipe(recipe)
    recipe = with_precisions(recipe, reporter)
    tasks = labelled_tasks(recipe)
    if tasks.tasks:
        _told(reporter, "labelled", f"{len(tasks.tasks)} sets to measure on")
    for line in tasks.missing:
        reporter.emit(LogMessage(f"missing: {line}", warning=True))
    corpus = read_corpus(recipe, reporter)
    TeacherWeights(recipe.teachers.encoders, corpus)
    require_vectors(recipe, len(corpus))
    training = recipe.training
    rows, _, _ = rows_of(recipe, len(corpus))
    epoch = BatchSampler(rows, training.batch_size, recipe.seed).steps_per_epoch
    _told(reporter, "steps", f"{total_steps(training, epoch):,} steps of {training.batch_size}, {epoch:,} an epoch")
    encoder = build_student(_with_all_layers(recipe)).encoder
    _told(reporter, "student", _described(encoder))
    for number in range(len(recipe.teachers.encoders)):
        _told(reporter, f"teacher {number}", _asked(recipe, corpus, number))
    runs = resolve_path(recipe.storage.runs)
    _, surroundings = make_backend(recipe, runs, reporter if lost_gpus is None else None)
    with surroundings:
        for warning in lost_gpus() if lost_gpus is not None and training.workers else []:
            reporter.emit(LogMessage(warning, warning=True))
        _told(reporter, "cluster", describe_resources(recipe))


def check_embedding(recipe: Recipe, reporter: Reporter) -> None:
    """Read the text, ask each teacher once, count the rows that its table lacks, join the cluster; embed nothing.

    The corpus that was read stays in the cache. Raises a `DistcseError` that names what to mend.
    """
    check_storage(recipe.storage, ["cache"])
    recipe = with_teacher_precisions(recipe, reporter)
    corpus = read_corpus(recipe, reporter)
    for number, teacher in enumerate(recipe.teachers.encoders):
        answers = _asked(recipe, corpus, number)
        if uses_table(recipe.teachers, teacher):
            table = table_of(teacher, corpus, resolve_path(recipe.storage.cache), recipe.teachers.shard_rows)
            rows = sum(len(table.shard_range(shard)) for shard in table.missing_shards())
            answers += f", {rows:,} of {len(corpus):,} rows are to be embedded"
        _told(reporter, f"teacher {number}", answers)
    _, surroundings = make_backend(recipe)
    with surroundings:
        pass  # it refuses nodes that do not see the cache


def check_comparison(recipe: Recipe, reporter: Reporter) -> None:
    """Read the text and ask each teacher once that could be compared with another; embed nothing.

    The corpus that was read stays in the cache. Raises a `DistcseError` that names what to mend.
    """
    numbers = comparable(recipe)
    check_storage(recipe.storage, ["cache"])
    recipe = with_teacher_precisions(recipe, reporter, in_this_process=True)
    corpus = read_corpus(recipe, reporter)
    for number in numbers:
        _told(reporter, f"teacher {number}", _asked(recipe, corpus, number))


def _asked(recipe: Recipe, corpus: Corpus, number: int) -> str:
    """That a teacher answers. `TeacherError` where what it says is no number."""
    teacher = recipe.teachers.encoders[number]
    answer = live(teacher, corpus, recipe.teachers.tokens_per_batch).similarities(np.array([[0, 1]]), slice(0, 1))
    if not np.isfinite(answer).all():
        raise TeacherOutputError(
            f"teacher {number}, {teacher.backbone}, gives no finite similarity; try precision: fp32"
        )
    return f"{teacher.backbone} answers"


def _with_all_layers(recipe: Recipe) -> Recipe:
    """Which layers `auto` comes to is the run's own search."""
    if recipe.student.layers != "auto":
        return recipe
    return recipe.model_copy(update={"student": recipe.student.model_copy(update={"layers": None, "num_layers": None})})


def _described(encoder: Encoder) -> str:
    weights = sum(part.numel() for part in encoder.parameters())
    return f"{encoder.dimension} numbers a vector, {weights / 1e6:.1f} M weights, {encoder.max_length} tokens at most"


def _told(reporter: Reporter, what: str, note: str) -> None:
    reporter.emit(StageProgress(what, 1, 1, "", finished=True, note=note))
