"""`distcse.measure`: evaluate models next to each other, as `python -m distcse.evaluate` does.

The function is not called `evaluate`: importing the module `distcse.evaluate` would replace the function by the module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcse.data.token_table import SampledTokens
from distcse.device import default_device, speed_of, use_available_cpus
from distcse.errors import EvaluationOptionError
from distcse.evaluation import (
    NO_LIMITS,
    Candidate,
    Choice,
    Contamination,
    CustomSet,
    Evaluation,
    Limits,
    LoadOptions,
    RetrievalTask,
    Tasks,
    TextsTask,
    VectorModel,
    collect,
    evaluate,
    make_candidate,
    make_ensembles,
    open_candidate,
    parse_models,
    parse_suites,
    reporting,
)
from distcse.evaluation.sts import AGGREGATES, Aggregate
from distcse.events import Listener, LogMessage, Reporter, StageProgress
from distcse.experiments.settings_warnings import (
    SettingsWarning,
    report_warnings,
    warn_of_unknown_tokens,
    warn_of_unused_prompts,
)
from distcse.models import Encoder
from distcse.models.weight_files import CHECKSUMS
from distcse.precision import Role, report_precisions
from distcse.recipe import EncoderSection
from distcse.report.grids import grids, legend, markdown_table
from distcse.report.page import write_pages
from distcse.report.progress import open_listener
from distcse.storage import resolve_path

_IN_MEMORY, _TEACHER = "in memory", "teacher"
_SAMPLED_TEXTS = 1000
"""The first texts of the user, which show whether a tokenizer knows them."""

Model = str | Path | Encoder
"""A run directory, a model folder, the address of either in object storage, a name on the hub, `package:NAME/FOLDER`, or a loaded
encoder.
"""


@dataclass(frozen=True, repr=False)
class Measurement:
    """Scores of several models; notebooks show them as tables."""

    evaluation: Evaluation
    choice: Choice | None = None
    """The best model under the given limits; None without limits."""

    def score(self, suite: str, dataset: str, measure: str, model: str) -> float:
        """Return one of the scores, such as `score("sts", "STS-B", "all", "student")`.

        Raises:
            EvaluationResultError: It was not measured.
        """
        return self.evaluation.score(suite, dataset, measure, model)

    def write(self, folder: str | Path) -> list[Path]:
        """Write the pages, evaluation.json, scores.csv and scores.tex into a folder, which is created; return the pages."""
        resolve_path(folder).mkdir(parents=True, exist_ok=True)
        self.evaluation.write(resolve_path(folder))
        return list(write_pages(self.evaluation, resolve_path(folder)))

    def __repr__(self) -> str:
        models = ", ".join(model.name for model in self.evaluation.models)
        return f"<Measurement: {len(self.evaluation.scores)} scores of {models}>"

    def _repr_markdown_(self) -> str:
        lines: list[str] = []
        for grid in grids(self.evaluation):
            lines += [f"**{grid.title}**{f' ({grid.measure})' if grid.measure else ''}", "", *markdown_table(grid), ""]
        return "\n".join([*lines, *(f"- {line}" for line in legend(self.evaluation))])


def measure(
    models: Mapping[str, str | Path | Encoder] | Sequence[str] | str,
    data: str | Path | None = None,
    suites: Iterable[str] = ("sts",),
    add: Iterable[str] = (),
    *,
    texts: str | Path | None = None,
    column: str = "text",
    documents: str | None = None,
    mteb: str | Path | None = None,
    ensembles: Iterable[str] = (),
    aggregate: Any = "all",
    limits: Limits = NO_LIMITS,
    load_options: LoadOptions | None = None,
    listen: Listener | None = None,
    stop_requested: Callable[[], bool] = lambda: False,
) -> Measurement:
    """Evaluate models and compare them with the one called `teacher`, or else the first, as `python -m distcse.evaluate` does.

    Args:
        models: Models by name, or as on the command line: ["student=runs/my-run", "teacher=FOLDER"].
        data: Folder with the published sets.
        suites: Suites to measure on `data`: sts, transfer, pairs, ranking, geometry, retrieval.
        add: Custom sets: "SUITE[:NAME]=PATH".
        texts: File of texts without labels, on which the models are also compared, and their speed is measured.
        column: Column of the texts, if the file has columns.
        documents: Model to encode the documents; each retrieval set is measured once more with it.
        mteb: Folder to write MTEB's results of its STS tasks into.
        ensembles: Rows with the mean of several models' similarities: "NAME=MODEL,MODEL" by names in `models`, or "all".
        aggregate: STS score over a year's subsets: all, mean or wmean.
        limits: What the model that is chosen at the end may need. Default: no choice.
        load_options: How to load and run the models. Default: `LoadOptions` on the GPU if there is one, else the CPU.
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
    if mteb is not None:
        _check_mteb(data)
    limits.check()
    use_available_cpus()
    folder = None if data is None else Path(data)
    load_options = load_options or LoadOptions(device=default_device())
    with open_listener(listen) as emit:
        reporter = Reporter(emit, stop_requested)
        report_precisions([_precision_role(load_options)], emit)
        own = None if texts is None else (Path(texts), column)
        candidates, tasks = _load(models, folder, suites, add, own, documents, load_options, reporter, aggregate)
        limits.check_suites([task.suite for task in tasks.tasks])
        if limits.ms is not None and not tasks.timed_texts:
            tasks.timed_texts = tasks.first_sentences()
        combined = make_ensembles(ensembles, candidates)
        settings = {
            "STS": aggregate,
            "device": load_options.device,
            "precision": load_options.resolved_precision,
        }
        if mteb is not None and folder is not None:  # first, because a failure here must not lose the longer evaluation
            from distcse.evaluation.mteb import write_results

            write_results(candidates, folder, Path(mteb), load_options)
        measured = [*candidates, *combined]
        base = _reference([candidate.info.name for candidate in candidates])
        evaluation = evaluate(measured, tasks, settings=settings, reporter=reporter, base=base)
    return Measurement(evaluation, Choice.of(evaluation, limits))


