"""Final evaluation of a run: initial student, trained student and teachers, on sentences the student was not trained on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.devices.device import default_device
from distcse.devices.device_plan import GIB
from distcse.evaluation import (
    Candidate,
    Contamination,
    HeldOutVectors,
    LoadOptions,
    Model,
    ModelInfo,
    ModelResults,
    PairScores,
    Tasks,
    VectorModel,
    agreement_result,
    make_candidate,
    measure_model,
    open_candidate,
    reporting,
)
from distcse.evaluation.models import Progress
from distcse.evaluation.tasks.agreement import vectors_by_role
from distcse.events import Reporter, StageProgress
from distcse.losses import mix_lists
from distcse.models import Encoder, EncoderHandle, StaticEncoder, resolve_model
from distcse.rank_space import RankSpaceEncoder, draw_references
from distcse.recipe import RankInferenceSection, Recipe, Role, TeacherSection, decided
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import model_memory
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.agreement import AgreementRows
from distcse.runs.distillation.processes import list_teachers, student_needs
from distcse.runs.final_evaluation import (
    FinalScores,
    compare_measured,
    measure_contamination,
    measure_models,
    read_sets,
    stoppable,
)
from distcse.storage import ArtifactStore, open_store
from distcse.teachers.embedding import table_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import Embedder
from distcse.text import Corpus
from distcse.text.corpus import of_role

_CHUNK_ROWS = 1 << 16
_LABELLED_SUITES = ("sts", "ranking", "geometry", "retrieval")


def selected_suites(recipe: Recipe) -> Sequence[str]:
    """Return the suites of the final evaluation.

    By default all suites but transfer, which takes longer than the others together, or of a corpus with queries retrieval;
    without labeled data, agreement only.
    """
    final = recipe.evaluation.final_suites
    if isinstance(final, list):
        return final
    if recipe.evaluation.data:
        suites: tuple[str, ...] = ("retrieval",) if recipe.has_queries else _LABELLED_SUITES
        return (*suites, "transfer") if final == "with_transfer" else suites
    return ("agreement",) if recipe.teachers.encoders else ()


def labelled_tasks(recipe: Recipe) -> Tasks:
    """Read the labeled sets of the final evaluation; see `read_sets`."""
    teachers = [teacher.backbone for teacher in recipe.teachers.encoders if kind_of(teacher, only_local=True).is_model]
    return read_sets(recipe, selected_suites(recipe), [recipe.student.backbone, *teachers])


@dataclass(frozen=True)
class ScoredStudent:
    """A student to evaluate."""

    name: str
    """Name in tables."""
    source: str
    """The model's folder or name, as tables show it."""
    encoder: EncoderHandle | None
    """None for a static student, which its trained folder holds."""
    trained: Path | None = None
    """Folder of the trained student; None before training."""


@stoppable
def final_scores(
    recipe: Recipe,
    corpus: Corpus,
    labelled: Tasks,
    students: Sequence[ScoredStudent],
    run: RunDirectory,
    backend: Backend,
    reporter: Reporter,
) -> FinalScores:
    """Evaluate students and teachers, each on one of the backend's devices.

    Records in the trained students' folders which test sentences they were trained on. A stop request leaves models out, and a
    resumed run measures them. The agreement with the teachers needs all teachers.
    `evaluation.rank_inference` takes the last student.

    Returns:
        The scores of the models that were measured; none if the recipe selects no suite.
    """
    selected = selected_suites(recipe)
    if not selected:
        return FinalScores(None)
    started_at = time.perf_counter()
    contamination = contamination_of(recipe, corpus, labelled, reporter)
    guard = run.store.guard
    trained = {each.name: open_store(each.trained, guard) for each in students if each.trained is not None}
    seen = {name: contamination.write(model) for name, model in trained.items()}
    tasks = Tasks([*labelled.tasks], labelled.missing, labelled.warnings)
    held_out_task, rows = None, AgreementRows(np.empty(0, dtype=np.int64))
    if "agreement" in selected:
        held_out = corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)[1]
        rows = AgreementRows.of(recipe, corpus, held_out)
        held_out_task = rows.task(corpus)
        tasks.tasks.append(held_out_task)
        tasks.timed_texts = corpus.texts(held_out)
    else:
        tasks.timed_texts = tasks.first_sentences()
    precision = decided(recipe.evaluation.precision)
    shared = backend.share((tasks, held_out_task))
    memory = model_memory(recipe.student.backbone)
    calls: list[DeviceCall[Any]] = [
        DeviceCall(
            f"evaluation of the {student.name}",
            partial(_measure_student, student, seen.get(student.name), precision, shared),
            memory,
        )
        for student in students
    ]
    if (ranks := recipe.evaluation.rank_inference) is not None:
        ranked, ranker = students[-1].encoder, run.store / "ranker"
        assert ranked is not None  # families, which may have static students, refuse rank inference
        untimed = replace(tasks, timed_texts=[])  # its vectors are the student's
        calls.append(
            rank_inference_call(
                recipe, ranks, corpus, ranked, ranker, seen[students[-1].name], precision, untimed, backend
            )
        )
    teachers, compared, first_teacher = recipe.teachers.encoders, list_teachers(recipe), len(calls)
    names = ["teacher"] if len(teachers) == 1 else [f"teacher {number}" for number in range(len(teachers))]
    for number, (name, section) in enumerate(zip(names, teachers, strict=True)):
        table = _complete_table(recipe, section, corpus) if rows.queries else None
        call = partial(_measure_teacher, name, section, precision, shared, table, rows, number in compared)
        memory = model_memory(section.backbone if section.loads_model else None)
        calls.append(DeviceCall(f"evaluation of {name}", call, memory))
    options, protocol = student_needs(recipe).options(run.path), [precision, repr(ranks)]
    returned = measure_models(calls, tasks, protocol, run.store, backend, options, reporter)
    measured = [_Measured(*model) for model in returned if model is not None]
    results = [model.results for model in measured]
    if held_out_task is not None and None in returned[first_teacher:]:
        results = [scored for model in results if (scored := _without_vectors(model)).results]
    elif held_out_task is not None:
        similarities = np.stack([model.similarities for model in measured if model.similarities is not None])
        mixed = mix_lists(torch.from_numpy(similarities), [teachers[number].alpha for number in compared]).numpy()
        # The only teacher agrees with itself.
        itself = "teacher" if len(teachers) == 1 else None
        results = [
            _without_vectors(model)
            if model.info.name == itself
            else _with_agreement(model, mixed, held_out_task.queries)
            for model in results
        ]
    return compare_measured(results, tasks, calls, returned, precision, started_at, names)


