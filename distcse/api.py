"""What the commands do, as functions: a recipe carried out, models measured. The commands print what these return.

They are `distcse.run`, `distcse.resume` and `distcse.measure`, and not `train` and `evaluate`: those are modules that
`python -m` runs, and importing one of them would put it in the function's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distcse.encoder import Encoder
from distcse.encoder.device import device_here
from distcse.errors import EvaluationError, RunError
from distcse.evaluation import (
    Candidate,
    Evaluation,
    Exposure,
    OwnSet,
    Protocol,
    Reading,
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
from distcse.events import Listener, Note, Stage, Watch
from distcse.mutual import MutualResult, run_mutual
from distcse.mutual.run import data_before as data_of_groups_before
from distcse.recipe import MutualRecipe, Recipe, read_recipe
from distcse.report.card import write_card
from distcse.report.grids import grids, legend, markdown_table
from distcse.report.group_card import write_group_cards
from distcse.report.history import read_run
from distcse.report.page import write_pages
from distcse.report.progress import open_view
from distcse.storage import address, place
from distcse.student.data import data_before
from distcse.student.run import Result
from distcse.student.run import run as run_student
from distcse.training.directory import RunDirectory
from distcse.training.rerun import Compared, Earlier

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
        place(folder).mkdir(parents=True, exist_ok=True)
        return list(write_pages(self.evaluation, place(folder)))

    def __repr__(self) -> str:
        models = ", ".join(about.name for about in self.evaluation.models)
        return f"<Measured: {len(self.evaluation.scores)} figures of {models}>"

    def _repr_markdown_(self) -> str:
        lines: list[str] = []
        for grid in grids(self.evaluation):
            lines += [f"**{grid.title}**{f' ({grid.measure})' if grid.measure else ''}", "", *markdown_table(grid), ""]
        return "\n".join([*lines, *(f"- {line}" for line in legend(self.evaluation))])


@dataclass(frozen=True, repr=False)
class Run:
    """What a run left behind."""

    result: Result | MutualResult
    reports: Sequence[Path] = ()
    """The pages it was written up in."""
    compared: Compared | None = None
    """Of a rerun: its weights and the first run's."""

    @property
    def directory(self) -> Path:
        """The run's folder: recipe, events, checkpoints, models; of a run in object storage, its mirror on this machine."""
        return self.result.directory.path

    @property
    def address(self) -> str:
        """What the run is called for `distcse.resume` and the commands, on this machine or another."""
        return address(self.directory)

    @property
    def interrupted(self) -> bool:
        """Whether it was asked to stop before its end; `distcse.resume(run.directory)` goes on."""
        return self.result.outcome.interrupted if isinstance(self.result, Result) else self.result.interrupted

    @property
    def models(self) -> dict[str, Path]:
        """Folders of its models by name: `student`, or `GROUP bi` and `GROUP cross` of a mutual distillation."""
        if isinstance(self.result, Result):
            return {"student": self.result.directory.model}
        return {f"{best.group} {best.kind}": best.model for best in self.result.best}

    @property
    def model(self) -> Path:
        """Folder of its one model. `RunError` where there are several."""
        if len(models := self.models) != 1:
            raise RunError(
                f"{self.address} has {len(models)} models; name one: run.models[{next(iter(models), 'NAME')!r}]"
            )
        return next(iter(models.values()))

    @property
    def scores(self) -> Measured | None:
        """Start, student and teachers side by side; None where nothing was measured."""
        return None if self.result.evaluation is None else Measured(self.result.evaluation)

    def __repr__(self) -> str:
        return f"<Run {self.directory.name}{', interrupted' if self.interrupted else ''}>"

    def encoder(self) -> Encoder:
        """The student, loaded."""
        return Encoder.load(self.model)


