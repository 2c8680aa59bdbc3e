"""Preparation of a run's inputs, with a cache: tokens, regression targets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from distcse.devices.device import default_device
from distcse.errors import UnsuitableTeacherError
from distcse.evaluation import Tasks, read_dev
from distcse.events import Reporter
from distcse.models import Encoder, EncoderHandle, model_fingerprint
from distcse.recipe import DetectionSection, Recipe
from distcse.runs.backend import Backend, DeviceCall
from distcse.runs.cluster_fit import model_memory
from distcse.runs.directory import PROJECTION, RunDirectory
from distcse.runs.distillation.corpus import fit_to_corpus, read_corpus
from distcse.runs.distillation.distillation_task import TrainSpec
from distcse.runs.distillation.final_evaluation import labelled_tasks
from distcse.runs.distillation.precompute import prepare_candidates, prepare_tables, prepare_tokens
from distcse.runs.distillation.processes import student_needs, with_list_teachers
from distcse.storage import ArtifactStore, open_store
from distcse.teachers.candidates import import_bm25s
from distcse.teachers.embedding import table_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.resources import starts_servers
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.targets import (
    Projection,
    TargetSpec,
    fit_projection,
    has_projection,
    kept_share,
)
from distcse.text import Corpus, TokenTable

_FIT_ROWS = 20_000
"""Rows on which a projection's principal components are fitted."""
_ALIGN_ROWS = 4000
"""The first of these rows, which the student encodes to rotate the components toward its own vectors."""
_KEPT_ROWS = 2000
"""Other rows, on whose inner products it is measured what the projection keeps; of a small corpus a tenth, or `_MIN_KEPT`."""
_MIN_KEPT = 10


@dataclass(frozen=True)
class PreparedCorpus:
    """A recipe's corpus, tokenized for its student."""

    corpus: Corpus
    tokens: TokenTable
    recipe: Recipe
    """The recipe, with the settings that it left to the run decided."""

    @cached_property
    def initial_encoder(self) -> EncoderHandle:
        """The student before training."""
        return EncoderHandle(partial(Encoder.from_section, self.recipe.student))

    @classmethod
    def prepare(cls, recipe: Recipe, backend: Backend, reporter: Reporter) -> PreparedCorpus:
        """Read and tokenize the corpus, or take both from the cache."""
        corpus = read_corpus(recipe, reporter)
        recipe = fit_to_corpus(recipe, corpus, reporter)
        require_vectors(recipe)
        tokens = prepare_tokens(recipe, corpus, backend, reporter)
        rows, _ = corpus.split_held_out(recipe.evaluation.num_heldout, recipe.seed)
        corpus.sampler(rows, recipe.training.batch_size, recipe.seed)  # raises if there are too few
        return cls(corpus, tokens, recipe)

    def tables(self, backend: Backend, reporter: Reporter, verifies: bool = True) -> list[EmbeddingTable | None]:
        """Return the teachers' complete tables (see `prepare_tables`). Checks the student before rows are embedded."""

        def check_student() -> None:
            self.check_student(backend, reporter)

        return prepare_tables(self.recipe, self.corpus, backend, reporter, check_student, verifies)

    def check_student(self, backend: Backend, reporter: Reporter) -> None:
        """Load the student once."""
        memory = model_memory(self.recipe.student.backbone)
        call = DeviceCall("check of the student", partial(_load, self.initial_encoder), memory)
        backend.run_on_devices([call], student_needs(self.recipe).options(uses_gpu=False), reporter)

    def spec(
        self,
        directory: RunDirectory,
        tables: Sequence[EmbeddingTable | None],
        backend: Backend,
        reporter: Reporter,
    ) -> TrainSpec:
        """Create the spec of the training workers, with regression targets if the recipe uses them."""
        recipe, targets = self.recipe, None
        alphas = [teacher.alpha for teacher in recipe.teachers.encoders]
        if chosen := recipe.objective.vector_teachers(len(tables)):
            selected = [table for number in chosen if (table := tables[number]) is not None]
            targets = self._target_spec(selected, [alphas[number] for number in chosen], directory, backend, reporter)
        candidates = prepare_candidates(recipe, self.corpus, tables, backend, reporter)
        trained = with_list_teachers(recipe)
        return TrainSpec(trained, directory.store, self.corpus.store, self.tokens.store, targets, candidates=candidates)

    def _target_spec(
        self,
        tables: Sequence[EmbeddingTable],
        alphas: Sequence[float],
        directory: RunDirectory,
        backend: Backend,
        reporter: Reporter,
    ) -> TargetSpec:
        """Locate the tables, and fit a projection of their joined vectors if those don't have the student's dimension.

        Where the recipe names another run, its projection is copied. A student that maps up to its teacher's vectors begins with
        the projection's transpose, and its targets are not projected.
        """
        objective, maps_up = self.recipe.objective, self.recipe.student.index_of is not None
        spec = TargetSpec(tables, alphas)
        file = directory.store / PROJECTION
        projected = spec if maps_up else replace(spec, projection=file)
        if has_projection(file, spec.key):
            return projected
        call = DeviceCall(
            "fit of the regression targets",
            partial(
                _fit_projection,
                spec,
                self.initial_encoder,
                self.corpus.store,
                file,
                objective.projection_of,
                maps_up,
            ),
            model_memory(self.recipe.student.backbone),
        )
        (is_fitted,) = backend.run_on_devices([call], student_needs(self.recipe).options(directory.path), reporter)
        if is_fitted:  # on another machine, perhaps
            directory.store.fetch(PROJECTION)
        return projected if is_fitted else spec


