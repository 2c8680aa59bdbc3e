"""What `import distcse` gives: train, measure, embed, export, share and plan. The commands print what these functions return."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from distcse.checks import require
from distcse.cluster.backend import choose_backend
from distcse.devices.device import default_device, use_available_cpus
from distcse.devices.process import refuse_launchers
from distcse.errors import (
    ArgumentError,
    CorpusTooSmallError,
    EvaluationOptionError,
    ExportError,
    UnsupportedModelError,
)
from distcse.evaluation import (
    NO_LIMITS,
    Choice,
    Contamination,
    Limits,
    LoadOptions,
    VectorModel,
    labelled_dev,
    sts_score,
)
from distcse.evaluation.results import number_runs
from distcse.evaluation.suites import SUITES
from distcse.evaluation.tasks.sts import AGGREGATES
from distcse.events import Listener, LogMessage, Reporter, StageProgress
from distcse.models import Encoder, is_cross_encoder, resolve_model
from distcse.models.onnx import ExportResult, export_encoder, require_onnx
from distcse.models.st_format import default_pooling
from distcse.models.student import evenly_spaced_layers
from distcse.planning.machines import parse_cluster
from distcse.planning.planner import measure as measure_steps
from distcse.planning.planner import open_cluster, with_precisions
from distcse.planning.planner import plan as plan_recipe
from distcse.planning.text import Estimate
from distcse.preflight.warnings import report_warnings, warn_of_narrow_bands
from distcse.rank_space import RankSpaceEncoder, draw_references, is_rank_space
from distcse.recipe import BaseRecipe, CorpusSection, Recipe, load_recipe, read_recipe, with_values
from distcse.recipe.objective import CustomLossSection
from distcse.report.card import write_cards
from distcse.report.history import read_run
from distcse.report.progress import open_listener
from distcse.report.scores import Scores as Scores
from distcse.runs.cluster_fit import gpu_policy
from distcse.runs.directory import RunDirectory, require_lasting, require_lasting_run
from distcse.runs.distillation.corpus import read_corpus
from distcse.runs.distillation.dev_ensemble import EnsembleScores, require_labelled_dev, score_ensemble
from distcse.runs.distillation.preflight import check_comparison, check_embedding, embed_corpus
from distcse.runs.distillation.processes import with_teacher_precisions
from distcse.runs.experiment import experiment_of
from distcse.runs.measurement import measure_named_models
from distcse.runs.reference_run import Compared, ReferenceRun
from distcse.runs.result import ReferenceModel, Result
from distcse.runs.seeds import merged, seed_recipes
from distcse.storage import find_model, resolve_path, to_uri
from distcse.teachers.comparison import TeacherComparison
from distcse.teachers.comparison import compare as compare_teachers
from distcse.text import source_rows
from distcse.text.given import corpus_values

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, repr=False)
class Run:
    """Results and files of a run."""

    result: Result
    reports: Sequence[Path] = ()
    """Paths of the report pages."""
    compared: Compared | None = None
    """Comparison of a rerun's weights with the first run's; None for other runs."""

    @property
    def directory(self) -> Path:
        """The run's folder: recipe, events, checkpoints, models; of a run in object storage, its mirror on this machine."""
        return self.result.directory.path

    @property
    def uri(self) -> str:
        """Address of the run for `distcse.resume` and the commands, on this machine or another."""
        return to_uri(self.directory)

    @property
    def interrupted(self) -> bool:
        """Whether the run was stopped early; `distcse.resume(run.directory)` continues it."""
        return self.result.interrupted

    @property
    def models(self) -> dict[str, Path]:
        """Folders of its models by name: `student`, or `GROUP bi` and `GROUP cross` of a mutual distillation."""
        return dict(self.result.models)

    @property
    def model(self) -> Path:
        """Folder of its only model. Raises `ArgumentError` if there are several."""
        if len(models := self.models) != 1:
            raise ArgumentError(
                f"{self.uri} has {len(models)} models; name one: run.models[{next(iter(models), 'NAME')!r}]"
            )
        return next(iter(models.values()))

    @property
    def improved(self) -> bool:
        """Whether a model has a better dev score than its start; True without dev scores."""
        return not self.models or len(self.result.unchanged) < len(self.models)

    @property
    def scores(self) -> Scores | None:
        """Scores of the initial student, the student and the teachers; None if nothing was evaluated."""
        return None if self.result.evaluation is None else Scores(self.result.evaluation)

    def __repr__(self) -> str:
        return f"<Run {self.directory.name}{', interrupted' if self.interrupted else ''}>"

    def _repr_markdown_(self) -> str:
        return f"`{self!r}`\n\n{self.scores._repr_markdown_() if self.scores else ''}"

    def encoder(self) -> Encoder:
        """Load the student."""
        return Encoder.load(self.model)

    def sentence_transformer(self) -> SentenceTransformer:
        """Load the student as a `sentence_transformers.SentenceTransformer`."""
        from sentence_transformers import SentenceTransformer  # optional, and imports for seconds

        return SentenceTransformer(str(self.model))

    def compare(
        self,
        data: str | Path | Iterable[str],
        against: str | Path = "teacher",
        *,
        listen: Listener | None = None,
    ) -> Scores:
        """Compare the run's models with another one: quality, size and speed.

        Args:
            data: A folder with labelled sets, of which every suite is measured that it has a folder of; a retrieval set in BEIR's
                layout; or texts without labels, as a list or a file.
            against: `teacher`, the model that the run compares its own with; or a run's or a model's folder, or a hub id.
            listen: As for `run`.

        Raises:
            ArgumentError: The run has no such reference model.
            EvaluationError: The data cannot be read.
        """
        return _compare({**self.models}, self.result.reference, data, against, listen)