def run(
    recipe: Recipe | MutualRecipe | str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_wished: Callable[[], bool] = lambda: False,
) -> Run:
    """Carry out a recipe, as `python -m distcse.train` does.

    Args:
        recipe: A recipe, a packaged one's name, or a YAML file.
        overrides: Knobs set over it, as on the command line: "training.lr=2e-5".
        listen: Hears every event; None shows progress on standard error.
        stop_wished: Asked now and then; True ends the run with a checkpoint.

    Raises:
        DistcseError: With what to mend. Whatever was finished stays.
    """
    if isinstance(recipe, str | Path):
        recipe = read_recipe(str(recipe), overrides)
    elif overrides:
        raise RunError(
            "overrides go with a recipe's name or file; this recipe was read already: distcse.with_values(…)"
        )
    return _carried_out(recipe, None, listen, stop_wished)


def resume(
    directory: str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_wished: Callable[[], bool] = lambda: False,
) -> Run:
    """Go on with a run that was interrupted or killed, from its last checkpoint.

    Args:
        directory: The run's folder, or its address.
        overrides: Knobs that do not change what is learned, such as "training.workers=4".
        listen: As for `run`.
        stop_wished: As for `run`.
    """
    begun, recipe = RunDirectory.reopen(place(directory).absolute(), list(overrides))
    return _carried_out(recipe, begun, listen, stop_wished)


def rerun(
    directory: str | Path,
    *overrides: str,
    listen: Listener | None = None,
    stop_wished: Callable[[], bool] = lambda: False,
) -> Run:
    """Do a run again in a new directory, on the same data, and compare the weights (`Run.compared`).

    Args:
        directory: The first run's folder, or its address.
        overrides: Knobs that do not change what is learned, and `storage.runs`.
        listen: As for `run`; packages, machine or code that are others now come as warnings.
        stop_wished: As for `run`.

    Raises:
        RunError: The first run did not come to its end, or its data are not what they were.
    """
    with _heard_by(listen) as post:
        earlier = Earlier.open(place(directory).absolute(), list(overrides), Watch(post, stop_wished))
    recipe = earlier.recipe
    earlier.hold_to(data_of_groups_before(recipe) if isinstance(recipe, MutualRecipe) else data_before(recipe))
    others = [f"other than in the first run: {warning}" for warning in earlier.warnings]
    done = _carried_out(recipe, None, listen, stop_wished, others)
    return done if done.interrupted else replace(done, compared=earlier.compare(done.directory))


def _carried_out(
    recipe: Recipe | MutualRecipe,
    begun: RunDirectory | None,
    listen: Listener | None,
    stop_wished: Callable[[], bool],
    warnings: Sequence[str] = (),
) -> Run:
    result: Result | MutualResult
    with _heard_by(listen) as post:
        watch = Watch(post, stop_wished)
        for warning in warnings:
            post(Note(warning, warning=True))
        if isinstance(recipe, MutualRecipe):
            result = run_mutual(recipe, watch, begun)
            write_group_cards(result)
        else:
            result = run_student(recipe, watch, begun)
            write_card(result)
    folder, evaluation = result.directory.path, result.evaluation
    return Run(result, [] if evaluation is None else list(write_pages(evaluation, folder, read_run(folder))))


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
    reading: Reading | None = None,
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
    if mteb is not None:
        _check_mteb(data)
    folder = None if data is None else Path(data)
    reading = reading or Reading(device=device_here())
    with _heard_by(listen) as post:
        protocol = Protocol(
            aggregate, transfer, reading.device, lambda name, done: post(Stage(f"{name} fits", done, None, "done"))
        )
        candidates, tasks = _opened(models, folder, suites, add, documents, protocol, reading, post)
        settings = {
            "STS": aggregate,
            "transfer": transfer,
            "device": reading.device,
            "precision": reading.precision,
        }
        evaluation = evaluate(candidates, tasks, settings=settings, post=post)
    if mteb is not None and folder is not None:
        from distcse.evaluation.mteb import write_results

        write_results(candidates, folder, Path(mteb))
    return Measured(evaluation)


