"""The recipe of one student: corpus, encoders, objective, training, evaluation and storage."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from distcse.errors import StorageError
from distcse.recipe.encoders import StudentSection, TeachersSection
from distcse.recipe.loggers import LoggersSection
from distcse.recipe.objective import ObjectiveSection
from distcse.recipe.section import Gpus, Name, Precision, Section
from distcse.recipe.training import TrainingSection
from distcse.storage import is_uri, resolve_path

Measure = Literal["sts", "transfer", "pairs", "ranking", "geometry", "retrieval", "agreement", "docstring_retrieval"]


class CorpusSection(Section):
    """The unlabelled sentences: exactly one of `path`, `dataset` and `docstrings`."""

    path: str | list[str] | None = None
    """File or list of files: .txt, .txt.gz, .jsonl, .jsonl.gz, .csv, .csv.gz or .parquet, with one sentence per line or row."""
    dataset: str | None = None
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
    exclude_evaluation: bool = False
    """Drop sentences that occur in a labelled set of `evaluation.data`, ignoring case, punctuation and spacing."""

    @model_validator(mode="after")
    def _one_source(self) -> CorpusSection:
        given = [key for key in ("path", "dataset", "docstrings") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"gives {' and '.join(given)}, but a corpus has one source; keep one of them")
        if self.streaming and (self.dataset is None or self.limit is None):
            raise ValueError("streaming fetches the first rows of a data set; write dataset: NAME and limit: N")
        if self.domain is not None and self.docstrings is not None:
            raise ValueError("domain names a column, and docstrings have none; leave it null")
        return self


class AsyncEvalSection(Section):
    """Resources of the process that computes dev scores during training, on one of the nodes that may train."""

    cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPUs of the process."""
    gpus: Gpus | None = None
    """GPUs of the process, or a fraction of one; null assigns none, with a warning where its nodes have GPUs."""


class EvaluationSection(Section):
    """Evaluation during training and at its end."""

    data: str | None = None
    """Folder of labelled sets: `sts/stsb/dev.tsv.gz`, `sts/sts12/test.tsv.gz` and so on."""
    dev: Literal["auto", "stsb", "agreement", "none"] = "auto"
    """Score that selects the best checkpoint: Spearman correlation on STS-B dev, agreement with the teachers on held-out
    rows, or `none`, which takes the last checkpoint. `auto` is `stsb` where `data` is set, else `agreement` where there are
    teachers, else `none`."""
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
    transfer: Literal["strict", "fast"] = "strict"
    """Classifier of the transfer tasks: `strict` fits it as SentEval does, `fast` with scikit-learn."""


class StorageSection(Section):
    """Where runs and caches are stored ([how](../how-to/storage.md)).

    A folder (on a cluster of several nodes: shared storage), or object storage: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`.
    """

    runs: str = "runs"
    """Folder of run directories; each run creates a new one."""
    cache: str = "~/.cache/distcse"
    """Folder of tokenised corpora and teacher tables, shared by all runs. DISTCSE_CACHE overrides the default."""

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


