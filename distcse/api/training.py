"""Runs from recipes: train, resume, repeat, check and plan them, and what teachers compute before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, Unpack, overload

from distcse.api.results import Run, Runs
from distcse.checks import require
from distcse.cluster.backend import choose_backend
from distcse.devices.device import use_available_cpus
from distcse.devices.process import refuse_launchers
from distcse.errors import ArgumentError
from distcse.events import Listener, LogMessage, Reporter
from distcse.models import Encoder, resolve_model
from distcse.models.st_format import default_pooling
from distcse.models.student import evenly_spaced_layers
from distcse.planning.machines import parse_cluster
from distcse.planning.planner import measure as measure_steps
from distcse.planning.planner import open_cluster, with_precisions
from distcse.planning.planner import plan as plan_recipe
from distcse.planning.text import Estimate
from distcse.preflight.warnings import report_warnings, warn_of_narrow_bands
from distcse.recipe import BaseRecipe, Recipe, load_recipe, read_recipe, with_values
from distcse.recipe.objective import CustomLossSection
from distcse.report.card import write_cards
from distcse.report.history import read_run
from distcse.report.progress import open_listener
from distcse.runs.cluster_fit import gpu_policy
from distcse.runs.directory import RunDirectory, require_lasting, require_lasting_run
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.dev_ensemble import EnsembleScores, require_labelled_dev, score_ensemble
from distcse.runs.distillation.preflight import check_comparison, check_embedding, embed_corpus
from distcse.runs.distillation.processes import with_teacher_precisions
from distcse.runs.experiment import experiment_of
from distcse.runs.reference_run import ReferenceRun
from distcse.runs.result import Result
from distcse.runs.seeds import seed_recipes
from distcse.storage import find_model, resolve_path
from distcse.teachers.comparison import TeacherComparison
from distcse.teachers.comparison import compare as compare_teachers
from distcse.text.given import corpus_values

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Given(TypedDict, total=False):
    values: Mapping[str, Any]
    texts: str | Path | Iterable[str] | None
    queries: str | Path | Iterable[str] | None
    documents: str | Path | Iterable[str] | None
    losses: Mapping[str, Any]
    listen: Listener | None
    stop_requested: Callable[[], bool]


@overload
def run(recipe: BaseRecipe | str | Path, *overrides: str, **given: Unpack[_Given]) -> Run: ...
@overload
def run(recipe: BaseRecipe | str | Path, *overrides: str, seeds: Sequence[int], **given: Unpack[_Given]) -> Runs: ...
def run(
    recipe: BaseRecipe | str | Path,
    *overrides: str,
    values: Mapping[str, Any] = _NOTHING,
    texts: str | Path | Iterable[str] | None = None,
    queries: str | Path | Iterable[str] | None = None,
    documents: str | Path | Iterable[str] | None = None,
    losses: Mapping[str, Any] = _NOTHING,
    seeds: Sequence[int] = (),
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run | Runs:
    """Train from a recipe, as `distcse train` does. With `storage.run_id`, resume the run if it has begun.

    Args:
        recipe: A recipe, a packaged one's name, or a YAML file.
        overrides: Values that override the recipe's, as on the command line: "training.lr=2e-5".
        values: Values that override the recipe's, by path: `{"training.lr": 2e-5}`; some have short names, such as `lr`.
        texts: The corpus: a list, a `datasets.Dataset` with a column `text` or a single one, a file, or a data set on the hub.
            What is in memory is written into the cache. Default: the recipe's.
        queries: In place of `texts`, queries of a search, with `documents`.
        documents: Documents that the queries find.
        losses: Further terms of the objective by name: classes or objects of `torch.nn.Module`, called as [your own
            loss](../how-to/extend.md) is. Workers build an object anew from its attributes that its constructor's arguments name.
        seeds: Train once with each, and return all runs. Default: `seeds` of the recipe; without any, one run with its `seed`.
        listen: Called with every event; None shows progress on standard error.
        stop_requested: Polled during the run; True ends it with a checkpoint.

    Raises:
        StoppedEarlyError: `stop_requested` returned True while the run waited for resources or another run; no new checkpoint.
        FrozenKeyError: The run with this `storage.run_id` has begun with other settings.
        DistcseError: The run failed; the message names the fix. Finished work is kept.
    """
    own = {f"objective.custom.{name}": CustomLossSection.of(name, loss).model_dump() for name, loss in losses.items()}
    recipe = _read(recipe, overrides, {**own, **values})
    if given := corpus_values({"text": texts, "query": queries, "document": documents}, recipe.storage.cache):
        recipe = with_values(recipe, given)
    if seeds := seeds or recipe.all_seeds:
        return _run_each(*seed_recipes(recipe, seeds), listen, stop_requested)
    begun = None
    if recipe.storage.run_id is not None:
        begun, recipe = RunDirectory.reopen_by_id(recipe)
    experiment = experiment_of(recipe)
    with _reporting(listen, stop_requested) as reporter:
        return _finished(experiment.run(choose_backend(recipe), reporter, begun))


def _run_each(
    directory: Path, recipes: Mapping[int, BaseRecipe], listen: Listener | None, stop_requested: Callable[[], bool]
) -> Runs:
    """Run recipes by seed, and write a report with all of them into a folder; each model's card has the scores of all too."""
    done: dict[int, Run] = {}
    for seed, recipe in recipes.items():
        done[seed] = run(recipe, listen=listen, stop_requested=stop_requested)
        if done[seed].interrupted:
            break
    runs = Runs(done, directory)
    if (scores := runs.scores) is None:
        return runs
    for seed, each in (
        done.items() if len(done) > 1 else ()
    ):  # a single run's card has its scores, under its models' names
        cards = [replace(card, evaluated_as=f"{card.evaluated_as}, seed {seed}") for card in each.result.cards]
        write_cards(replace(each.result, evaluation=scores.evaluation, cards=cards))
    return replace(runs, reports=scores.write(directory))