def check_measurement(
    models: Mapping[str, Model] | Sequence[str] | str,
    data: str | Path | None = None,
    suites: Iterable[str] = ("sts",),
    add: Iterable[str] = (),
    *,
    documents: str | None = None,
    mteb: str | Path | None = None,
    reading: Reading | None = None,
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
    with _heard_by(listen) as post:
        candidates, tasks = _opened(models, folder, suites, add, documents, Protocol(), reading or Reading(), post)
        for candidate in candidates:
            about = candidate.about
            told = f"{about.kind}, pooling {about.pooling}, {about.parameters / 1e6:.1f} M weights"
            post(Stage(about.name, 1, 1, "", finished=True, note=told))
        for task in tasks.tasks:
            texts = sum(1 for _ in task.sentences())
            post(
                Stage(
                    f"{task.suite} {task.name}", texts, texts, "texts", finished=True, note=f"{texts:,} different texts"
                )
            )
        for line in (*(f"missing: {line}" for line in tasks.missing), *tasks.warnings):
            post(Note(line, warning=True))


def _opened(
    models: Mapping[str, Model] | Sequence[str] | str,
    folder: Path | None,
    suites: Iterable[str],
    add: Iterable[str],
    documents: str | None,
    protocol: Protocol,
    reading: Reading,
    post: Listener,
) -> tuple[list[Candidate], Tasks]:
    """Who is measured, and on what."""
    if isinstance(models, str):
        models = [models]
    sources: Mapping[str, Model] = models if isinstance(models, Mapping) else named(models)
    own = [OwnSet.parse(text) for text in add]
    tasks = collect(folder, suites_named(list(suites)) if folder else [], own, protocol)
    candidates = [_candidate(name, source, reading, post) for name, source in sources.items()]
    if documents is not None:
        _search_in_index_of(documents, reading, tasks, candidates)
    return candidates, tasks


def _candidate(name: str, source: Model, reading: Reading, post: Listener) -> Candidate:
    def told(done: int, total: int) -> None:
        post(Stage(name, done, total, "texts"))

    if isinstance(source, Encoder):
        return candidate_of(name, "in memory", source.to(reading.device), Exposure({}), reading.precision, told)
    return open_candidate(name, str(source), reading, told)


def _search_in_index_of(documents: str, reading: Reading, tasks: Tasks, candidates: Sequence[Candidate]) -> None:
    """Add each retrieval set once more, its documents encoded by one model whoever asks."""
    ((name, source),) = named([documents]).items()
    model = open_candidate(name, source, reading).model
    if not isinstance(model, VectorModel):
        raise EvaluationError(f"--documents {source} gives no vectors; name a bi-encoder")
    sets = [task for task in tasks.tasks if isinstance(task, RetrievalTask)]
    if not sets:
        raise EvaluationError("--documents is about retrieval; add retrieval to --suite, or --add retrieval=FOLDER")
    some = sets[0].collection.documents[:1]
    width = model.vectors(some).shape[1]
    for candidate in candidates:
        if isinstance(candidate.model, VectorModel) and (own := candidate.model.vectors(some).shape[1]) != width:
            raise EvaluationError(
                f"{candidate.about.name} has {own} numbers a vector, {name} has {width}: they share no space. A student that "
                "was projected finds documents whose vectors were multiplied by its projection.safetensors"
            )
    tasks.tasks.extend(task.with_documents_by(name, model) for task in sets)


def _check_mteb(data: str | Path | None) -> None:
    """Before the work: MTEB's results need its package and a data folder."""
    import distcse.evaluation.mteb  # noqa: F401  (says what to install)

    if data is None:
        raise EvaluationError("--mteb measures the STS sets of a folder; give --data DIR")


@contextmanager
def _heard_by(listen: Listener | None) -> Iterator[Listener]:
    if listen is not None:
        yield listen
        return
    with open_view() as view:
        yield view.show
