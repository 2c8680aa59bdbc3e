"""The recipe of one student."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from pydantic import Field, model_validator

from distcse.recipe.base import BaseRecipe, RecipeInputs, register_recipe
from distcse.recipe.encoders import EncoderSection, StudentSection
from distcse.recipe.evaluation import EvaluationSection
from distcse.recipe.names import absolute, absolute_folder, absolute_path, is_path
from distcse.recipe.objective import HINGE_TERMS, ObjectiveSection
from distcse.recipe.section import Name, Seed, Seeds
from distcse.recipe.storage import LoggersSection, StorageSection
from distcse.recipe.teachers import TeachersSection
from distcse.recipe.text import CandidatesSection, CorpusSection
from distcse.recipe.training import ResourcesSection, TrainingSection, check_gpu_keys

_KEYS_OF_RAY = (
    *(f"teachers.{key}" for key in ("embedding_workers", "num_servers", "heartbeat_timeout_s", "node_labels")),
    *(f"training.{key}" for key in ("min_workers", "max_failures", "node_labels", "gpus_per_worker")),
)
"""Keys that only runs on Ray read."""
_KEYS_OF_TABLES = ("teachers.embedding_workers", "teachers.shard_rows")
"""Keys that only runs with embedding tables read."""


@register_recipe
class Recipe(BaseRecipe):
    """One training run of a student."""

    title: ClassVar[str] = "student's recipe"
    schema_name: ClassVar[str] = "recipe"
    summary: ClassVar[str] = (
        "`python -m distcse.train RECIPE`: one student learns from teachers' lists, from the text alone, or from both."
    )
    identifying_key: ClassVar[str] = "student"
    loop_keys: ClassVar[tuple[str, ...]] = ("training",)
    resumable_keys: ClassVar[tuple[str, ...]] = (
        "training.workers",
        "training.min_workers",
        "training.cpus_per_worker",
        "training.gpus_per_worker",
        "training.engine",
        "training.zero_stage",
        "training.deepspeed",
        "training.dropout_rng_streams",
        "training.grad_cache_chunk",
        "training.cuda_graphs",
        "training.compile_layers",
        "training.max_failures",
        "training.node_labels",
        "training.log_every",
        "teachers.embedding_workers",
        "teachers.gpus_per_actor",
        "teachers.num_servers",
        "teachers.serve",
        "teachers.node_labels",
        "teachers.prefetch_steps",
        "teachers.tokens_per_batch",
        "teachers.heartbeat_timeout_s",
        "evaluation.final_suites",
        "evaluation.rank_inference",
        "resources",
        "storage.cache",
        "loggers",
    )
    searchable_keys: ClassVar[tuple[str, ...]] = (
        "student",
        "teachers.encoders",
        "objective",
        "training",
    )

    name: Name = "run"
    """Name of the run directory."""
    seed: Seed = 42
    """Seed of sampling, dropout and newly initialized weights."""
    seeds: Seeds = Field(default_factory=list)
    """One run per seed, in place of `seed`; the report gives mean ± standard deviation."""
    corpus: CorpusSection = CorpusSection()
    """Unlabeled training text."""
    student: StudentSection
    """The encoder to train."""
    teachers: TeachersSection = TeachersSection()
    """Frozen teacher encoders."""
    candidates: CandidatesSection | None = None
    """Documents that `objective.candidates` compares for each query; null finds none."""
    objective: ObjectiveSection = ObjectiveSection()
    """Loss terms and their weights."""
    training: TrainingSection = TrainingSection()
    """Training loop and workers."""
    evaluation: EvaluationSection = EvaluationSection()
    """Dev scores and final evaluation."""
    resources: ResourcesSection = ResourcesSection()
    """Resources that the run may use."""
    storage: StorageSection = StorageSection()
    """Where runs and caches are stored."""
    loggers: LoggersSection = LoggersSection()
    """Experiment trackers."""

    @property
    def has_queries(self) -> bool:
        """Whether the student learns to search: a source of the corpus has queries."""
        return any(source.role == "query" for source in self.corpus.sources)

    @property
    def compares_candidates(self) -> bool:
        """Whether a term of weight above 0 compares each query's candidates."""
        return bool(self.objective.keys_that_need("candidates", active=True))

    @property
    def dev_score(self) -> str:
        """`evaluation.dev` with `auto` resolved."""
        if self.evaluation.dev != "auto":
            return self.evaluation.dev
        if self.evaluation.data is not None and not self.has_queries:
            return "stsb"
        return "agreement" if self.teachers.encoders else "none"

    @property
    def unread_keys(self) -> Mapping[str, str]:
        unread: dict[str, str] = {}
        if not self.uses_ray:
            unread |= dict.fromkeys(_KEYS_OF_RAY, "training.workers is 0")
        if not self.teachers.encoders:
            others = [key for key in type(self.teachers).model_fields if key != "encoders"]
            unread |= {f"teachers.{key}": "there are no teachers" for key in others}
        elif self.teachers.mode == "live":
            unread |= dict.fromkeys(_KEYS_OF_TABLES, "teachers.mode is live")
        if self.candidates is not None and not self.objective.keys_that_need("candidates"):
            unread["candidates"] = "objective.candidates is null"
        if self.compares_candidates:
            weights = [f"corpus.sources.{number}.weight" for number in range(len(self.corpus.sources))]
            unread |= dict.fromkeys(weights, "objective.candidates uses each query once per epoch")
        if self.evaluation.data is None:
            keys = ["evaluation.dev_is_test", *([] if is_path(self.dev_score) else ["corpus.exclude_evaluation"])]
            unread |= dict.fromkeys(keys, "evaluation.data is null")
        return unread

    @property
    def uses_ray(self) -> bool:
        return self.training.workers > 0

    @property
    def inputs(self) -> RecipeInputs:
        encoders = [self.student, *(EncoderSection(backbone=model) for model in self.objective.models)]
        evaluation = self.evaluation
        suites = evaluation.final_suites if isinstance(evaluation.final_suites, list) else []
        uses = {
            f"evaluation.dev is {self.dev_score}": self.dev_score not in ("agreement", "none")
            and not is_path(self.dev_score),
            "corpus.exclude_evaluation is true": self.corpus.exclude_evaluation and not is_path(self.dev_score),
            "evaluation.rank_inference is set": evaluation.rank_inference is not None,
            **{f"evaluation.final_suites has {name}": name != "agreement" for name in suites},
        }
        return RecipeInputs(
            encoders,
            self.teachers.encoders,
            corpus=self.corpus,
            labelled=evaluation.data,
            labelled_for=next((use for use, needs_data in uses.items() if needs_data), None),
        )

    def with_absolute_paths(self) -> Self:
        student = self.student
        teachers = [
            teacher.model_copy(update={"backbone": absolute_folder(teacher.backbone)})
            if teacher.loads_model
            else teacher
            for teacher in self.teachers.encoders
        ]
        return self.model_copy(
            update={
                "corpus": self.corpus.with_absolute_paths(),
                "storage": self.storage.with_absolute_paths(),
                "evaluation": self.evaluation.model_copy(
                    update={"data": absolute(self.evaluation.data), "dev": absolute_path(self.evaluation.dev)}
                ),
                "objective": self.objective.with_absolute_paths(),
                "student": student.model_copy(update={"backbone": absolute_folder(student.backbone)}),
                "teachers": self.teachers.model_copy(update={"encoders": teachers}),
            }
        )

    @model_validator(mode="after")
    def _terms_have_what_they_need(self) -> Recipe:
        terms = self.objective
        if keys := terms.keys_that_need("candidates"):
            self._candidates_fit(keys[0])
        for key in terms.keys_that_need("lists", "vectors", "candidates"):
            if not self.teachers.encoders:
                raise ValueError(f"{key} needs teachers; add teachers.encoders, or write {key}: null")
        if terms.combine == "hinge" and not terms.active_terms.keys() >= {*HINGE_TERMS}:
            raise ValueError(
                f"objective.combine hinge is between {' and '.join(HINGE_TERMS)}; keep both, with weights above 0, or write sum"
            )
        if self.teachers.mode == "live" and any(teacher.similarity == "rank" for teacher in self.teachers.encoders):
            raise ValueError("a teacher in rank space serves from a table; write teachers.mode: table")
        if self.evaluation.eval_steps % self.training.gradient_accumulation:
            raise ValueError(
                f"evaluation.eval_steps is {self.evaluation.eval_steps}, which is no multiple of training.gradient_accumulation "
                f"{self.training.gradient_accumulation}; a checkpoint holds no half-summed gradient"
            )
        if not terms.active_terms:
            allowed = ", ".join(key for key in type(terms).model_fields if key not in ("tau1", "combine"))
            raise ValueError(f"objective has no term of weight above 0; keep one of {allowed}")
        return self

    def _candidates_fit(self, key: str) -> None:
        if self.candidates is None:
            raise ValueError(f"{key} needs candidates; write candidates: {{}}, or {key}: null")
        if not self.has_queries:
            raise ValueError(
                f"{key} needs queries; write corpus.sources with role: query and role: document, or {key}: null"
            )
        rows = self.candidates.rows_per_query * max(1, self.training.workers)
        if self.training.batch_size % rows:
            raise ValueError(
                f"training.batch_size is {self.training.batch_size}, which is no multiple of {rows}: of each worker's queries "
                f"with {self.candidates.per_step} candidates (candidates.per_step)"
            )

    @model_validator(mode="after")
    def _regression_fits_teachers_and_student(self) -> Recipe:
        if self.objective.regression is None:
            if self.student.index_of is not None:
                raise ValueError(
                    "student.projection.to maps to a teacher's vectors, and no term learns them; write objective.regression: {}"
                )
            return self
        chosen, count = self.objective.regression.teachers, len(self.teachers.encoders)
        if chosen is not None and (not chosen or len(set(chosen)) < len(chosen) or max(chosen) >= count):
            raise ValueError(
                f"objective.regression.teachers is {chosen}; name some of the teachers 0 to {count - 1}, each once"
            )
        if (index_of := self.student.index_of) is not None:
            self._learns_the_index(index_of, self.objective.vector_teachers(count))
        elif self.student.projection != "none":
            raise ValueError(
                "objective.regression moves the vectors that are used, and nothing may stand between; "
                "write student.projection: none"
            )
        return self

    def _learns_the_index(self, index_of: int, learned: list[int]) -> None:
        if index_of >= len(self.teachers.encoders):
            raise ValueError(
                f"student.projection.to is {index_of}; name one of the teachers 0 to {len(self.teachers.encoders) - 1}"
            )
        if learned != [index_of]:
            raise ValueError(
                f"student.projection.to is {index_of}, but objective.regression learns vectors of the teachers {learned}; "
                f"write objective.regression.teachers: [{index_of}]"
            )
        if self.objective.projection_of is not None:
            raise ValueError(
                "student.projection.to maps up to one teacher's vectors, and objective.regression.projection joined vectors "
                "down; keep one of them"
            )

    @model_validator(mode="after")
    def _workers_can_import_classes(self) -> Recipe:
        terms = {f"objective.custom.{name}": term.class_path for name, term in self.objective.custom.items()}
        teachers = {f"teachers.encoders.{n}": teacher.class_path for n, teacher in enumerate(self.teachers.encoders)}
        for key, class_path in {**terms, **teachers}.items():
            if self.uses_ray and class_path is not None and class_path.startswith("__main__:"):
                raise ValueError(
                    f"{key}.class_path is {class_path}, a class of the running script or notebook, which Ray's workers cannot "
                    "import; write training.workers: 0, or move the class to a module"
                )
        return self

    @model_validator(mode="after")
    def _step_can_be_recorded(self) -> Recipe:
        if self.training.cuda_graphs == "on" and (fixes := self._terms_to_drop):
            raise ValueError(
                "training.cuda_graphs records steps that do the same work in the same memory every time; "
                f"write {', '.join(fixes)}, or training.cuda_graphs: off"
            )
        return self

    @property
    def changes_to_record(self) -> list[str]:
        """Changes of the recipe without which a step cannot be captured as a CUDA graph."""
        fixes = [*(f"training.{fix}" for fix in self.training.changes_to_record), *self._terms_to_drop]
        return list(dict.fromkeys(fixes))

    @property
    def _terms_to_drop(self) -> list[str]:
        fixes = []
        if self.objective.custom:
            fixes.append("objective.custom: {}")  # their Python would run once, and never again
        if self.student.trust_remote_code:
            fixes.append("student.trust_remote_code: false")
        return fixes

    @model_validator(mode="after")
    def _gpus_do_not_contradict(self) -> Recipe:
        gpus = {"training.gpus_per_worker": self.training.gpus_per_worker}
        if any(teacher.endpoint is None for teacher in self.teachers.encoders):
            gpus["teachers.gpus_per_actor"] = self.teachers.gpus_per_actor
        check_gpu_keys(self.resources.gpu, gpus)
        return self

    @model_validator(mode="after")
    def _start_can_be_mixed_in(self) -> Recipe:
        if self.student.init_weight_mix and self.training.zero_stage == 3:
            raise ValueError(
                "student.init_weight_mix is mixed into full weights, which no worker holds under ZeRO 3; "
                "write training.zero_stage: 2, or student.init_weight_mix: 0"
            )
        return self

    @model_validator(mode="after")
    def _scores_have_what_they_need(self) -> Recipe:
        final = self.evaluation.final_suites
        final = final if isinstance(final, list) else []
        can_agree = self.teachers.encoders and self.evaluation.num_heldout >= 3
        if (self.dev_score == "agreement" or "agreement" in final) and not can_agree:
            raise ValueError(
                "agreement needs teachers and evaluation.num_heldout of at least 3; "
                "or score on labeled data: evaluation.data: FOLDER (with sts/stsb/dev.tsv.gz)"
            )
        return self
