"""Fingerprints of all that decides what a student learns: whoever repeats or continues a run holds its data to them."""

from __future__ import annotations

from pathlib import Path

from distcse.data import Corpus
from distcse.evaluation import Tasks, labelled_dev
from distcse.events import Reporter
from distcse.experiments.distillation.final_evaluation import labelled_tasks
from distcse.experiments.distillation.preparation import read_corpus
from distcse.models import model_fingerprint, resolve_model
from distcse.recipe import Recipe
from distcse.teachers.factory import fingerprint as teacher_fingerprint


def data_of(recipe: Recipe, corpus: Corpus, labelled: Tasks) -> dict[str, str]:
    """Fingerprints by what they are of: corpus, models, dev set, test sets."""
    student, detection = recipe.student, recipe.objective.detection
    found = {
        "corpus": corpus.content,
        "student": model_fingerprint(resolve_model(student.backbone, student.trust_remote_code)),
    }
    for number, teacher in enumerate(recipe.teachers.encoders):
        found[f"teacher {number}"] = teacher_fingerprint(teacher)
    if detection is not None and detection.weight and detection.generator is not None:
        found["generator"] = model_fingerprint(resolve_model(detection.generator))
    if recipe.dev_score == "stsb":
        found["dev set"] = labelled_dev(Path(str(recipe.evaluation.data))).fingerprint
    return {**found, **labelled.fingerprints()}


def data_before(recipe: Recipe) -> dict[str, str]:
    """The same before a run: its corpus is read, or found in the cache."""
    return data_of(recipe, read_corpus(recipe, Reporter()), labelled_tasks(recipe))