def check_measurement(
    models: Mapping[str, Model] | Sequence[str] | str,
    data: str | Path | None = None,
    suites: Iterable[str] = ("sts",),
    add: Iterable[str] = (),
    *,
    texts: str | Path | None = None,
    column: str = "text",
    documents: str | None = None,
    mteb: str | Path | None = None,
    ensembles: Iterable[str] = (),
    limits: Limits = NO_LIMITS,
    load_options: LoadOptions | None = None,
    listen: Listener | None = None,
) -> None:
    """Load the models and read the sets without measuring, as `python -m distcse.evaluate --dry-run` does.

    Args:
        models: See `measure`, also for the other arguments.
        data: Folder with the published sets.
        suites: Suites of `data`.
        add: Custom sets.
        texts: File of texts without labels.
        column: Column of the texts.
        documents: Model to encode the documents.
        mteb: Folder for MTEB's results; checked, not written.
        ensembles: Ensembles of the models.
        limits: What the model that is chosen may need.
        load_options: How to load the models.
        listen: Receives an event per model and set, and a warning per missing set.

    Raises:
        DistcseError: An error that `measure` would raise.
    """
    if mteb is not None:
        _check_mteb(data)
    limits.check()
    folder = None if data is None else Path(data)
    with open_listener(listen) as emit:
        load_options = load_options or LoadOptions(device=default_device())
        report_precisions([_precision_role(load_options)], emit)
        own = None if texts is None else (Path(texts), column)
        candidates, tasks = _load(models, folder, suites, add, own, documents, load_options, Reporter(emit))
        limits.check_suites([task.suite for task in tasks.tasks])
        combined = make_ensembles(ensembles, candidates)
        for candidate in candidates:
            info = candidate.info
            note = f"{info.kind}, pooling {info.pooling}, {info.parameters / 1e6:.1f} M parameters"
            emit(StageProgress(info.name, 1, 1, "", finished=True, note=note))
        for ensemble in combined:
            emit(StageProgress(ensemble.info.name, 1, 1, "", finished=True, note=ensemble.info.source))
        for task in tasks.tasks:
            number = len(set(task.sentences()))
            note = f"{number:,} distinct texts"
            emit(StageProgress(f"{task.suite} {task.name}", number, number, "texts", finished=True, note=note))
        for line in (*(f"missing: {line}" for line in tasks.missing), *tasks.warnings):
            emit(LogMessage(line, warning=True))


def _precision_role(load_options: LoadOptions) -> Role:
    return Role("models", "precision", load_options.precision, [speed_of(load_options.device)])