@dataclass(frozen=True, repr=False)
class Runs(Sequence[Run]):
    """Runs of one recipe with several seeds."""

    by_seed: Mapping[int, Run]
    directory: Path
    """Folder of the report with all of them."""
    reports: Sequence[Path] = ()
    """Paths of the report pages."""

    @overload
    def __getitem__(self, index: int) -> Run: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Run]: ...
    def __getitem__(self, index: int | slice) -> Run | Sequence[Run]:
        return [*self.by_seed.values()][index]

    def __len__(self) -> int:
        return len(self.by_seed)

    @property
    def interrupted(self) -> bool:
        """Whether a run was stopped early. The same call with the folder's name as `storage.run_id` resumes it."""
        return any(run.interrupted for run in self)

    @property
    def improved(self) -> bool:
        """Whether a model of a run has a better dev score than its start; True without dev scores."""
        return any(run.improved for run in self)

    @property
    def scores(self) -> Scores | None:
        """Scores of all runs, with means and standard deviations; None if nothing was evaluated."""
        found = {seed: run.result.evaluation for seed, run in self.by_seed.items() if run.result.evaluation is not None}
        return Scores(merged(found)) if found else None

    def __repr__(self) -> str:
        return f"<Runs {self.directory.name}: seeds {', '.join(map(str, self.by_seed))}>"

    def _repr_markdown_(self) -> str:
        return f"`{self!r}`\n\n{self.scores._repr_markdown_() if self.scores else ''}"

    def compare(
        self,
        data: str | Path | Iterable[str],
        against: str | Path = "teacher",
        *,
        listen: Listener | None = None,
    ) -> Scores:
        """Compare the models of all runs with another one; see `Run.compare`."""
        return _compare(_models_of({"student": self}), self[0].result.reference, data, against, listen)


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
    if not (seeds := seeds or recipe.seeds):
        return _run(recipe, listen, stop_requested)
    directory, recipes = seed_recipes(recipe, seeds)
    done: dict[int, Run] = {}
    for seed, each in recipes.items():
        done[seed] = _run(each, listen, stop_requested)
        if done[seed].interrupted:
            break
    runs = Runs(done, directory)
    return runs if runs.scores is None else replace(runs, reports=runs.scores.write(directory))


