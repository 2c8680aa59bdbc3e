"""A student's recipe, whole: its text, encoders, objective, training, measurements and places."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from distcse.errors import StorageError
from distcse.recipe.encoders import StudentSection, TeachersSection
from distcse.recipe.objective import ObjectiveSection
from distcse.recipe.section import Gpus, Name, Precision, Section
from distcse.recipe.track import LoggersSection
from distcse.recipe.training import TrainingSection
from distcse.storage import is_uri, resolve_path

Measure = Literal["sts", "transfer", "pairs", "ranking", "geometry", "retrieval", "agreement", "docstring_retrieval"]


class CorpusSection(Section):
    """Where the unlabelled sentences come from: exactly one of `path`, `dataset` and `docstrings`."""

    path: str | list[str] | None = None
    """File or files: .txt, .txt.gz, .jsonl, .jsonl.gz, .csv, .csv.gz, .parquet; one sentence a line or row."""
    dataset: str | None = None
    """A Hugging Face `datasets` name or local folder; the hub is asked only when it is not a folder."""
    dataset_config: str | None = None
    """The data set's configuration name, where it has several."""
    split: str = "train"
    """Split of `dataset`."""
    streaming: bool = False
    """Fetch the first `limit` rows of `dataset` and no more, instead of all its files. They are kept as any corpus is."""
    docstrings: list[str] | None = None
    """Names of installed packages whose documentation strings are the corpus (the quickstart's source)."""
    column: str = "text"
    """Column (.csv, .parquet, data set) or key (.jsonl) that holds the sentence."""
    domain: str | None = None
    """Column or key that names a row's domain, for teachers with weights by domain."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Keep the first so many sentences."""
    exclude_evaluation: bool = False
    """Leave out every sentence that occurs, but for case, punctuation and spacing, in a labelled set of `evaluation.data`."""

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
    """What the process that scores beside the training takes, on one of the nodes that may train."""

    cpus: Annotated[float, Field(gt=0)] = 1.0
    """CPUs of it."""
    gpus: Gpus | None = None
    """GPUs of it, or a fraction of one; null gives it none, and warns of it where its nodes have some."""


class EvaluationSection(Section):
    """What is measured during the run and at its end."""

    data: str | None = None
    """Folder with labelled sets: `sts/stsb/dev.tsv.gz`, `sts/sts12/test.tsv.gz` and so on."""
    dev: Literal["auto", "stsb", "agreement", "none"] = "auto"
    """Score that picks the best checkpoint: STS-B dev Spearman, agreement with the teachers on held-out rows, or none: the
    last one is taken. `auto` is `stsb` where `data` is given, else `agreement` where there are teachers."""
    dev_is_test: bool = False
    """The dev set is a test set, and that is meant: figures on it are then chosen by it, and no measurement."""
    num_heldout: Annotated[int, Field(ge=0)] = 512
    """Rows of the corpus that are never trained on and that `agreement` is measured on."""
    eval_steps: Annotated[int, Field(ge=1)] = 125
    """Steps between two dev scores; each is also a checkpoint."""
    async_eval: AsyncEvalSection | None = None
    """Dev scores are made by a process beside the workers, which go on meanwhile; `{}` takes a CPU for it. A score is known one
    checkpoint later at the latest, and so early stopping stops one later. null scores in the workers, as trials of a sweep do."""
    precision: Precision = "auto"
    """Arithmetic of dev scores and of the final evaluation. `auto` is bf16 where the devices that score have fast bf16 units,
    else fp32; the report names it."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop after so many dev scores without a new best; null never stops early."""
    final_suites: list[Measure] | Literal["with_transfer"] | None = None
    """Measured at the end for start, student and teachers; null takes `sts`, `ranking`, `geometry` and `retrieval` where
    `data` is given, else `agreement`. `with_transfer` adds `transfer` to these where `data` is given: minutes per model
    ([how many](../how-to/evaluate.md#in-a-training-run))."""
    transfer: Literal["strict", "fast"] = "strict"
    """How the transfer tasks are fitted: as SentEval does, or by scikit-learn."""


class StorageSection(Section):
    """Where things are kept: folders, on a cluster of several nodes on storage that all nodes share; or object storage,
    `s3://BUCKET/PREFIX` and `gs://BUCKET/PREFIX`, which every node reaches ([how](../how-to/storage.md))."""

    runs: str = "runs"
    """Folder of run directories; each run makes one of its own."""
    cache: str = "~/.cache/distcse"
    """Tokenised corpora and teachers' tables, shared by all runs; DISTCSE_CACHE overrides the default."""

    @field_validator("runs", "cache")
    @classmethod
    def _is_a_folder_or_an_address(cls, name: str) -> str:
        """What is refused is not repeated: it may hold a key."""
        try:
            if is_uri(name):
                resolve_path(name)
        except StorageError as refused:
            raise ValueError(str(refused)) from None
        return name.rstrip("/") if is_uri(name) else name


class Recipe(Section):
    """One run, whole: what is read, who teaches, who learns, by which objective, how long, and where it is kept."""

    name: Name = "run"
    """Name of the run directory."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 42
    """Seed of sampling, dropout and fresh weights."""
    corpus: CorpusSection = CorpusSection()
    """The unlabelled text."""
    student: StudentSection
    """The encoder that learns."""
    teachers: TeachersSection = TeachersSection()
    """The frozen encoders that teach."""
    objective: ObjectiveSection = ObjectiveSection()
    """What is minimised."""
    training: TrainingSection = TrainingSection()
    """How it is minimised."""
    evaluation: EvaluationSection = EvaluationSection()
    """What is measured."""
    storage: StorageSection = StorageSection()
    """Where results and tables live."""
    loggers: LoggersSection = LoggersSection()
    """Who else is told of the run."""

    @property
    def dev_score(self) -> Literal["stsb", "agreement", "none"]:
        """What `evaluation.dev` comes to."""
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
        hindrances = {
            "objective.detection: null": terms.detection is not None and terms.detection.weight,
            "objective.rank.queue: null": terms.memory is not None,
            "objective.custom: {}": bool(terms.custom),  # their Python would run once, and never again
            "student.trust_remote_code: false": self.student.trust_remote_code,
        }
        if self.training.cuda_graphs and (wanted := [told for told, hinders in hindrances.items() if hinders]):
            raise ValueError(
                "training.cuda_graphs records steps that do the same work in the same memory every time; "
                f"write {', '.join(wanted)}, or training.cuda_graphs: false"
            )
        return self

    @model_validator(mode="after")
    def _start_can_be_mixed_in(self) -> Recipe:
        if self.student.init_weight_mix and self.training.zero_stage == 3:
            raise ValueError(
                "student.init_weight_mix is mixed into whole weights, which no worker holds under ZeRO 3; "
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
