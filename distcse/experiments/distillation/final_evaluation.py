"""The scores at the end: start, student and teachers side by side, on text the student never learned from."""

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
    candidate_of,
    collect,
    evaluate,
    labelled_dev,
    open_candidate,
    refuse_test_as_dev,
)
from distcse.events import Listener, StageProgress
from distcse.losses import mix_lists
from distcse.models import Encoder, resolve_model
from distcse.recipe import Recipe, TeacherSection, decided
from distcse.teachers.factory import open_embedder, scores_pairs
from distcse.teachers.teacher_weights import TeacherWeights

_RETRIEVAL_SIZE = 1000
_CHUNK = 1 << 16
_WITH_LABELS = ("sts", "ranking", "geometry", "retrieval")


def wanted_measures(recipe: Recipe) -> Sequence[str]:
    """Suites measured at the end. Null leaves out transfer, which takes longer than all other suites together."""
    final = recipe.evaluation.final_suites
    if isinstance(final, list):
        return final
    if recipe.evaluation.data:
        return (*_WITH_LABELS, "transfer") if final == "with_transfer" else _WITH_LABELS
    return ("agreement",) if recipe.teachers.encoders else ()


def labelled_tasks(recipe: Recipe) -> Tasks:
    """The labelled sets of the end, read at the beginning: a malformed file is told before the work, not after it."""
    wanted = wanted_measures(recipe)
    suites = [suite for suite in SUITES if suite in wanted]
    if not suites:
        return Tasks()
    data = Path(str(recipe.evaluation.data))
    tasks = collect(data, suites, [], EvalConfig("all", recipe.evaluation.transfer, default_device()))
    if recipe.dev_score == "stsb":
        dev = labelled_dev(data)
        refuse_test_as_dev(dev.first, dev.second, tasks, recipe.evaluation.dev_is_test)
    return tasks


def final_scores(
    recipe: Recipe, corpus: Corpus, labelled: Tasks, start: Encoder, student: Encoder, model: Path, post: Listener
) -> Evaluation | None:
    """Measure start, student and teachers; note in the student's folder which test sentences it was trained on.

    Args:
        recipe: The run's recipe.
        corpus: What the student learned from.
        labelled: Labelled sets to measure on.
        start: The student as it began.
        student: The student as it is.
        model: The student's folder.
        post: Told what is at work.
    """
    wanted = wanted_measures(recipe)
    if not wanted:
        return None
    exposure = contamination_of(recipe, corpus, labelled, post)
    exposure.write(model)
    teachers, precision = recipe.teachers.encoders, decided(recipe.evaluation.precision)
    candidates = [
        candidate_of(
            "start", recipe.student.backbone, start.to(default_device()), _known(recipe.student.backbone), precision
        ),
        candidate_of("student", str(model), student.to(default_device()), exposure, precision),
    ]
    for number, section in enumerate(teachers):
        name = "teacher" if len(teachers) == 1 else f"teacher {number}"
        candidates.append(_teacher(name, section, precision))
    tasks = Tasks([*labelled.tasks], labelled.missing, labelled.warnings)
    if "docstring_retrieval" in wanted:
        tasks.tasks.append(_docstrings(recipe))
    if "agreement" in wanted:
        tasks.tasks.append(_agreement(recipe, corpus, candidates[2:]))
    settings = {
        "STS": "all",
        "transfer": recipe.evaluation.transfer,
        "device": default_device(),
        "precision": precision,
    }
    return evaluate(candidates, tasks, base="start", settings=settings, post=post)


def _agreement(recipe: Recipe, corpus: Corpus, teachers: Sequence[Candidate]) -> AgreementTask:
    _, held_out = split_held_out(len(corpus), recipe.evaluation.num_heldout, recipe.seed)
    texts = corpus.texts(held_out)
    alphas = TeacherWeights(recipe.teachers.encoders, corpus).of(held_out)
    lists = np.stack([_lists(teacher.model, texts) for teacher in teachers])
    return AgreementTask(texts, mix_lists(torch.from_numpy(lists), alphas).numpy())


def _lists(teacher: Model, texts: list[str]) -> NDArray[np.float32]:
    """(n, n) similarities of n texts."""
    if isinstance(teacher, VectorModel):
        vectors = teacher.unit_vectors(texts)
        return vectors @ vectors.T
    pairs = [(one, other) for one in texts for other in texts]
    scores = teacher.similarities([one for one, _ in pairs], [other for _, other in pairs])
    return scores.reshape(len(texts), -1).astype(np.float32)


def _teacher(name: str, section: TeacherSection, precision: str) -> Candidate:
    if not section.is_model:
        kind, source = ("endpoint", section.endpoint.url) if section.endpoint else ("own", str(section.class_path))
        about = ModelInfo(name, source, kind, "unknown", section.max_length or 0, 0)
        return Candidate(about, VectorModel(open_embedder(section).encode))
    if scores_pairs(section):
        reading = LoadOptions(
            max_length=section.max_length,
            device=default_device(),
            precision=precision,
            trust_remote_code=section.trust_remote_code,
        )
        return open_candidate(name, section.backbone, reading)
    encoder = Encoder.from_section(section).to(default_device())
    return candidate_of(name, section.backbone, encoder, _known(section.backbone), precision)


def _docstrings(recipe: Recipe) -> RetrievalTask:
    documented = held_out_documentation(recipe.corpus.docstrings or [])[:_RETRIEVAL_SIZE]
    documents = [entry.description for entry in documented]
    queries = [entry.summary for entry in documented]
    own: list[dict[int, float]] = [{place: 1.0} for place in range(len(documented))]
    return RetrievalTask("docstrings", RetrievalDataset(queries, documents, own, [None] * len(own)))


def contamination_of(recipe: Recipe, corpus: Corpus, labelled: Tasks, post: Listener) -> Contamination:
    """Which sentences of the test sets a student of this corpus was trained on."""
    if not labelled.tasks:
        return Contamination({})
    trained, _ = split_held_out(len(corpus), recipe.evaluation.num_heldout, recipe.seed)
    chunks = (corpus.texts(trained[begin : begin + _CHUNK]) for begin in range(0, len(trained), _CHUNK))
    exposure = Contamination.measure(
        (text for chunk in chunks for text in chunk), [t.sentences() for t in labelled.tasks]
    )
    note = f"compared with {len(labelled.tasks)} test sets: {exposure.describe}"
    post(StageProgress("exposure", len(trained), len(trained), "sentences", finished=True, note=note))
    return exposure


def _known(model: str) -> Contamination:
    return Contamination.read(resolve_model(model))