def distill(
    teachers: str | Path | Sequence[str | Path | Mapping[str, Any]],
    student: str | Path,
    *,
    layers: int | Sequence[int] | None = None,
    max_length: int | Mapping[str, int] | None = None,
    texts: str | Path | Iterable[str] | None = None,
    queries: str | Path | Iterable[str] | None = None,
    documents: str | Path | Iterable[str] | None = None,
    losses: Mapping[str, Any] = _NOTHING,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
    **values: Any,
) -> Run:
    """Distill a small sentence encoder from larger ones, on unlabeled texts.

    The settings are those of the packaged recipe `search` for queries and documents; for other texts those of `best-small` for
    one teacher, and of `three-teachers` for several.

    Args:
        teachers: The teachers' folders or hub ids, or settings of `teachers.encoders` such as `{"backbone": …, "prompt": …}`.
        student: Folder or hub id of the model that the student begins with.
        layers: How many of its layers to keep, evenly spaced with the last one, or their indices. Default: all.
        max_length: Tokens of a text that student and teachers read, or tokens by role. Default: the recipe's 64, for search 128.
        texts: As for `run`.
        queries: As for `run`.
        documents: As for `run`.
        losses: As for `run`.
        listen: As for `run`.
        stop_requested: As for `run`.
        values: Values that override the recipe's, by short names or by path: `epochs=2, lr=1e-3, **{"storage.runs": "runs"}`.

    Raises:
        ArgumentError: There are no texts, or texts and queries.
        DistcseError: As for `run`.
    """
    if (texts is None) == (queries is None) or (queries is None) != (documents is None):
        raise ArgumentError("distcse.distill: pass either texts=…, or both queries=… and documents=…")
    named = [teachers] if isinstance(teachers, str | Path) else teachers
    recipe = "search" if queries is not None else "best-small" if len(named) == 1 else "three-teachers"
    length = max_length or load_recipe(recipe).student.max_length
    encoders = [
        {"max_length": length, **(each if isinstance(each, Mapping) else {"backbone": str(each)})} for each in named
    ]
    folder = resolve_model(find_model(str(student)))
    pooling = default_pooling(folder, "mean")
    if isinstance(layers, int):
        layers = evenly_spaced_layers(Encoder.load(folder, pooling=pooling).backbone, layers)
    given = {
        "name": "student",
        "student.backbone": str(student),
        "student.layers": None if layers is None else [*layers],
        "student.pooling": pooling,
        "student.max_length": length,
        "teachers.encoders": encoders,
    }
    return run(
        recipe,
        values={**given, **values},
        texts=texts,
        queries=queries,
        documents=documents,
        losses=losses,
        listen=listen,
        stop_requested=stop_requested,
    )