def _run(recipe: BaseRecipe, listen: Listener | None, stop_requested: Callable[[], bool]) -> Run:
    """Train once."""
    begun = None
    if recipe.storage.run_id is not None:
        begun, recipe = RunDirectory.reopen_by_id(recipe)
    experiment = experiment_of(recipe)
    with _reporting(listen, stop_requested) as reporter:
        return _finished(experiment.run(choose_backend(recipe), reporter, begun))


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
    """Distil a small sentence encoder from larger ones, on unlabelled texts.

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
    """Compare a recipe's teachers on a sample of its text and on the labelled dev sets, as `distcse embed --compare` does.

    Args:
        recipe: A student's recipe, a packaged one's name, or a YAML file.
        overrides: As for `run`.
        sentences: Size of the sample; None leaves out the first result. Default: 2000.
        fit_weights: Fit the teachers' `alpha` to the ensemble's dev score. Default: False.
        dry_run: Ask each teacher once, and return no result. Default: False.
        listen: As for `run`.
        stop_requested: Polled between batches; True ends the comparison.

    Returns:
        How far the teachers agree on the sample; and the ensemble's dev scores, None if the recipe has no labelled dev set.

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
) -> Estimate:
    """Estimate what a recipe costs on given machines: time, memory, disk and what binds, as `distcse plan` does.

    Args:
        recipe: As for `run`.
        overrides: As for `run`.
        cluster: `8xA100-40G`, `2x8xH100-80G` (nodes x GPUs), `2xcpu` (machines like this one), or `local`.
        corpus_rows: Sentences or pairs to plan for. Default: those of the recipe's text.
        gpus: Also estimate these numbers of devices.
        measure: Run twenty steps on a sample of the text on this machine first, and plan with their times. Default: False.

    Raises:
        ArgumentError: The cluster has no such form, or an option does not fit the recipe.
    """
    recipe, form = _read(recipe, overrides), parse_cluster(cluster)
    if measure and form[2] != "local":
        raise ArgumentError(f"--measure runs on this machine; --cluster is {cluster}: write --cluster local")
    recipe = with_precisions(recipe, form)
    measured = measure_steps(recipe, lambda short, listen: run(short, listen=listen)) if measure else None
    estimate = plan_recipe(recipe, open_cluster(cluster, form, recipe), corpus_rows, gpus, measured)
    return estimate._replace(warnings=experiment_of(recipe).settings_warnings(only_local=True))


