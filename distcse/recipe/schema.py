"""The recipe of one student: corpus, encoders, objective, training, evaluation and storage."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from distcse.errors import StorageError
from distcse.recipe.base import BaseRecipe, RecipeInputs, register_recipe
from distcse.recipe.byte_size import parse_bytes
from distcse.recipe.encoders import EncoderSection, StudentSection
from distcse.recipe.hub_names import HubName
from distcse.recipe.loggers import LoggersSection
from distcse.recipe.losses.loss_section import registered_losses
from distcse.recipe.models import ModelsSection
from distcse.recipe.objective import HINGE_TERMS, ObjectiveSection
from distcse.recipe.paths import absolute, absolute_folder, absolute_location, absolute_path, absolute_paths, is_path
from distcse.recipe.resources import ResourcesSection, check_gpu_keys
from distcse.recipe.section import Gpus, Name, Precision, Section
from distcse.recipe.teachers import TeachersSection
from distcse.recipe.training import TrainingSection
from distcse.storage import is_uri, resolve_path

Measure = Literal["sts", "transfer", "pairs", "ranking", "geometry", "retrieval", "agreement", "docstring_retrieval"]


class CorpusSection(Section):
    """The unlabelled sentences: exactly one of `path`, `dataset` and `docstrings`."""

    path: str | list[str] | None = None
    """File or list of files: .txt, .jsonl, .ndjson, .json (a list of objects), .csv or .tsv, each also compressed (.gz, .bz2,
    .xz, .zst), or .parquet, with one sentence per line or row."""
    dataset: HubName | None = None
    """Name of a Hugging Face data set, or a local folder. Only a name that is not a folder is looked up on the hub."""
    dataset_config: str | None = None
    """Configuration of `dataset`, for data sets that have several."""
    split: str = "train"
    """Split of `dataset`."""
    streaming: bool = False
    """Download only the first `limit` rows of `dataset` instead of all its files. They are cached like any corpus."""
    docstrings: list[str] | None = None
    """Names of installed packages whose docstrings are the corpus, as in the quickstart."""
    column: str = "text"
    """Column (.csv, .parquet, data set) or key (.jsonl) of the sentence."""
    domain: str | None = None
    """Column or key of a row's domain, for teachers with `alpha_by_domain`."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first N sentences; null uses all."""
    deduplicate: Literal["exact", "none"] = "none"
    """`exact` leaves out sentences that equal an earlier one, also one of another domain; `limit` counts them. `none` trains on
    them as often as they occur. Teachers embed them once either way."""
    exclude_evaluation: bool = False
    """Drop sentences that occur in a labelled set of `evaluation.data`, ignoring case, punctuation and spacing."""

    @property
    def unread_keys(self) -> Mapping[str, str]:
        of_data_sets = {} if self.dataset is not None else dict.fromkeys(("dataset_config", "split"), "dataset is null")
        return {**of_data_sets, **({"column": "docstrings have no columns"} if self.docstrings is not None else {})}

    @model_validator(mode="after")
    def _one_source(self) -> CorpusSection:
        given = [key for key in ("path", "dataset", "docstrings") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(
                f"gives {' and '.join(given)}, but a corpus has one source; "
                f"keep one, and set the others to null, such as {given[-1]}: null"
            )
        if self.streaming and (self.dataset is None or self.limit is None):
            raise ValueError("streaming fetches the first rows of a data set; write dataset: NAME and limit: N")
        if self.domain is not None and self.docstrings is not None:
            raise ValueError("domain names a column, and docstrings have none; leave it null")
        return self

    def with_absolute_paths(self) -> CorpusSection:
        """Return a copy with paths resolved against the current directory."""
        return self.model_copy(update={"path": absolute_paths(self.path), "dataset": absolute_folder(self.dataset)})


_DEV_SCORES = ("auto", "stsb", "sickr", "stsb_sickr", "agreement", "none")


class AsyncEvalSection(Section):
    """Resources of the process that computes dev scores during training, on one of the nodes that may train."""

    cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPUs of the process."""
    gpus: Gpus | None = None
    """GPUs of the process, or a fraction of one; null assigns a quarter of one, or less, where that fits next to the workers.
    A larger number is lowered to that, with a warning, if the workers would otherwise get no GPU."""


class RankInferenceSection(Section):
    """Ranks at inference: λ · ρ + (1 - λ) · cosine (RankEncoder Eq. 7)."""

    weight: Annotated[float, Field(ge=0, le=1)] = 0.1
    """λ, from 0 (cosine only) to 1 (ranks only)."""
    num_references: Annotated[int, Field(ge=2)] = 100_000
    """Corpus sentences that are ranked: the same as those of a rank-space teacher, and all of a smaller corpus."""
    normalize: bool = True
    """Rank the references by cosine; false ranks them by inner product, as the public code does at inference."""
    rank_method: Literal["sort", "histogram"] = "sort"
    """How references are ranked, as for teachers: `sort` is exact, `histogram` faster with tens of thousands on CPUs."""


class EvaluationSection(Section):
    """Evaluation during training and at its end."""

    data: str | None = None
    """Folder of labelled sets: `sts/stsb/dev.tsv.gz`, `sts/sts12/test.tsv.gz` and so on."""
    dev: str = "auto"
    """Score that selects the best checkpoint: Spearman correlation on STS-B dev (`stsb`), on SICK-R trial (`sickr`) or the
    mean of both (`stsb_sickr`, RankEncoder's), agreement with the teachers on held-out rows (`agreement`), a set of yours, or
    `none`, which takes the last checkpoint. `auto` is `stsb` where `data` is set, else `agreement` where there are teachers,
    else `none`. A set of yours is a path: a file of pairs (columns `sentence1`, `sentence2`, and `score` for Spearman's
    correlation or `label` for the area under the ROC curve) or of triplets (`anchor`, `positive`, `negative`: accuracy), or
    a folder with `queries`, `corpus` and `relevant` (NDCG@10)."""
    dev_is_test: bool = False
    """Allow a test set as the dev set. Checkpoints are then selected on it, so its scores are no measurement."""
    num_heldout: Annotated[int, Field(ge=0)] = 512
    """Rows of the corpus that are excluded from training; `agreement` is computed on them."""
    eval_steps: Annotated[int, Field(ge=1)] = 125
    """Steps between two dev scores. Each dev score also writes a checkpoint."""
    async_eval: AsyncEvalSection | None = None
    """Compute dev scores in a separate process while the workers continue; `{}` uses one CPU. A score arrives at most one
    checkpoint later, so early stopping stops one checkpoint later. null computes them in the workers, as trials of a sweep
    do."""
    precision: Precision = "auto"
    """Precision of dev scores and of the final evaluation. `auto` is bf16 where the evaluating devices have fast bf16 units,
    else fp32; the report names it."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop after this many dev scores without a new best; null disables early stopping."""
    final_suites: list[Measure] | Literal["with_transfer"] | None = None
    """Suites for the final evaluation of the initial model, the student and the teachers. null runs `sts`, `ranking`,
    `geometry` and `retrieval` where `data` is set, else `agreement`. `with_transfer` adds `transfer` where `data` is set,
    which takes minutes per model ([how many](../how-to/evaluate.md#in-a-training-run))."""
    rank_inference: RankInferenceSection | None = None
    """Also measure the student with ranks at inference, on the suites of pairs, and store it with its references as `ranker`
    in the run's folder; `{}` has RankEncoder's settings. null does not."""
    transfer: Literal["strict", "fast"] = "strict"
    """Classifier of the transfer tasks: `strict` fits it as SentEval does, `fast` with scikit-learn."""

    @field_validator("dev")
    @classmethod
    def _is_a_score_or_a_path(cls, name: str) -> str:
        if name not in _DEV_SCORES and not is_path(name):
            raise ValueError(
                f"{name!r} is no dev score; allowed: {', '.join(_DEV_SCORES)}, or the path of a set of yours, such as "
                f"./{name or 'dev'}.tsv"
            )
        return name


class StorageSection(Section):
    """Where runs and caches are stored ([how](../how-to/storage.md)).

    A folder (on a cluster of several nodes: shared storage), or object storage: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`.
    """

    runs: str = "runs"
    """Folder of run directories; each run creates a new one."""
    run_id: Name | None = None
    """Name of the run's directory. The same command begins the run, and resumes it once it has begun; null names every run by
    recipe and time."""
    cache: str = "~/.cache/distcse"
    """Folder of tokenised corpora and teacher tables, shared by all runs. DISTCSE_CACHE overrides the default."""
    local_budget: str | None = None
    """Size of the teachers' tables that each node may copy from object storage, such as `200GiB`. A table that does not fit is
    read row by row where it is stored, in a folder too: many rows at the same time, ahead of the step. null has no limit."""

    @field_validator("runs", "cache")
    @classmethod
    def _is_a_folder_or_an_address(cls, name: str) -> str:
        """Check an address of object storage. The error does not repeat the value, which may hold a key."""
        try:
            if is_uri(name):
                resolve_path(name)
        except StorageError as refused:
            raise ValueError(str(refused)) from None
        return name.rstrip("/") if is_uri(name) else name

    @field_validator("local_budget")
    @classmethod
    def _is_a_size(cls, text: str | None) -> str | None:
        if text is not None:
            parse_bytes(text)
        return text

    @property
    def local_budget_bytes(self) -> int | None:
        """`local_budget` in bytes."""
        return None if self.local_budget is None else parse_bytes(self.local_budget)

    def with_absolute_paths(self) -> StorageSection:
        """Return a copy with paths resolved against the current directory, and the cache that DISTCSE_CACHE selects."""
        cache = self.cache if "cache" in self.model_fields_set else os.environ.get("DISTCSE_CACHE", self.cache)
        return self.model_copy(update={"runs": absolute_location(self.runs), "cache": absolute_location(cache)})


_KEYS_OF_RAY = (
    *(f"teachers.{key}" for key in ("embedding_workers", "num_servers", "heartbeat_timeout_s", "node_labels")),
    *(f"training.{key}" for key in ("min_workers", "max_failures", "node_labels", "gpus_per_worker")),
)
"""Keys that only runs on Ray read."""
_KEYS_OF_TABLES = ("teachers.embedding_workers", "teachers.shard_rows", "storage.local_budget")
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
        "storage.local_budget",
        "loggers",
    )
    searchable_keys: ClassVar[tuple[str, ...]] = (
        "student",
        "teachers.encoders",
        "teachers.rank_noise_group",
        "teachers.disagreement_scale",
        "objective",
        "training",
    )

    name: Name = "run"
    """Name of the run directory."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 42
    """Seed of sampling, dropout and newly initialised weights."""
    corpus: CorpusSection = CorpusSection()
    """Unlabelled training text."""
    student: StudentSection
    """The encoder to train."""
    teachers: TeachersSection = TeachersSection()
    """Frozen teacher encoders."""
    objective: ObjectiveSection = ObjectiveSection()
    """Loss terms and their weights."""
    training: TrainingSection = TrainingSection()
    """Training loop and workers."""
    models: ModelsSection = ModelsSection()
    """How all models are computed."""
    evaluation: EvaluationSection = EvaluationSection()
    """Dev scores and final evaluation."""
    resources: ResourcesSection = ResourcesSection()
    """Resources that the run may use."""
    storage: StorageSection = StorageSection()
    """Where runs and caches are stored."""
    loggers: LoggersSection = LoggersSection()
    """Experiment trackers."""

    @property
    def dev_score(self) -> str:
        """`evaluation.dev` with `auto` resolved."""
        if self.evaluation.dev != "auto":
            return self.evaluation.dev
        if self.evaluation.data is not None:
            return "stsb"
        return "agreement" if self.teachers.encoders else "none"

    @property
    def unread_keys(self) -> Mapping[str, str]:
        unread: dict[str, str] = {}
        if not self.uses_ray:
            unread |= dict.fromkeys(_KEYS_OF_RAY, "training.workers is 0")
        if not self.teachers.encoders:
            keys = type(self.teachers).model_fields
            unread |= {f"teachers.{key}": "there are no teachers" for key in keys if key != "encoders"}
            unread["storage.local_budget"] = "there are no teachers"
        elif self.teachers.mode == "live":
            unread |= dict.fromkeys(_KEYS_OF_TABLES, "teachers.mode is live")
        if self.evaluation.data is None:
            unread |= dict.fromkeys(("corpus.exclude_evaluation", "evaluation.dev_is_test"), "evaluation.data is null")
        if self.dev_score == "none":
            unread["evaluation.async_eval"] = "there is no dev score (evaluation.dev)"
        return unread

    @property
    def uses_ray(self) -> bool:
        return self.training.workers > 0

    @property
    def inputs(self) -> RecipeInputs:
        encoders = [self.student, *(EncoderSection(backbone=model) for model in self.objective.models)]
        return RecipeInputs(encoders, self.teachers.encoders, corpus=self.corpus, labelled=self.evaluation.data)

    def with_absolute_paths(self) -> Self:
        student = self.student
        teachers = [
            teacher.model_copy(update={"backbone": absolute_folder(teacher.backbone)})
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
        for key in terms.keys_that_need("lists", "clean_lists", "vectors"):
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
            allowed = ", ".join([*(loss.key for loss in registered_losses()), "custom"])
            raise ValueError(f"objective has no term of weight above 0; keep one of {allowed}")
        return self

    @model_validator(mode="after")
    def _teachers_are_there_for_what_asks_them(self) -> Recipe:
        terms, there = self.objective, len(self.teachers.encoders)
        if self.training.neighbor_batching is not None and not there:
            raise ValueError(
                "training.neighbor_batching needs teachers; add teachers.encoders, or write training.neighbor_batching: null"
            )
        # A custom term may learn from lists: its class is not imported here.
        weighs_pairs = bool(terms.keys_that_need("pair_weights") or terms.custom)
        if self.teachers.disagreement_scale is not None and not (weighs_pairs and there > 1):
            raise ValueError(
                "teachers.disagreement_scale weighs the pairs of lists on which several teachers disagree, and here is "
                f"{'one teacher' if weighs_pairs else 'no objective.rank'}; write teachers.disagreement_scale: null"
            )
        if self.teachers.rank_noise_group is not None and not (terms.keys_that_need("lists") or terms.custom):
            raise ValueError(
                "teachers.rank_noise_group is noise on lists, and no term learns from any; write teachers.rank_noise_group: null"
            )
        if self.teachers.serve == "worker" and not (terms.keys_that_need("lists", "clean_lists") or terms.custom):
            raise ValueError(
                "teachers.serve: worker computes lists in the workers, and no term learns from any; write teachers.serve: auto"
            )
        for section in terms.terms.values():
            section.check_recipe(self)
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
        return [*(f"training.{fix}" for fix in self.training.changes_to_record), *self._terms_to_drop]

    @property
    def _terms_to_drop(self) -> list[str]:
        terms = self.objective
        fixes = [f"{key}: null" for key in terms.keys_that_need("queue", active=True)]
        if terms.custom:
            fixes.append("objective.custom: {}")  # their Python would run once, and never again
        if self.student.trust_remote_code:
            fixes.append("student.trust_remote_code: false")
        return fixes

    @model_validator(mode="after")
    def _gpus_do_not_contradict(self) -> Recipe:
        evaluator = self.evaluation.async_eval
        gpus = {
            "training.gpus_per_worker": self.training.gpus_per_worker,
            "evaluation.async_eval.gpus": evaluator.gpus if evaluator is not None else None,
        }
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
        if self.corpus.exclude_evaluation and self.evaluation.data is None:
            raise ValueError(
                "corpus.exclude_evaluation leaves out the sentences of labelled sets; write evaluation.data: FOLDER"
            )
        if self.evaluation.async_eval is not None and not self.training.workers:
            raise ValueError(
                "evaluation.async_eval starts a process of Ray's, and training.workers is 0, which wants none; write "
                "training.workers: 1, or evaluation.async_eval: null"
            )
        final = self.evaluation.final_suites
        final = final if isinstance(final, list) else []
        labelled = next((name for name in final if name not in ("agreement", "docstring_retrieval")), None)
        is_published = self.dev_score not in ("agreement", "none") and not is_path(self.dev_score)
        if self.evaluation.data is None and (is_published or labelled):
            key = (
                f"evaluation.dev is {self.dev_score}" if labelled is None else f"evaluation.final_suites has {labelled}"
            )
            raise ValueError(f"{key}, but evaluation.data is not set; write evaluation.data: FOLDER")
        if self.evaluation.rank_inference is not None and self.evaluation.data is None:
            raise ValueError(
                "evaluation.rank_inference is measured on labelled pairs, but evaluation.data is not set; write evaluation.data: "
                "FOLDER"
            )
        can_agree = self.teachers.encoders and self.evaluation.num_heldout >= 3
        if (self.dev_score == "agreement" or "agreement" in final) and not can_agree:
            raise ValueError(
                "agreement needs teachers and evaluation.num_heldout of at least 3; "
                "or score on labelled data: evaluation.data: FOLDER (with sts/stsb/dev.tsv.gz)"
            )
        if self.dev_score == "none" and self.evaluation.patience is not None:
            raise ValueError(
                "evaluation.patience needs a dev score; set evaluation.data: FOLDER, or write evaluation.patience: null"
            )
        if "docstring_retrieval" in final and self.corpus.docstrings is None:
            raise ValueError("evaluation.final_suites has docstring_retrieval, which needs corpus.docstrings")
        return self
