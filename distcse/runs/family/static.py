"""Static students of a family: the largest student's vectors of single tokens, trained on the same targets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from distcse.devices.device import default_device
from distcse.evaluation import Contamination
from distcse.events import Reporter, StageProgress
from distcse.models import Encoder, StaticEncoder
from distcse.models.static import LEARNING_RATE, require_model2vec
from distcse.recipe import FamilyRecipe, MemberSection, Recipe
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import model_memory
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.preparation import locate_targets
from distcse.runs.distillation.processes import student_needs
from distcse.runs.distillation.result import StudentResult
from distcse.storage import ArtifactStore, open_store
from distcse.teachers.targets import TargetSpec
from distcse.text import Corpus

MAX_ROWS = 1_000_000
"""Rows of the corpus, evenly spaced, that a static student learns from at most: they are in memory at once."""
_BLOCK = 1 << 14
"""Rows whose joined vectors are in memory together."""
_BYTES_PER_TEXT = 500
_CHECKED_ROWS = 512
"""Rows whose cosines choose the best pass, where the recipe holds none out."""


def train_static(
    recipe: FamilyRecipe,
    member: MemberSection,
    largest: StudentResult,
    corpus: Corpus,
    directory: RunDirectory,
    backend: Backend,
    reporter: Reporter,
) -> Path:
    """Train a static student on one of the backend's devices; one that is there already is kept.

    Args:
        recipe: The family's recipe.
        member: The static student.
        largest: The student whose space and tokens' vectors it takes.
        corpus: The training corpus.
        directory: The family's run.
        backend: Where it is trained.
        reporter: Receives progress.

    Returns:
        The folder of the trained model.

    Raises:
        StorageError: The folder cannot be written.
    """
    stored = directory.store / "members" / member.label / "model"
    if not stored.has_folder():
        spec, width = _targets(largest.recipe, corpus, largest.directory)
        rows = min(len(corpus), MAX_ROWS)
        call = DeviceCall(
            f"training of {member.label}",
            partial(
                _train,
                largest.recipe,
                member.lr or LEARNING_RATE,
                open_store(largest.directory.model),
                spec,
                open_store(corpus.directory),
                stored,
            ),
            model_memory(str(largest.directory.model)) + rows * (2 * 4 * width + _BYTES_PER_TEXT),
        )
        backend.run_on_devices([call], student_needs(recipe).options(directory.path), reporter)
    stored.fetch_folder()
    return stored.path


def _targets(recipe: Recipe, corpus: Corpus, run: RunDirectory) -> tuple[TargetSpec, int]:
    """Locate the targets of a student that has been trained. Returns also the width of a teacher's vectors."""
    spec = locate_targets(recipe, corpus)
    if run.store.fetch(run.projection.name):
        spec = replace(spec, projection=open_store(run.projection))
    return spec, max(table.dimension for table in spec.tables)


def _train(
    recipe: Recipe,
    lr: float,
    largest: ArtifactStore,
    spec: TargetSpec,
    prepared: ArtifactStore,
    out: ArtifactStore,
    reporter: Reporter,
) -> None:
    require_model2vec("static: true")
    largest.fetch_folder()
    corpus, targets, device = Corpus.open(prepared.path), spec.open(), default_device()
    train, held_out = corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)
    rows = _evenly_spaced(train.ids(), MAX_ROWS)
    checked = held_out if len(held_out) else rows[:_CHECKED_ROWS]
    progress = partial(reporter.advance, "static", total=None, unit="tokens")
    encoder = Encoder.load(largest.path, trust_remote_code=recipe.student.trust_remote_code)
    start = StaticEncoder.of_tokens(encoder.to(device).eval(), progress)
    vectors = []
    for begin in range(0, len(rows), _BLOCK):
        reporter.advance("static", begin, len(rows), "sentences")
        vectors.append(targets.vectors(rows[begin : begin + _BLOCK]))
    trained = start.train(
        corpus.texts(rows),
        np.concatenate(vectors),
        (corpus.texts(checked), targets.vectors(checked)),
        lr=lr,
        batch_size=recipe.training.batch_size,
        seed=recipe.seed,
        device=device,
        on_step=partial(reporter.check_stop, "in the training of a static student"),
    )
    trained.save(out)
    Contamination.read(largest.path).write(out)
    reporter.emit(
        StageProgress("static", len(rows), len(rows), "sentences", finished=True, note="trained by model2vec")
    )


def _evenly_spaced(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return `count` of the rows, or all if there are fewer."""
    return rows if len(rows) <= count else rows[np.linspace(0, len(rows) - 1, count).astype(np.int64)]