class _Measured(NamedTuple):
    """What the evaluation of one model returns."""

    results: ModelResults
    similarities: NDArray[np.float32] | None = None
    """(n, m) a teacher's similarities of held-out rows (see `HeldOutVectors`), if agreement is measured."""


def _measure_student(
    student: ScoredStudent,
    contamination: Contamination | None,
    precision: str,
    shared: Callable[[], tuple[Tasks, HeldOutVectors | None]],
    reporter: Reporter,
) -> _Measured:
    tasks, _ = shared()
    if contamination is None:  # not trained: as large and as fast as the trained student
        tasks, contamination = replace(tasks, timed_texts=[]), Contamination.of_model(student.source)
    model: Encoder | StaticEncoder
    if student.encoder is None:
        model = StaticEncoder.load(resolve_model(student.source))
    else:
        model = student.encoder.take().to(default_device())
    progress = reporting(reporter, student.name)
    candidate = make_candidate(student.name, student.source, model, contamination, precision, progress)
    return _Measured(measure_model(candidate, tasks, reporter))


def _measure_teacher(
    name: str,
    section: TeacherSection,
    precision: str,
    shared: Callable[[], tuple[Tasks, HeldOutVectors | None]],
    table: EmbeddingTable | None,
    rows: AgreementRows,
    is_compared: bool,
    reporter: Reporter,
) -> _Measured:
    tasks, held_out = shared()
    if not kind_of(section).is_model:  # an endpoint may charge for each text
        tasks = replace(tasks, timed_texts=[])
    candidate = _teacher_candidate(name, section, precision, reporting(reporter, name))
    if held_out is not None and table is not None and isinstance(candidate.model, VectorModel):
        for role in dict.fromkeys(held_out.roles):
            places = [place for place, each in enumerate(held_out.roles) if each == role]
            texts = [held_out.texts[place] for place in places]
            candidate.model.remember(texts, table.vectors(rows.ids[places]), role)
    similarities = _similarity_matrix(candidate.model, held_out) if held_out is not None and is_compared else None
    return _Measured(measure_model(candidate, tasks, reporter), similarities)


def _complete_table(recipe: Recipe, teacher: TeacherSection, corpus: Corpus) -> EmbeddingTable | None:
    """Return a teacher's table of the corpus; None if it has none, or rows are missing."""
    section = recipe.teachers
    if not kind_of(teacher).uses_table(section.mode):
        return None
    table = table_of(teacher, corpus, open_store(recipe.storage.cache), section.shard_rows)
    return None if table.missing_shards(verify=False) else table


def _with_agreement(model: ModelResults, similarities: NDArray[np.floating], queries: int) -> ModelResults:
    """Replace a model's vectors of the held-out rows by their agreement with the teachers' mixed similarities."""
    results = {
        key: agreement_result(result.details["vectors"], similarities, queries)
        if "vectors" in result.details
        else result
        for key, result in model.results.items()
    }
    return replace(model, results=results)


def _without_vectors(model: ModelResults) -> ModelResults:
    """Leave out a model's vectors of the held-out sentences, which have no score without all teachers."""
    return replace(model, results={key: r for key, r in model.results.items() if "vectors" not in r.details})