def _load(encoder: EncoderHandle, reporter: Reporter) -> None:
    encoder.get()


def _fit_projection(
    spec: TargetSpec,
    initial: EncoderHandle,
    prepared: ArtifactStore,
    file: ArtifactStore,
    other_run: str | None,
    maps_up: bool,
    reporter: Reporter,
) -> bool:
    """Fit and store a projection, unless one teacher's vectors have the student's dimension. `prepared` is the corpus's folder.

    Returns:
        Whether it was stored.
    """
    if other_run is not None:
        Projection.of_run(other_run, file.name, spec.key, initial.get().dimension).write(file)
        return True
    encoder, corpus, targets = initial.get(), Corpus.open(prepared), spec.open()
    if not maps_up and len(spec.tables) == 1 and targets.vectors(np.array([0])).shape[1] == encoder.dimension:
        return False
    rows = np.random.default_rng(0).permutation(len(corpus))[: _FIT_ROWS + _KEPT_ROWS]
    fitted = len(rows) - min(_KEPT_ROWS, max(_MIN_KEPT, len(rows) // 10), len(rows) // 2)
    joined, align_rows = targets.vectors(rows), rows[: min(_ALIGN_ROWS, fitted)]
    vectors = corpus.encode(
        align_rows,
        partial(
            encoder.to(default_device()).encode,
            normalize=True,
            on_progress=partial(reporter.advance, "targets", total=len(align_rows), unit="sentences encoded"),
        ),
    )
    projection = fit_projection(joined[:fitted], joined[: len(align_rows)], vectors)
    Projection(projection, spec.key, kept_share(joined[fitted:], projection)).write(file)
    return True


def locate_targets(recipe: Recipe, corpus: Corpus) -> TargetSpec:
    """Return where the tables of a recipe's regression targets are, whether they exist or not; without the projection."""
    section, cache = recipe.teachers, open_store(recipe.storage.cache)
    chosen = [section.encoders[number] for number in recipe.objective.vector_teachers(len(section.encoders))]
    tables = [table_of(teacher, corpus, cache, section.shard_rows) for teacher in chosen]
    return TargetSpec(tables, [teacher.alpha for teacher in chosen])


def require_shared_projection(
    recipe: Recipe, corpus: Corpus, directory: RunDirectory | None = None, dimension: int | None = None
) -> None:
    """Check that the run of `objective.regression.projection` has the projection that is needed, before anything is embedded.

    A resumed run that has its copy needs the other run no more. No `dimension` checks none.
    """
    if (other_run := recipe.objective.projection_of) is None:
        return
    spec = locate_targets(recipe, corpus)
    if directory is None or not has_projection(directory.store / PROJECTION, spec.key):
        Projection.of_run(other_run, PROJECTION, spec.key, dimension)


def require_vectors(recipe: Recipe) -> None:
    """Check that all that needs teachers' vectors has them, before the corpus is embedded."""
    kinds = [kind_of(teacher) for teacher in recipe.teachers.encoders]
    for kind in kinds:
        kind.check_settings()
    if recipe.uses_ray and kinds and recipe.teachers.num_servers > 1 and not starts_servers(recipe.teachers):
        raise UnsuitableTeacherError(
            f"teachers.num_servers is {recipe.teachers.num_servers}, but no teacher has a server, because the workers read "
            "the tables of all teachers; write teachers.num_servers: 1, or teachers.serve: actor"
        )
    tabled = [kind.uses_table(recipe.teachers.mode) for kind in kinds]
    missing = [number for number in recipe.objective.vector_teachers(len(tabled)) if not tabled[number]]
    if missing:
        (key, *_) = recipe.objective.keys_that_need("vectors", active=True)
        raise UnsuitableTeacherError(
            f"{key} needs the vectors of teacher {min(missing)}, which has no table; write teachers.mode: table. "
            "A cross-encoder has no vectors: use another teacher, or name the others in objective.regression.teachers"
        )
    require_candidates(recipe)


def require_candidates(recipe: Recipe) -> None:
    """Check that the teachers can find and score the candidates that a term compares, before the corpus is embedded."""
    if recipe.candidates is None or not recipe.compares_candidates:
        return
    by, kinds = recipe.candidates.by, [kind_of(teacher) for teacher in recipe.teachers.encoders]
    with_vectors = [number for number, kind in enumerate(kinds) if kind.has_vectors]
    if live := [number for number in with_vectors if not kinds[number].uses_table(recipe.teachers.mode)]:
        raise UnsuitableTeacherError(
            f"objective.candidates needs the vectors of teacher {live[0]}, which has no table; write teachers.mode: table"
        )
    if by != "bm25" and not with_vectors:
        raise UnsuitableTeacherError(
            f"candidates.by is {by}, but no teacher has vectors to search with; write candidates.by: bm25, or add such a teacher"
        )
    if by != "teachers":
        import_bm25s()


def data_fingerprints(recipe: Recipe, corpus: Corpus, labelled: Tasks) -> dict[str, str]:
    """Fingerprint the corpus, the models, the dev set and the test sets, by name."""
    student = recipe.student
    fingerprints = {
        "corpus": corpus.fingerprint,
        "student": model_fingerprint(student.backbone, student.trust_remote_code),
    }
    for number, teacher in enumerate(recipe.teachers.encoders):
        fingerprints[f"teacher {number}"] = kind_of(teacher).source_fingerprint()
    if (detection := recipe.objective.active(DetectionSection)) is not None:
        fingerprints["generator"] = model_fingerprint(detection.generator)
    if (dev := read_dev(recipe)) is not None:
        fingerprints["dev set"] = dev.fingerprint
    return {**fingerprints, **labelled.fingerprints()}


def read_fingerprints(recipe: Recipe, reporter: Reporter) -> dict[str, str]:
    """Read the corpus (or take it from the cache) and the labeled sets, and fingerprint them and the models."""
    return data_fingerprints(recipe, read_corpus(recipe, reporter), labelled_tasks(recipe))