def _load(
    models: Mapping[str, Model] | Sequence[str] | str,
    folder: Path | None,
    suites: Iterable[str],
    add: Iterable[str],
    texts: tuple[Path, str] | None,
    documents: str | None,
    load_options: LoadOptions,
    reporter: Reporter,
    aggregate: Aggregate = "all",
) -> tuple[list[Candidate], Tasks]:
    """Load the candidates and read the tasks."""
    if isinstance(models, str):
        models = [models]
    sources: Mapping[str, Model] = models if isinstance(models, Mapping) else parse_models(models)
    if not sources:
        raise EvaluationOptionError("there is no model to measure; name at least one")
    custom = [CustomSet.parse(text) for text in add]
    own = []
    if texts is not None:
        own = [TextsTask.read(*texts, reference=_reference(list(sources)) if len(sources) > 1 else None)]
    tasks = collect(folder, parse_suites(list(suites)) if folder else [], custom, aggregate, own)
    tasks.timed_texts = [text for task in own for text in task.texts]
    candidates = [_candidate(name, source, load_options, reporter) for name, source in sources.items()]
    report_warnings(_unused_prompts(candidates, load_options), reporter)
    if own:
        sample = tasks.timed_texts[:_SAMPLED_TEXTS]
        shares = {
            candidate.info.name: SampledTokens.of(candidate.tokenizer, sample).unknown_share
            for candidate in candidates
            if candidate.tokenizer is not None
        }
        report_warnings(warn_of_unknown_tokens(shares), reporter)
    if documents is not None:
        _add_retrieval_with_documents_by(documents, load_options, tasks, candidates, reporter)
    return candidates, tasks


def _reference(names: Sequence[str]) -> str:
    """Return the model that all tables compare the others with: the one called `teacher`, or else the first."""
    return _TEACHER if _TEACHER in names else names[0]


def _candidate(name: str, source: Model, load_options: LoadOptions, reporter: Reporter) -> Candidate:
    reporter.check_stop(f"before {name} is loaded")
    on_progress = reporting(reporter, name)
    if isinstance(source, Encoder):
        return make_candidate(
            name,
            _IN_MEMORY,
            source.to(load_options.device),
            Contamination({}),
            load_options.resolved_precision,
            on_progress,
        )
    return open_candidate(name, str(source), load_options, on_progress)


def _unused_prompts(candidates: Sequence[Candidate], load_options: LoadOptions) -> list[SettingsWarning]:
    """Return the warnings of bi-encoders of other tools that are measured without the prompts that their folders name.

    A model that distcse trained reads texts as it was trained.
    """
    sections = {}
    for candidate in candidates:
        info, folder = candidate.info, candidate.folder
        if info.kind == "bi-encoder" and folder is not None and not (folder / CHECKSUMS).is_file():
            sections[info.name] = EncoderSection(backbone=str(folder), prompt=load_options.prompt_of(info.name))
    return warn_of_unused_prompts(
        sections, fix="measure it with --prompt {key}={prompt}, or another that fits the texts"
    )


def _add_retrieval_with_documents_by(
    documents: str, load_options: LoadOptions, tasks: Tasks, candidates: Sequence[Candidate], reporter: Reporter
) -> None:
    """Add each retrieval set once more, with documents encoded by one model for all candidates.

    Raises:
        EvaluationOptionError: The model is a cross-encoder, there is no retrieval set, or the dimensions differ.
    """
    ((name, source),) = parse_models([documents]).items()
    model = open_candidate(name, source, load_options, reporting(reporter, name)).model
    if not isinstance(model, VectorModel):
        raise EvaluationOptionError(f"--documents {source} is a cross-encoder, which has no vectors; name a bi-encoder")
    sets = [task for task in tasks.tasks if isinstance(task, RetrievalTask)]
    if not sets:
        raise EvaluationOptionError(
            "--documents needs a retrieval set; add retrieval to --suite, or --add retrieval=FOLDER"
        )
    sample = sets[0].dataset.documents[:1]
    dimension = model.vectors(sample).shape[1]
    for candidate in candidates:
        if (
            isinstance(candidate.model, VectorModel)
            and (found := candidate.model.vectors(sample).shape[1]) != dimension
        ):
            raise EvaluationOptionError(
                f"{candidate.info.name} has {found} dimensions, {name} has {dimension}, so cosines between them are "
                "undefined. Multiply the documents' vectors by the projection.safetensors of the student's run, or leave out "
                "--documents"
            )
    tasks.tasks.extend(task.with_documents_by(name, model) for task in sets)


def _check_mteb(data: str | Path | None) -> None:
    """Check that MTEB's package and a folder with its sets exist, before the evaluation takes its time."""
    from distcse.evaluation.mteb import sts_tasks  # the import error names the package to install

    if data is None:
        raise EvaluationOptionError("--mteb measures the STS sets of a data folder; add --data DIR")
    sts_tasks(Path(data))