def resume(
    directory: str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run:
    """Resume a run that was interrupted or killed, from its last checkpoint.

    Args:
        directory: The run's folder, or its address.
        overrides: Settings that do not change what is learned, such as "training.workers=4".
        listen: As for `run`.
        stop_requested: As for `run`.
    """
    path = resolve_path(directory).absolute()
    require_lasting_run(path)
    begun, recipe = RunDirectory.reopen(path, list(overrides))
    require_lasting(recipe.storage, ["cache"])
    with _reporting(listen, stop_requested) as reporter:
        return _finished(experiment_of(recipe).run(choose_backend(recipe), reporter, begun))


def rerun(
    directory: str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Run:
    """Repeat a run in a new directory, on the same data, and compare the weights (`Run.compared`).

    Args:
        directory: The first run's folder, or its address.
        overrides: Settings that do not change what is learned, and `storage.runs`.
        listen: As for `run`; changed packages, machine or code are reported as warnings.
        stop_requested: As for `run`.

    Raises:
        RunDirectoryError: The first run did not finish.
        ResumeMismatchError: The first run's data have changed.
    """
    with _reporting(listen, stop_requested) as reporter:
        earlier = ReferenceRun.open(resolve_path(directory).absolute(), list(overrides), reporter)
        experiment = experiment_of(earlier.recipe)
        require(experiment.questions())
        earlier.check_data(experiment.fingerprints(reporter))
        for warning in earlier.warnings:
            reporter.emit(LogMessage(f"other than in the first run: {warning}", warning=True))
        done = _finished(experiment.run(choose_backend(earlier.recipe), reporter))
    return done if done.interrupted else replace(done, compared=earlier.compare(done.directory))


def check(recipe: BaseRecipe | str | Path, *overrides: str, listen: Listener | None = None) -> None:
    """Check all that a run needs, as `distcse train --dry-run` does: read the text, ask the models, join the cluster.

    The text stays in the cache. Nothing is embedded or trained.

    Args:
        recipe: As for `run`.
        overrides: As for `run`.
        listen: Called with what each check found; None shows it on standard error.

    Raises:
        DistcseError: The run would fail; the message names the fix.
    """
    recipe = _read(recipe, overrides)
    with open_listener(listen) as emit:
        experiment_of(recipe).check(choose_backend(recipe), Reporter(emit))


def _read(
    recipe: BaseRecipe | str | Path, overrides: Sequence[str], values: Mapping[str, Any] = _NOTHING
) -> BaseRecipe:
    if isinstance(recipe, str | Path):
        return read_recipe(recipe, overrides, values)
    if overrides:
        raise ArgumentError(
            "overrides go with a recipe's name or file; this recipe was read already: distcse.with_values(…)"
        )
    return with_values(recipe, values) if values else recipe


@contextmanager
def _reporting(listen: Listener | None, stop_requested: Callable[[], bool]) -> Iterator[Reporter]:
    """Context manager: use all available CPUs, and yield a reporter for the run's listener."""
    refuse_launchers()
    use_available_cpus()
    with open_listener(listen) as post:
        yield Reporter(post, stop_requested)


def _finished(result: Result) -> Run:
    """Write the model cards and the report pages of a run."""
    write_cards(result)
    if result.evaluation is None:
        return Run(result, [])
    from distcse.report.page import write_pages  # imports the plotting library, which takes 0.5 s

    history = read_run(result.directory.path)
    return Run(result, write_pages(result.evaluation, result.directory.store, history))


def embed(
    recipe: BaseRecipe | str | Path,
    *overrides: str,
    dry_run: bool = False,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> list[Path | None]:
    """Embed a recipe's text by each of its teachers, for all later runs, as `distcse embed` does.

    Args:
        recipe: A student's recipe, a packaged one's name, or a YAML file.
        overrides: As for `run`.
        dry_run: Ask each teacher once, and count the rows that are left; embed nothing, and return no table. Default: False.
        listen: As for `run`.
        stop_requested: Polled between batches; True ends the pass. Completed shards are kept.

    Returns:
        The folder of each teacher's table; None for a teacher without one, such as a live one.

    Raises:
        StoppedEarlyError: `stop_requested` returned True.
        DistcseError: A teacher, the text or the cluster has a problem. Completed shards are kept.
    """
    student = _of_student(_read(recipe, overrides))
    with _reporting(listen, stop_requested) as reporter:
        if dry_run:
            check_embedding(student, choose_backend(student), reporter)
            return []
        tables = embed_corpus(student, choose_backend(student), reporter)
    return [None if table is None else table.directory for table in tables]


def compare(
    recipe: BaseRecipe | str | Path,
    *overrides: str,
    sentences: int | None = 2000,
    fit_weights: bool = False,
    dry_run: bool = False,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> tuple[TeacherComparison | None, EnsembleScores | None]:
    """Compare a recipe's teachers on a sample of its text and on the labeled dev sets, as `distcse embed --compare` does.

    Args:
        recipe: A student's recipe, a packaged one's name, or a YAML file.
        overrides: As for `run`.
        sentences: Size of the sample; None leaves out the first result. Default: 2000.
        fit_weights: Fit the teachers' `alpha` to the ensemble's dev score. Default: False.
        dry_run: Ask each teacher once, and return no result. Default: False.
        listen: As for `run`.
        stop_requested: Polled between batches; True ends the comparison.

    Returns:
        How far the teachers agree on the sample; and the ensemble's dev scores, None if the recipe has no labeled dev set.

    Raises:
        StoppedEarlyError: `stop_requested` returned True.
        ComparisonError: There are fewer than two teachers to compare, or no dev set to fit the weights to.
    """
    student = _of_student(_read(recipe, overrides))
    with _reporting(listen, stop_requested) as reporter:
        if dry_run:
            if fit_weights:
                require_labelled_dev(student)
            check_comparison(student, reporter)
            return None, None
        with gpu_policy(student.gpu_mode, computes_here=True):
            student = with_teacher_precisions(student, None, reporter)
            comparison = None
            if sentences is not None:
                comparison = compare_teachers(student, read_corpus(student, reporter), sentences, reporter)
                statistics = {card.teacher: card.statistics for card in comparison.cards}
                report_warnings(warn_of_narrow_bands(student, statistics), reporter)
            return comparison, score_ensemble(student, fit_weights, reporter)


def _of_student(recipe: BaseRecipe) -> Recipe:
    if type(recipe) is not Recipe:
        raise ArgumentError(f"recipe {recipe.name} is a {recipe.title}; name a student's recipe")
    return recipe


def plan(
    recipe: BaseRecipe | str | Path,
    *overrides: str,
    cluster: str = "local",
    corpus_rows: int | None = None,
    gpus: Sequence[int] = (),
    measure: bool = False,
    price: float | None = None,
) -> Estimate:
    """Estimate what a recipe costs on given machines: time, memory, disk and the bottleneck, as `distcse plan` does.

    Args:
        recipe: As for `run`.
        overrides: As for `run`.
        cluster: `8xA100-40G`, `2x8xH100-80G` (nodes x GPUs), `2xcpu` (machines like this one), or `local`.
        corpus_rows: Sentences or pairs to plan for. Default: those of the recipe's text.
        gpus: Numbers of devices to compare. Default: the powers of two up to the cluster's.
        measure: Run thirty steps on a sample of the text on this machine first, and plan with their times. Default: False.
        price: Price of a device for an hour, in any currency. Default: none, and no costs.

    Raises:
        ArgumentError: The cluster has no such form, or an option does not fit the recipe.
    """
    recipe, form = _read(recipe, overrides), parse_cluster(cluster)
    if measure and form[2] != "local":
        raise ArgumentError(f"--measure runs on this machine; --cluster is {cluster}: write --cluster local")
    recipe = with_precisions(recipe, form)
    measured = measure_steps(recipe, lambda short, listen: run(short, listen=listen)) if measure else None
    estimate = plan_recipe(recipe, open_cluster(cluster, form, recipe), corpus_rows, gpus, measured, price)
    return estimate._replace(warnings=experiment_of(recipe).settings_warnings(only_local=True))