class Recipe(Section):
    """One training run of a student."""

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
    evaluation: EvaluationSection = EvaluationSection()
    """Dev scores and final evaluation."""
    storage: StorageSection = StorageSection()
    """Where runs and caches are stored."""
    loggers: LoggersSection = LoggersSection()
    """Experiment trackers."""

    @property
    def dev_score(self) -> Literal["stsb", "agreement", "none"]:
        """`evaluation.dev` with `auto` resolved."""
        if self.evaluation.dev != "auto":
            return self.evaluation.dev
        if self.evaluation.data is not None:
            return "stsb"
        return "agreement" if self.teachers.encoders else "none"

    @model_validator(mode="after")
    def _terms_have_what_they_need(self) -> Recipe:
        terms = self.objective
        for name in ("rank", "rank_regression"):
            if getattr(terms, name) is not None and not self.teachers.encoders:
                raise ValueError(
                    f"objective.{name} needs teachers; add teachers.encoders, or write objective.{name}: null"
                )
        between = (terms.info_nce, terms.rank_regression)
        if terms.combine == "hinge" and not all(term is not None and term.weight for term in between):
            raise ValueError(
                "objective.combine hinge is between info_nce and rank_regression; keep both, with weights above 0, or write sum"
            )
        if self.teachers.mode == "live" and any(teacher.similarity == "rank" for teacher in self.teachers.encoders):
            raise ValueError("a teacher in rank space serves from a table; write teachers.mode: table")
        if self.evaluation.eval_steps % self.training.gradient_accumulation:
            raise ValueError(
                f"evaluation.eval_steps is {self.evaluation.eval_steps}, which is no multiple of training.gradient_accumulation "
                f"{self.training.gradient_accumulation}; a checkpoint holds no half-summed gradient"
            )
        weights = (
            terms.info_nce and terms.info_nce.weight,
            terms.consistency and terms.consistency.beta,
            terms.rank and terms.rank.gamma,
            terms.rank_regression and terms.rank_regression.weight,
            terms.regression and terms.regression.weight,
            terms.detection and terms.detection.weight,
            *(own.weight for own in terms.custom.values()),
        )
        if not any(weights):
            raise ValueError(
                "objective has no term of weight above 0; keep one of "
                "info_nce, consistency, rank, rank_regression, regression, detection, own"
            )
        return self

    @model_validator(mode="after")
    def _teachers_are_there_for_what_asks_them(self) -> Recipe:
        terms, there = self.objective, len(self.teachers.encoders)
        asking = {
            "objective.regression": terms.regression,
            "objective.info_nce.false_negatives": terms.info_nce and terms.info_nce.false_negatives,
            "training.neighbor_batching": self.training.neighbor_batching,
        }
        for name, wants in asking.items():
            if wants is not None and not there:
                raise ValueError(f"{name} needs teachers; add teachers.encoders, or write {name}: null")
        lists = terms.rank is not None or bool(terms.custom)
        if self.teachers.disagreement_scale is not None and not (lists and there > 1):
            raise ValueError(
                "teachers.disagreement_scale weighs the pairs of lists on which several teachers disagree, and here is "
                f"{'one teacher' if lists else 'no objective.rank'}; write teachers.disagreement_scale: null"
            )
        if self.teachers.rank_noise_group is not None and not (lists or terms.rank_regression is not None):
            raise ValueError(
                "teachers.rank_noise_group is noise on lists, and no term learns from any; write teachers.rank_noise_group: null"
            )
        if terms.regression is None:
            return self
        chosen = terms.regression.teachers
        if chosen is not None and (not chosen or len(set(chosen)) < len(chosen) or max(chosen) >= there):
            raise ValueError(
                f"objective.regression.teachers is {chosen}; name some of the teachers 0 to {there - 1}, each once"
            )
        joined = self.teachers.encoders if chosen is None else [self.teachers.encoders[number] for number in chosen]
        if len(joined) > 1 and any(teacher.alpha_by_domain for teacher in joined):
            raise ValueError(
                "objective.regression joins teachers by their alphas, the same in all rows; take alpha_by_domain away, or name "
                "one teacher: objective.regression.teachers: [0]"
            )
        if silent := [
            name for teacher in joined for name, weight in (teacher.alpha_by_domain or {}).items() if not weight
        ]:
            raise ValueError(
                f"objective.regression learns a teacher's vectors in all rows, and its alpha_by_domain is 0 in {silent[0]}: "
                "weights by domain are of lists; name another teacher in objective.regression.teachers"
            )
        if self.student.projection != "none":
            raise ValueError(
                "objective.regression moves the vectors that are used, and nothing may stand between; "
                "write student.projection: none"
            )
        return self

    @model_validator(mode="after")
    def _memory_and_batch_meet_in_one_space(self) -> Recipe:
        rank = self.objective.rank
        if rank is not None and rank.queue is not None and self.student.projection == "batch_norm_mlp":
            raise ValueError(
                "objective.rank.queue holds vectors that no batch normalised; write student.projection: none or tanh_mlp"
            )
        return self

    @model_validator(mode="after")
    def _step_can_be_recorded(self) -> Recipe:
        terms = self.objective
        fixes = {
            "objective.detection: null": terms.detection is not None and terms.detection.weight,
            "objective.rank.queue: null": terms.memory is not None,
            "objective.custom: {}": bool(terms.custom),  # their Python would run once, and never again
            "student.trust_remote_code: false": self.student.trust_remote_code,
        }
        if self.training.cuda_graphs and (wanted := [fix for fix, is_needed in fixes.items() if is_needed]):
            raise ValueError(
                "training.cuda_graphs records steps that do the same work in the same memory every time; "
                f"write {', '.join(wanted)}, or training.cuda_graphs: false"
            )
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
        if self.evaluation.data is None and (self.dev_score == "stsb" or labelled):
            raise ValueError(
                f"{'evaluation.dev is stsb' if labelled is None else f'evaluation.final_suites has {labelled}'}, "
                "but evaluation.data is not set; write evaluation.data: FOLDER"
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
