"""Final evaluation of a run: initial student, trained student and teachers, on sentences the student was not trained on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from distcse.data import Corpus, split_held_out
from distcse.data.docstrings import held_out_documentation
from distcse.device import default_device
from distcse.evaluation import (
    SUITES,
    AgreementTask,
    Candidate,
    Contamination,
    EvalConfig,
    Evaluation,
    LoadOptions,
    Model,
    ModelInfo,
    RetrievalDataset,
    RetrievalTask,
    Tasks,
    VectorModel,
    collect,
    evaluate,
    labelled_dev,
    make_candidate,
    open_candidate,
    refuse_test_as_dev,
)
from distcse.events import Listener, StageProgress
from distcse.losses import mix_lists
from distcse.models import Encoder, resolve_model
from distcse.recipe import Recipe, TeacherSection, decided
from distcse.teachers.kinds import kind_of
from distcse.teachers.teacher_weights import TeacherWeights

_RETRIEVAL_SIZE = 1000
_CHUNK_ROWS = 1 << 16
_LABELLED_SUITES = ("sts", "ranking", "geometry", "retrieval")


def selected_suites(recipe: Recipe) -> Sequence[str]:
    """Return the suites of the final evaluation.

    By default all suites but transfer, which takes longer than the others together; without labelled data, agreement only.
    """
    final = recipe.evaluation.final_suites
    if isinstance(final, list):
        return final
    if recipe.evaluation.data:
        return (*_LABELLED_SUITES, "transfer") if final == "with_transfer" else _LABELLED_SUITES
    return ("agreement",) if recipe.teachers.encoders else ()


def labelled_tasks(recipe: Recipe) -> Tasks:
    """Read the labelled sets of the final evaluation. Runs call it first, so that a malformed file fails before training.

    Raises:
        EvaluationFormatError: A set is malformed.
        EvaluationResultError: A model's record of contamination cannot be read.
        EvaluationError: The dev set is missing, or is also a test set without evaluation.dev_is_test.
    """
    selected = selected_suites(recipe)
    suites = [suite for suite in SUITES if suite in selected]
    if not suites:
        return Tasks()
    teachers = [teacher.backbone for teacher in recipe.teachers.encoders if kind_of(teacher, only_local=True).is_model]
    for model in (recipe.student.backbone, *teachers):
        if Path(model).is_dir():
            _read_contamination(model)
    data = Path(str(recipe.evaluation.data))
    tasks = collect(data, suites, [], EvalConfig("all", recipe.evaluation.transfer, default_device()))
    if recipe.dev_score == "stsb":
        dev = labelled_dev(data)
        refuse_test_as_dev(dev.first, dev.second, tasks, recipe.evaluation.dev_is_test)
    return tasks


def final_scores(
    recipe: Recipe, corpus: Corpus, labelled: Tasks, initial: Encoder, student: Encoder, model: Path, emit: Listener
) -> Evaluation | None:
    """Evaluate the initial student, the trained student and the teachers.

    Records in the student's folder which test sentences it was trained on.

    Args:
        recipe: The run's recipe.
        corpus: The student's training corpus.
        labelled: The labelled sets to evaluate on.
        initial: The student before training.
        student: The trained student.
        model: The student's folder.
        emit: Receives progress events.

    Returns:
        The evaluation; None if the recipe selects no suite.
    """
    selected = selected_suites(recipe)
    if not selected:
        return None
    contamination = contamination_of(recipe, corpus, labelled, emit)
    contamination.write(model)
    teachers, precision = recipe.teachers.encoders, decided(recipe.evaluation.precision)
    backbone = recipe.student.backbone
    candidates = [
        make_candidate("start", backbone, initial.to(default_device()), _read_contamination(backbone), precision),
        make_candidate("student", str(model), student.to(default_device()), contamination, precision),
    ]
    for number, section in enumerate(teachers):
        name = "teacher" if len(teachers) == 1 else f"teacher {number}"
        candidates.append(_teacher_candidate(name, section, precision))
    tasks = Tasks([*labelled.tasks], labelled.missing, labelled.warnings)
    if "docstring_retrieval" in selected:
        tasks.tasks.append(_docstring_task(recipe))
    if "agreement" in selected:
        tasks.tasks.append(_agreement_task(recipe, corpus, candidates[2:]))
    settings = {
        "STS": "all",
        "transfer": recipe.evaluation.transfer,
        "device": default_device(),
        "precision": precision,
    }
    return evaluate(candidates, tasks, base="start", settings=settings, emit=emit)


def _agreement_task(recipe: Recipe, corpus: Corpus, teachers: Sequence[Candidate]) -> AgreementTask:
    _, held_out = split_held_out(len(corpus), recipe.evaluation.num_heldout, recipe.seed)
    texts = corpus.texts(held_out)
    alphas = TeacherWeights(recipe.teachers.encoders, corpus).of(held_out)
    similarities = np.stack([_similarity_matrix(teacher.model, texts) for teacher in teachers])
    return AgreementTask(texts, mix_lists(torch.from_numpy(similarities), alphas).numpy())


def _similarity_matrix(teacher: Model, texts: list[str]) -> NDArray[np.float32]:
    """Return the (n, n) similarities of n texts."""
    if isinstance(teacher, VectorModel):
        vectors = teacher.unit_vectors(texts)
        return vectors @ vectors.T
    pairs = [(one, other) for one in texts for other in texts]
    scores = teacher.similarities([one for one, _ in pairs], [other for _, other in pairs])
    return scores.reshape(len(texts), -1).astype(np.float32)


def _teacher_candidate(name: str, section: TeacherSection, precision: str) -> Candidate:
    kind = kind_of(section)
    if not kind.is_model:
        info = ModelInfo(name, kind.source, kind.name, "unknown", section.max_length or 0, 0)
        return Candidate(info, VectorModel(kind.open_embedder().encode))
    if not kind.has_vectors:
        options = LoadOptions(
            max_length=section.max_length,
            device=default_device(),
            precision=precision,
            trust_remote_code=section.trust_remote_code,
            is_fast=section.is_fast,
        )
        return open_candidate(name, section.backbone, options)
    encoder = Encoder.from_section(section).to(default_device())
    return make_candidate(name, section.backbone, encoder, _read_contamination(section.backbone), precision)


def _docstring_task(recipe: Recipe) -> RetrievalTask:
    documented = held_out_documentation(recipe.corpus.docstrings or [])[:_RETRIEVAL_SIZE]
    documents = [entry.description for entry in documented]
    queries = [entry.summary for entry in documented]
    relevant: list[dict[int, float]] = [{index: 1.0} for index in range(len(documented))]
    return RetrievalTask("docstrings", RetrievalDataset(queries, documents, relevant, [None] * len(relevant)))


def contamination_of(recipe: Recipe, corpus: Corpus, labelled: Tasks, emit: Listener) -> Contamination:
    """Find the test sentences on which a student of this corpus was trained."""
    if not labelled.tasks:
        return Contamination({})
    rows, _ = split_held_out(len(corpus), recipe.evaluation.num_heldout, recipe.seed)
    chunks = (corpus.texts(rows[begin : begin + _CHUNK_ROWS]) for begin in range(0, len(rows), _CHUNK_ROWS))
    contamination = Contamination.measure(
        (text for chunk in chunks for text in chunk), [task.sentences() for task in labelled.tasks]
    )
    note = f"compared with {len(labelled.tasks)} test sets: {contamination.describe}"
    emit(StageProgress("contamination", len(rows), len(rows), "sentences", finished=True, note=note))
    return contamination


def _read_contamination(model: str) -> Contamination:
    return Contamination.read(resolve_model(model))