def _similarity_matrix(teacher: Model, held_out: HeldOutVectors) -> NDArray[np.float32]:
    """Return the similarities of the held-out texts, (n, n) or of n queries and m documents (n, m)."""
    texts, queries = held_out.texts, held_out.queries or len(held_out.texts)
    if isinstance(teacher, VectorModel):
        vectors = vectors_by_role(teacher, texts, held_out.roles)
        return vectors[:queries] @ vectors[held_out.queries :].T
    pairs = [(one, other) for one in texts[:queries] for other in texts[held_out.queries :]]
    scores = teacher.similarities([one for one, _ in pairs], [other for _, other in pairs])
    return scores.reshape(queries, -1).astype(np.float32)


def _teacher_candidate(name: str, section: TeacherSection, precision: str, on_progress: Progress) -> Candidate:
    kind = kind_of(section)
    if not kind.is_model:
        info = ModelInfo(name, kind.source, kind.name, "unknown", section.longest or 0, 0)
        if not kind.has_vectors:
            return Candidate(info, PairScores(kind.open_scorer(), on_progress))
        encode = partial(_encode, kind.open_embedder(), on_progress)
        return Candidate(info, VectorModel(encode, section.role_prompts))
    if not kind.has_vectors:
        options = LoadOptions(
            max_length=section.longest,
            device=default_device(),
            precision=precision,
            trust_remote_code=section.trust_remote_code,
        )
        return open_candidate(name, section.backbone, options, on_progress)
    encoder = Encoder.from_section(section).to(default_device())
    contamination = Contamination.of_model(section.backbone)
    return make_candidate(name, section.backbone, encoder, contamination, precision, on_progress)


def _encode(
    embedder: Embedder, on_progress: Progress, texts: Sequence[str], role: Role = "text"
) -> NDArray[np.float32]:
    return of_role(embedder.encode, role)(texts, on_progress=lambda done: on_progress(done, len(texts)))


def contamination_of(recipe: Recipe, corpus: Corpus, labelled: Tasks, reporter: Reporter) -> Contamination:
    """Find the sentences of test and dev sets on which a student of this corpus was trained."""
    rows, _ = corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)
    chunks = map(corpus.texts, rows.blocks(_CHUNK_ROWS))
    texts = reporter.follow((text for chunk in chunks for text in chunk), "contamination")
    contamination = measure_contamination(recipe, texts, [task.sentences() for task in labelled.tasks])
    if number := len(contamination.overlap):
        sets = "set" if number == 1 else "sets"
        note = f"compared with {number} labeled {sets}: {contamination.describe('corpus.exclude_evaluation')}"
        reporter.emit(StageProgress("contamination", len(rows), len(rows), "sentences", finished=True, note=note))
    return contamination


_RANKS_NAME = "student + ranks"
_RANKS_BYTES = 2 * GIB
"""Rank vectors that are kept and computed at once (see `pair_similarities`)."""
_MAX_DIMENSION = 1024


def rank_inference_call(
    recipe: Recipe,
    section: RankInferenceSection,
    corpus: Corpus,
    student: EncoderHandle,
    folder: ArtifactStore,
    contamination: Contamination,
    precision: str,
    tasks: Tasks,
    backend: Backend,
) -> DeviceCall[tuple[ModelResults]]:
    """Return the call that stores the student with its references, and measures it on the suites of pairs."""
    references = draw_references(len(corpus), section.num_references)
    of_pairs = Tasks([task for task in tasks.tasks if task.pairs_only])
    shared = backend.share((of_pairs, corpus.texts(references)))
    vectors = 2 * 4 * _MAX_DIMENSION * len(references)
    return DeviceCall(
        f"evaluation of the {_RANKS_NAME}",
        partial(_measure_ranks, section, student, folder, contamination, precision, shared),
        model_memory(recipe.student.backbone) + _RANKS_BYTES + vectors,
    )


def _measure_ranks(
    section: RankInferenceSection,
    student: EncoderHandle,
    folder: ArtifactStore,
    contamination: Contamination,
    precision: str,
    shared: Callable[[], tuple[Tasks, list[str]]],
    reporter: Reporter,
) -> tuple[ModelResults]:
    tasks, texts = shared()
    ranker = RankSpaceEncoder.from_sentences(
        student.take().to(default_device()),
        texts,
        section.weight,
        section.normalize,
        rank_method=section.rank_method,
        on_progress=partial(reporter.advance, _RANKS_NAME, total=len(texts), unit="references encoded"),
    )
    ranker.save(folder)
    contamination.write(folder)
    candidate = make_candidate(
        _RANKS_NAME, str(folder), ranker, contamination, precision, reporting(reporter, _RANKS_NAME)
    )
    return (measure_model(candidate, tasks, reporter),)
