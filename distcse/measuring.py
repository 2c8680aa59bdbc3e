"""Models measured side by side, as a function: the command prints what it returns.

It is `distcse.measure` and not `evaluate`: that is a module that `python -m` runs, and importing it would put it in the
function's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from distcse.device import default_device, speed_of, use_available_cpus
from distcse.errors import EvaluationOptionError
from distcse.evaluation import (
    Candidate,
    Contamination,
    CustomSet,
    EvalConfig,
    Evaluation,
    LoadOptions,
    RetrievalTask,
    Tasks,
    VectorModel,
    candidate_of,
    collect,
    evaluate,
    named,
    open_candidate,
    suites_named,
)
from distcse.evaluation.sts import AGGREGATES
from distcse.evaluation.transfer import Mode
from distcse.events import Listener, LogMessage, StageProgress
from distcse.models import Encoder
from distcse.precision import Role, report_precisions
from distcse.report.grids import grids, legend, markdown_table
from distcse.report.page import write_pages
from distcse.report.progress import heard_by
from distcse.storage import resolve_path

Model = str | Path | Encoder
"""A run's folder, a model's folder, the address of one in object storage, a name on the hub, `package:NAME/FOLDER`; or an encoder
that is loaded already."""


@dataclass(frozen=True, repr=False)
class Measured:
    """Figures of models side by side; a notebook shows them as tables."""

    evaluation: Evaluation

    def figure(self, suite: str, of: str, measure: str, model: str) -> float:
        """One figure, such as figure("sts", "STS-B", "all", "student")."""
        return self.evaluation.figure(suite, of, measure, model)

    def write(self, folder: str | Path) -> list[Path]:
        """report.html, report.md and evaluation.json in a folder; returns the files."""
        resolve_path(folder).mkdir(parents=True, exist_ok=True)
        return list(write_pages(self.evaluation, resolve_path(folder)))

    def __repr__(self) -> str:
        models = ", ".join(about.name for about in self.evaluation.models)
        return f"<Measured: {len(self.evaluation.scores)} figures of {models}>"

    def _repr_markdown_(self) -> str:
        lines: list[str] = []
        for grid in grids(self.evaluation):
            lines += [f"**{grid.title}**{f' ({grid.measure})' if grid.measure else ''}", "", *markdown_table(grid), ""]
        return "\n".join([*lines, *(f"- {line}" for line in legend(self.evaluation))])


def measure(
    models: Mapping[str, Model] | Sequence[str] | str,
    data: str | Path | None = None,
    suites: Iterable[str] = ("sts",),
    add: Iterable[str] = (),
    *,
    documents: str | None = None,
    mteb: str | Path | None = None,
    aggregate: Any = "all",
    transfer: Any = "strict",
    reading: LoadOptions | None = None,
    listen: Listener | None = None,
) -> Measured:
    """Measure models side by side, as `python -m distcse.evaluate` does; the others are compared with the first.

    Args:
        models: By name, or as on the command line: ["student=runs/my-run", "teacher=FOLDER"].
        data: Folder with the published sets.
        suites: Some of sts, transfer, pairs, ranking, geometry, retrieval; taken from `data`.
        add: Sets of your own: "SUITE[:NAME]=PATH".
        documents: Also measure retrieval with documents encoded by this model.
        mteb: Folder to write MTEB's results of its STS tasks into.
        aggregate: STS over a year's subsets: all, mean or wmean.
        transfer: strict or fast.
        reading: How models are loaded and run.
        listen: Hears every event; None shows progress on standard error.

    Raises:
        DistcseError: With what to mend.
    """
    for told, value, known in (("aggregate", aggregate, AGGREGATES), ("transfer", transfer, get_args(Mode))):
        if value not in known:
            raise EvaluationOptionError(f"{told} is {value!r}; it is one of {', '.join(known)}")
    if mteb is not None:
        _check_mteb(data)
    use_available_cpus()
    folder = None if data is None else Path(data)
    reading = reading or LoadOptions(device=default_device())
    with heard_by(listen) as post:
        report_precisions([_role(reading)], post)
        protocol = EvalConfig(
            aggregate,
            transfer,
            reading.device,
            lambda name, done: post(StageProgress(f"{name} fits", done, None, "done")),
        )
        candidates, tasks = _opened(models, folder, suites, add, documents, protocol, reading, post)
        settings = {
            "STS": aggregate,
            "transfer": transfer,
            "device": reading.device,
            "precision": reading.decided_precision,
        }
        if mteb is not None and folder is not None:  # first: what is longer is not lost by a failure of it
            from distcse.evaluation.mteb import write_results

            write_results(candidates, folder, Path(mteb))
        evaluation = evaluate(candidates, tasks, settings=settings, post=post)
    return Measured(evaluation)


def check_measurement(
    models: Mapping[str, Model] | Sequence[str] | str,
    data: str | Path | None = None,
    suites: Iterable[str] = ("sts",),
    add: Iterable[str] = (),
    *,
    documents: str | None = None,
    mteb: str | Path | None = None,
    reading: LoadOptions | None = None,
    listen: Listener | None = None,
) -> None:
    """Load the models and read the sets, as `python -m distcse.evaluate --dry-run` does; measure nothing.

    Args:
        models: As for `measure`, and so are the others.
        data: Folder with the published sets.
        suites: Taken from `data`.
        add: Sets of your own.
        documents: A model for documents alone.
        mteb: Where MTEB's results would be written.
        reading: How models are loaded.
        listen: Hears of each model and set, and of what is missing.

    Raises:
        DistcseError: What `measure` would have ended with.
    """
    if mteb is not None:
        _check_mteb(data)
    folder = None if data is None else Path(data)
    with heard_by(listen) as post:
        reading = reading or LoadOptions(device=default_device())
        report_precisions([_role(reading)], post)
        candidates, tasks = _opened(models, folder, suites, add, documents, EvalConfig(), reading, post)
        for candidate in candidates:
            about = candidate.about
            told = f"{about.kind}, pooling {about.pooling}, {about.parameters / 1e6:.1f} M weights"
            post(StageProgress(about.name, 1, 1, "", finished=True, note=told))
        for task in tasks.tasks:
            texts = len(set(task.sentences()))
            post(
                StageProgress(
                    f"{task.suite} {task.name}", texts, texts, "texts", finished=True, note=f"{texts:,} different texts"
                )
            )
        for line in (*(f"missing: {line}" for line in tasks.missing), *tasks.warnings):
            post(LogMessage(line, warning=True))


def _role(reading: LoadOptions) -> Role:
    return Role("models", "precision", reading.precision, [speed_of(reading.device)])


def _opened(
    models: Mapping[str, Model] | Sequence[str] | str,
    folder: Path | None,
    suites: Iterable[str],
    add: Iterable[str],
    documents: str | None,
    protocol: EvalConfig,
    reading: LoadOptions,
    post: Listener,
) -> tuple[list[Candidate], Tasks]:
    """Who is measured, and on what."""
    if isinstance(models, str):
        models = [models]
    sources: Mapping[str, Model] = models if isinstance(models, Mapping) else named(models)
    if not sources:
        raise EvaluationOptionError("no model is named; there is nothing to measure")
    own = [CustomSet.parse(text) for text in add]
    tasks = collect(folder, suites_named(list(suites)) if folder else [], own, protocol)
    candidates = [_candidate(name, source, reading, post) for name, source in sources.items()]
    if documents is not None:
        _search_in_index_of(documents, reading, tasks, candidates)
    return candidates, tasks


def _candidate(name: str, source: Model, reading: LoadOptions, post: Listener) -> Candidate:
    def told(done: int, total: int) -> None:
        post(StageProgress(name, done, total, "texts"))

    if isinstance(source, Encoder):
        return candidate_of(
            name, "in memory", source.to(reading.device), Contamination({}), reading.decided_precision, told
        )
    return open_candidate(name, str(source), reading, told)


def _search_in_index_of(documents: str, reading: LoadOptions, tasks: Tasks, candidates: Sequence[Candidate]) -> None:
    """Add each retrieval set once more, its documents encoded by one model whoever asks."""
    ((name, source),) = named([documents]).items()
    model = open_candidate(name, source, reading).model
    if not isinstance(model, VectorModel):
        raise EvaluationOptionError(f"--documents {source} gives no vectors; name a bi-encoder")
    sets = [task for task in tasks.tasks if isinstance(task, RetrievalTask)]
    if not sets:
        raise EvaluationOptionError(
            "--documents is about retrieval; add retrieval to --suite, or --add retrieval=FOLDER"
        )
    some = sets[0].collection.documents[:1]
    width = model.vectors(some).shape[1]
    for candidate in candidates:
        if isinstance(candidate.model, VectorModel) and (own := candidate.model.vectors(some).shape[1]) != width:
            raise EvaluationOptionError(
                f"{candidate.about.name} has {own} numbers a vector, {name} has {width}: they share no space. A student that "
                "was projected finds documents whose vectors were multiplied by its projection.safetensors"
            )
    tasks.tasks.extend(task.with_documents_by(name, model) for task in sets)


def _check_mteb(data: str | Path | None) -> None:
    """Before the work: MTEB's results need its package and a folder with sets of it."""
    from distcse.evaluation.mteb import sts_tasks  # says what to install

    if data is None:
        raise EvaluationOptionError("--mteb measures the STS sets of a folder; give --data DIR")
    sts_tasks(Path(data))
