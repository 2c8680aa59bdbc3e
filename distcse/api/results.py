"""What a run returns, and the evaluation of runs and models side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from distcse.devices.device import default_device, use_available_cpus
from distcse.errors import ArgumentError, EvaluationOptionError
from distcse.evaluation import NO_LIMITS, Choice, Limits, LoadOptions
from distcse.evaluation.results import number_runs
from distcse.evaluation.suites import SUITES
from distcse.evaluation.tasks.sts import AGGREGATES
from distcse.events import Listener, Reporter
from distcse.models import Encoder
from distcse.report.progress import open_listener
from distcse.report.scores import Scores
from distcse.runs.measurement import measure_named_models
from distcse.runs.reference_run import Compared
from distcse.runs.result import ReferenceModel, Result
from distcse.runs.seeds import merged
from distcse.storage import to_uri

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


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
        """Folders of its models by name: `student`, a family's names, or `GROUP bi` and `GROUP cross`."""
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
        return _markdown(self)

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
            data: A folder with labeled sets, of which every suite is measured that it has a folder of; a retrieval set in BEIR's
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

    @cached_property
    def scores(self) -> Scores | None:
        """Scores of all runs, with means and standard deviations; None if nothing was evaluated."""
        found = {seed: run.result.evaluation for seed, run in self.by_seed.items() if run.result.evaluation is not None}
        return Scores(merged(found)) if found else None

    def __repr__(self) -> str:
        return f"<Runs {self.directory.name}: seeds {', '.join(map(str, self.by_seed))}>"

    def _repr_markdown_(self) -> str:
        return _markdown(self)

    def compare(
        self,
        data: str | Path | Iterable[str],
        against: str | Path = "teacher",
        *,
        listen: Listener | None = None,
    ) -> Scores:
        """Compare the models of all runs with another one; see `Run.compare`."""
        return _compare(_models_of({"student": self}), self[0].result.reference, data, against, listen)


def _markdown(shown: Run | Runs) -> str:
    """Return what notebooks show."""
    scores = shown.scores
    return f"`{shown!r}`\n\n{'' if scores is None else scores._repr_markdown_()}"


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
        EvaluationError: A labeled set is missing or malformed.
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
    """Evaluate a run's models next to another one."""
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
