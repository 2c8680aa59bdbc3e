"""Measures models that are not part of a run: opens them, reads the sets, and compares the models on each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from distcse.devices.device import speed_of
from distcse.errors import EvaluationOptionError, nearest
from distcse.evaluation import (
    Candidate,
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
from distcse.evaluation.results import choose_reference
from distcse.evaluation.tasks.sts import Aggregate
from distcse.evaluation.vector_formats import VectorFormat
from distcse.events import Reporter
from distcse.models import Encoder
from distcse.models.files import CHECKSUMS
from distcse.preflight.precision import Role, report_precisions
from distcse.preflight.warnings import (
    SettingsWarning,
    report_warnings,
    warn_of_unknown_tokens,
    warn_of_unused_prompts,
)
from distcse.recipe import EncoderSection
from distcse.text.token_table import SampledTokens

_IN_MEMORY = "in memory"
_SAMPLED_TEXTS = 1000
"""The first texts of the user, which show whether a tokenizer knows them."""

Model = str | Path | Encoder
"""A run directory, a model folder, the address of either in object storage, a name on the hub, `package:NAME/FOLDER`, or a loaded
encoder.
"""


def measure_named_models(
    models: Mapping[str, Model] | Sequence[str] | str,
    data: Path | None,
    suites: Iterable[str],
    add: Iterable[str],
    texts: tuple[Path, str] | Sequence[str] | None,
    documents: str | None,
    ensembles: Iterable[str],
    formats: tuple[Sequence[int], Sequence[str]],
    aggregate: Aggregate,
    timed: bool,
    limits: Limits,
    load_options: LoadOptions,
    against: str | None,
    dry_run: bool,
    reporter: Reporter,
) -> Evaluation:
    """Measure models as `distcse.evaluate` does; `texts` are a file and its column, `formats` its `dimensions` and `quantize`."""
    limits.check()
    measured_again = VectorFormat.parse(*formats)
    report_precisions(
        [Role("models", "precision", load_options.precision, [speed_of(load_options.device)])], reporter.emit
    )
    if isinstance(models, str):
        models = [models]
    sources: Mapping[str, Model] = models if isinstance(models, Mapping) else parse_models(models)
    if not sources:
        raise EvaluationOptionError("there is no model to measure; name at least one")
    base = choose_reference([*sources]) if against is None else against
    if base not in sources:
        raise EvaluationOptionError(
            f"--against {base}: there is no model {base!r}{nearest(base, sources)}; the models are {', '.join(sources)}"
        )
    own = [] if texts is None else [TextsTask.of(texts, base if len(sources) > 1 else None)]
    custom = [CustomSet.parse(text) for text in add]
    tasks = collect(data, parse_suites(list(suites)) if data else [], custom, aggregate, own)
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
    if measured_again:
        _add_formats(measured_again, tasks, candidates)
    limits.check_suites([task.suite for task in tasks.tasks])
    if (timed or limits.ms is not None) and not tasks.timed_texts:
        tasks.timed_texts = tasks.first_sentences()
    combined = make_ensembles(ensembles, candidates)
    settings = {"STS": aggregate, "device": load_options.device, "precision": load_options.resolved_precision}
    if dry_run:
        _report_inputs(candidates, combined, tasks, reporter)
        infos = [candidate.info for candidate in (*candidates, *combined)]
        return Evaluation(infos, base, [], {}, tasks.missing, tasks.warnings, settings, 0.0)
    return evaluate([*candidates, *combined], tasks, settings=settings, reporter=reporter, base=base)


def _report_inputs(
    candidates: Sequence[Candidate], ensembles: Sequence[Candidate], tasks: Tasks, reporter: Reporter
) -> None:
    """Report each model and set of a dry run, and warn of missing sets."""
    for each in candidates:
        info = each.info
        reporter.found(info.name, f"{info.kind}, pooling {info.pooling}, {info.parameters / 1e6:.1f} M parameters")
    for each in ensembles:
        reporter.found(each.info.name, each.info.source)
    for task in tasks.tasks:
        reporter.found(f"{task.suite} {task.name}", f"{len(set(task.sentences())):,} distinct texts")
    for line in (*(f"missing: {line}" for line in tasks.missing), *tasks.warnings):
        reporter.warn(line)


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
    """Add each retrieval set once more, with documents encoded by one model for all candidates."""
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


def _add_formats(formats: Sequence[VectorFormat], tasks: Tasks, candidates: Sequence[Candidate]) -> None:
    """Measure the retrieval sets also in other formats of vectors, with the bytes of each."""
    if not any(isinstance(task, RetrievalTask) for task in tasks.tasks):
        raise EvaluationOptionError(
            "--dimensions and --quantize need a retrieval set; add retrieval to --suite, or --add retrieval=FOLDER"
        )
    widest = max(candidate.info.dimensions for candidate in candidates)
    if wide := [each.dimensions for each in formats if each.dimensions is not None and each.dimensions >= widest]:
        raise EvaluationOptionError(
            f"--dimensions is {wide[0]}, and no model has more than {widest} dimensions; write a lower number"
        )
    tasks.formats = [*formats]
    tasks.tasks = [
        replace(task, format=VectorFormat()) if isinstance(task, RetrievalTask) else task for task in tasks.tasks
    ]