def evaluate(
    models: Mapping[str, str | Path | Encoder | Run | Runs | Sequence[str | Path | Encoder | Run]]
    | Sequence[str]
    | str,
    data: str | Path | None = None,
    suites: Iterable[str] = ("sts",),
    add: Iterable[str] = (),
    *,
    texts: str | Path | Sequence[str] | None = None,
    column: str = "text",
    documents: str | None = None,
    ensembles: Iterable[str] = (),
    dimensions: Sequence[int] = (),
    quantize: Sequence[str] = (),
    aggregate: Any = "all",
    timed: bool = False,
    limits: Limits = NO_LIMITS,
    against: str | None = None,
    load_options: LoadOptions | None = None,
    dry_run: bool = False,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Scores:
    """Evaluate models and compare them with one of them, as `distcse evaluate` does.

    Args:
        models: Models by name, or as on the command line: ["student=runs/my-run", "teacher=FOLDER"]. A model is a folder, a hub
            id, an `Encoder` or a `Run`; of several models of one name, such as the runs of several seeds, tables have the means.
        data: Folder with the published sets.
        suites: Suites to measure on `data`: sts, transfer, pairs, ranking, geometry, retrieval.
        add: Custom sets: "SUITE[:NAME]=PATH".
        texts: Texts without labels, or a file of them, on which the models are also compared, and their speed is measured.
        column: Column of the texts, if the file has columns.
        documents: Model to encode the documents; each retrieval set is measured once more with it.
        ensembles: Rows with the mean of several models' similarities: "NAME=MODEL,MODEL" by names in `models`, or "all".
        dimensions: Measure retrieval again with the first dimensions of each model's vectors, such as [256, 128]; with `quantize`
            in all combinations.
        quantize: Measure retrieval again with quantized vectors: "int8", "binary".
        aggregate: STS score over a year's subsets: all, mean or wmean.
        timed: Measure the models' speed also without `texts`, on the sentences of the first set. Default: False.
        limits: What the model that is chosen at the end may need. Default: no choice.
        against: Name of the model that all tables compare the others with. Default: `teacher`, else the last model whose name
            begins with "teacher", else the first.
        load_options: How to load and run the models. Default: `LoadOptions` on the GPU if there is one, else the CPU.
        dry_run: Load the models and read the sets; measure nothing, and return no scores. Default: False.
        listen: Receives every event. Default: shows progress on standard error.
        stop_requested: Polled between batches of texts, and before each model and set. True ends the evaluation with the models
            measured so far. Default: never stops.

    Raises:
        StoppedEarlyError: It was stopped before the first model was measured.
        EvaluationOptionError: An option is invalid, or there is nothing to measure.
        EvaluationError: A labelled set is missing or malformed.
        EncoderError: A model cannot be loaded.
    """
    if aggregate not in AGGREGATES:
        raise EvaluationOptionError(f"aggregate is {aggregate!r}; set it to one of {', '.join(AGGREGATES)}")
    use_available_cpus()
    with open_listener(listen) as emit:
        evaluation = measure_named_models(
            _models_of(models) if isinstance(models, Mapping) else models,
            None if data is None else Path(data),
            suites,
            add,
            (Path(texts), column) if isinstance(texts, str | Path) else texts,
            documents,
            ensembles,
            (dimensions, quantize),
            aggregate,
            timed,
            limits,
            load_options or LoadOptions(device=default_device()),
            against,
            dry_run,
            Reporter(emit, stop_requested),
        )
    return Scores(evaluation, Choice.of(evaluation, limits))


def _models_of(
    models: Mapping[str, str | Path | Encoder | Run | Runs | Sequence[str | Path | Encoder | Run]],
) -> dict[str, str | Path | Encoder]:
    """Return models by their names in tables."""
    found: dict[str, str | Path | Encoder] = {}
    for name, given in models.items():
        if isinstance(given, Runs):
            each: Mapping[str, str | Path | Encoder | Run] = {
                f"{name}, seed {seed}": run for seed, run in given.by_seed.items()
            }
        elif isinstance(given, str | Path | Encoder | Run):
            each = {name: given}
        else:
            each = number_runs({name: given})
        for numbered, source in each.items():
            parts = source.models if isinstance(source, Run) else {"": source}
            found |= {numbered if len(parts) == 1 else f"{numbered}, {part}": model for part, model in parts.items()}
    return found


def _compare(
    models: dict[str, str | Path | Encoder],
    reference: ReferenceModel | None,
    data: str | Path | Iterable[str],
    against: str | Path,
    listen: Listener | None,
) -> Scores:
    """Evaluate a run's models beside another one."""
    pooling = None
    if against == "teacher":
        if reference is None:
            raise ArgumentError('the run has no teacher with vectors; name a model to compare with: against="FOLDER"')
        against, pooling = reference.section.backbone, reference.section.pooling
    given: dict[str, Any] = {"texts": data}
    if isinstance(data, str | Path) and os.path.isdir(data):
        suites = [suite for suite in SUITES if (Path(data) / suite).is_dir()]
        given = {"data": data, "suites": suites} if suites else {"add": [f"retrieval={data}"]}
    elif not isinstance(data, str | Path):
        given = {"texts": [*data]}
    options = LoadOptions(device=default_device(), pooling=pooling)
    return evaluate({**models, "teacher": against}, **given, timed=True, load_options=options, listen=listen)


def rank(
    model: str | Path,
    corpus: Sequence[str],
    out: str | Path,
    *,
    column: str = "text",
    num_references: int = 100_000,
    weight: float = 0.1,
    normalize: bool = True,
    rank_method: str = "sort",
    pooling: str | None = None,
    listen: Listener | None = None,
) -> int:
    """Store a bi-encoder with references drawn from a corpus, to score pairs by cosine and ranks (RankEncoder Eq. 7).

    Args:
        model: A run's or a model's folder, or a name that `Encoder.load` accepts.
        corpus: Files of sentences, as `corpus.path` in a recipe.
        out: The folder to write, replaced atomically.
        column: Column or key of the sentences.
        num_references: Number of references; a rank-space teacher of as many, on the same corpus, has the same.
        weight: λ of Eq. 7.
        normalize: Whether to rank references by cosine, or by inner product.
        rank_method: `sort` or `histogram` (see `RankSpaceEncoder`).
        pooling: Pooling of a folder that does not store its own.
        listen: Called with the progress; None shows it on standard error.

    Returns:
        The number of references.

    Raises:
        UnsupportedModelError: The model is a cross-encoder.
        EncoderError: The model cannot be loaded, or a setting is not allowed.
        CorpusError: The corpus cannot be read, or has fewer than two sentences.
    """
    folder = resolve_model(find_model(str(model)))
    if is_cross_encoder(folder):
        raise UnsupportedModelError(f"{model} is a cross-encoder, which has no vectors to rank by; name a bi-encoder")
    encoder = Encoder.load(folder, pooling=default_pooling(folder, pooling)).to(default_device())
    sentences = [row for row in source_rows(CorpusSection(path=list(corpus), column=column)) if row is not None]
    texts = [sentences[row] for row in draw_references(len(sentences), num_references)]
    if len(texts) < 2:
        raise CorpusTooSmallError(f"a ranking needs at least 2 references, but there are {len(texts)}; add sentences")
    with open_listener(listen) as emit:
        ranker = RankSpaceEncoder.from_sentences(
            encoder,
            texts,
            weight,
            normalize,
            rank_method=rank_method,
            on_progress=lambda done: emit(StageProgress("references", done, len(texts), "sentences encoded")),
        )
    ranker.save(str(out))
    Contamination.read(folder).write(resolve_path(out))
    return len(texts)


def export(
    model: str | Path,
    out: str | Path | None = None,
    *,
    int8: bool = False,
    data: str | Path | None = None,
    pooling: str | None = None,
    prompt: str = "",
    listen: Listener | None = None,
) -> ExportResult:
    """Export a model to ONNX, optionally also to int8, after comparing the files with torch on sentences.

    Args:
        model: A run's or a model's folder, or a name that `Encoder.load` accepts.
        out: New folder for the files, and for all of the model except its weights. Default: the model's folder.
        int8: Also write the quantized file.
        data: Folder with `sts/stsb/dev.tsv.gz`, to compare the scores too.
        pooling: Pooling of a folder that does not store its own.
        prompt: Text put before every sentence, or a template with `{sentence}` in it; empty takes the folder's.
        listen: Called with the progress; None shows it on standard error.

    Raises:
        ExportDependencyError: A package is missing.
        UnsupportedModelError: The model is a cross-encoder, a rank space or too large.
        ExportError: A file's vectors or scores differ too much from torch's, or `out` exists. No file is written.
        EncoderError: The model cannot be loaded.
    """
    require_onnx()
    folder = resolve_model(find_model(str(model)))
    if is_cross_encoder(folder):
        raise UnsupportedModelError(f"{model} is a cross-encoder, which has no vectors; export a bi-encoder")
    if is_rank_space(folder):
        raise UnsupportedModelError(
            f"{model} is a rank space, whose reference sentences ONNX cannot store; export the model that it was built from"
        )
    if out is None and not os.path.isdir(model):
        raise ExportError(f"{model} is not a folder to write into; set --out FOLDER")
    if out is not None and Path(out).exists():
        raise ExportError(f"--out {out} exists; name a new folder")
    encoder = Encoder.load(folder, pooling=default_pooling(folder, pooling), prompt=prompt).eval()
    pairs = None if data is None else labelled_dev(Path(data))
    score = None if pairs is None else lambda encode: sts_score(VectorModel(encode), pairs)
    with open_listener(listen) as emit:
        return export_encoder(encoder, folder, None if out is None else Path(out), int8, score, emit)
