"""The trained student with ranks at inference (RankEncoder Eq. 7): built from the corpus, stored, and measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from distcse.data import Corpus
from distcse.device import default_device
from distcse.evaluation import Contamination, ModelResults, Tasks, make_candidate, measure_model, reporting
from distcse.events import Reporter
from distcse.experiments.backend import GIB, Backend, DeviceCall
from distcse.experiments.devices import model_memory
from distcse.models import EncoderHandle
from distcse.rank_space import RankSpaceEncoder, draw_references
from distcse.recipe import RankInferenceSection, Recipe
from distcse.storage import ArtifactStore

_NAME = "student + ranks"
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
    """Return the call that stores the student with its references, and measures it on the suites of pairs.

    Args:
        recipe: The run's recipe.
        section: Its `evaluation.rank_inference`.
        corpus: The student's training corpus, of which the references are drawn.
        student: The trained student.
        folder: Where the student and its references are stored.
        contamination: The test sentences on which the student was trained.
        precision: Precision of the forward passes.
        tasks: The tasks of the final evaluation.
        backend: Where the call will run.
    """
    references = draw_references(len(corpus), section.num_references)
    of_pairs = Tasks([task for task in tasks.tasks if task.pairs_only])
    shared = backend.share((of_pairs, corpus.texts(references)))
    vectors = 2 * 4 * _MAX_DIMENSION * len(references)
    return DeviceCall(
        f"evaluation of the {_NAME}",
        partial(_measure, section, student, folder, contamination, precision, shared),
        model_memory(recipe.student.backbone) + _RANKS_BYTES + vectors,
    )


def _measure(
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
        on_progress=partial(reporter.advance, _NAME, total=len(texts), unit="references encoded"),
    )
    ranker.save(folder)
    contamination.write(folder)
    candidate = make_candidate(_NAME, str(folder), ranker, contamination, precision, reporting(reporter, _NAME))
    results = measure_model(candidate, tasks, reporter)
    return (replace(results, vectors=None),)  # its vectors are the student's
