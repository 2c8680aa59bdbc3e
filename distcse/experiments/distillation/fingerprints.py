"""Fingerprints of a run's data and models, which a resumed or repeated run must match."""

from __future__ import annotations

from distcse.data import Corpus
from distcse.evaluation import Tasks
from distcse.events import Reporter
from distcse.experiments.distillation.corpus import read_corpus
from distcse.experiments.distillation.dev_metric import read_labelled_dev
from distcse.experiments.distillation.final_evaluation import labelled_tasks
from distcse.models import model_fingerprint
from distcse.recipe import DetectionSection, Recipe
from distcse.teachers.kinds import kind_of


def data_fingerprints(recipe: Recipe, corpus: Corpus, labelled: Tasks) -> dict[str, str]:
    """Fingerprint the corpus, the models, the dev set and the test sets, by name.

    Args:
        recipe: The recipe.
        corpus: Its sentences.
        labelled: Its labelled test sets.
    """
    student = recipe.student
    fingerprints = {
        "corpus": corpus.fingerprint,
        "student": model_fingerprint(student.backbone, student.trust_remote_code),
    }
    for number, teacher in enumerate(recipe.teachers.encoders):
        fingerprints[f"teacher {number}"] = kind_of(teacher).source_fingerprint()
    if (detection := recipe.objective.active(DetectionSection)) is not None:
        fingerprints["generator"] = model_fingerprint(detection.generator)
    if (dev := read_labelled_dev(recipe)) is not None:
        fingerprints["dev set"] = dev.fingerprint
    return {**fingerprints, **labelled.fingerprints()}


def read_fingerprints(recipe: Recipe, reporter: Reporter) -> dict[str, str]:
    """Read the corpus (or take it from the cache) and the labelled sets, and fingerprint them and the models."""
    return data_fingerprints(recipe, read_corpus(recipe, reporter), labelled_tasks(recipe))
