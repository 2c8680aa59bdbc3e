"""Every knob of a run, typed and bounded. The defaults are those of RankCSE's common setting (paper, Table 9 and App. A)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Measure = Literal["sts", "transfer", "pairs", "ranking", "geometry", "retrieval", "agreement", "docstring_retrieval"]
Pooling = Literal["cls", "mean", "max", "last_token", "first_last_avg", "last_two_avg", "mask"]
Projection = Literal["tanh_mlp", "batch_norm_mlp", "none"]
Precision = Literal["fp32", "bf16"]
Temperature = Annotated[float, Field(gt=0, le=10)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
Weight = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A part of a recipe: no unknown keys, no silent conversion, no change after validation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True)


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
    docstrings: list[str] | None = None
    """Names of installed packages whose documentation strings are the corpus (the quickstart's source)."""
    column: str = "text"
    """Column (.csv, .parquet, data set) or key (.jsonl) that holds the sentence."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Keep the first so many sentences."""

    @model_validator(mode="after")
    def _one_source(self) -> CorpusSection:
        given = [key for key in ("path", "dataset", "docstrings") if getattr(self, key) is not None]
        if len(given) > 1:
            raise ValueError(f"gives {' and '.join(given)}, but a corpus has one source; keep one of them")
        return self


class EncoderSection(Section):
    """An encoder to load: a backbone and how its token vectors become one vector."""

    backbone: str
    """Folder, hub id, or `package:NAME/FOLDER` for a model inside an installed Python package."""
    pooling: Pooling | None = None
    """How token vectors become one vector; null reads it from the folder (sentence-transformers layout)."""
    max_length: Annotated[int, Field(ge=4, le=8192)] | None = None
    """Tokens kept of a sentence, special tokens included; null reads it from the folder."""
    prompt: str = ""
    """Text put before every sentence, or a template with `{sentence}` in it."""
    trust_remote_code: bool = False
    """Let the folder's own Python code run. Only for models you have read."""


class TrainedSection(EncoderSection):
    """An encoder that learns and is saved."""

    pooling: Pooling | None = "cls"
    """Its pooling; it is saved with the model."""
    max_length: Annotated[int, Field(ge=4, le=8192)] | None = 32
    """Tokens kept of a sentence in training and in the saved model."""
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    """Indices of the backbone's layers to keep, ascending: [0, 2, 4] makes a three-layer student."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of the backbone in training; null keeps the backbone's own."""

    @model_validator(mode="after")
    def _can_be_saved(self) -> Self:
        if self.pooling == "mask" or "{sentence}" in self.prompt:
            raise ValueError(
                "pooling mask and templates are for teachers: the saved model's layout has no place for them; "
                "write another pooling, or a prompt without {sentence}"
            )
        return self

    @model_validator(mode="after")
    def _layers_ascend(self) -> Self:
        if self.layers is not None and (not self.layers or sorted(set(self.layers)) != self.layers):
            raise ValueError(f"layers must be ascending and distinct, such as [0, 2, 4]; got {self.layers}")
        return self


class StudentSection(TrainedSection):
    """The encoder that learns from lists."""

    projection: Projection = "tanh_mlp"
    """Head between the pooled vector and the objective. In training only; never saved."""


class EndpointSection(Section):
    """An OpenAI-compatible embeddings endpoint."""

    url: Annotated[str, Field(pattern=r"^https?://.*[^/]$")]
    """Its base, such as http://host:8080/v1; `/embeddings` is asked. The teacher's `backbone` is the model's name there."""
    key_variable: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, where one is needed; the key itself is in no recipe."""
    batch: Annotated[int, Field(ge=1)] = 64
    """Sentences of one request."""
    connections: Annotated[int, Field(ge=1)] = 4
    """Requests under way at a time."""
    timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to wait for an answer."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Attempts after a lost connection or an answer such as 429 or 503, the pause doubling from half a second."""


class TeacherSection(EncoderSection):
    """One frozen teacher: an encoder, a cross-encoder (its folder says so), or an endpoint."""

    endpoint: EndpointSection | None = None
    """Where the teacher is asked over HTTP instead of being loaded."""

    alpha: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this teacher's cosines. Weights are divided by their sum: 1 and 2 are the paper's α = 1/3 and 1 − α (Eq. 6)."""
    space: Literal["cosine", "rank"] = "cosine"
    """What a list holds: cosines, or rank-space similarities (RankEncoder Eq. 4) among `references` sentences."""
    references: Annotated[int, Field(ge=2)] = 100_000
    """Sentences of the corpus, drawn by the seed, that a rank-space teacher orders; all of a smaller corpus."""
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Arithmetic of the frozen forward pass. bf16 moves cosines by up to 4e-3; tables are stored in fp16 either way."""


class TeachersSection(Section):
    """The frozen teachers and the actors that host them."""

    encoders: list[TeacherSection] = Field(default_factory=list)
    """The teachers; none leaves the rank term without lists."""
    mode: Literal["auto", "table", "live"] = "auto"
    """`table` embeds the corpus once and serves lists from disk; `live` runs the teacher for every list; `auto` is
    `table` wherever the rows are fixed. A cross-encoder has no vectors and always runs live."""
    builders: Annotated[int, Field(ge=1)] | None = None
    """Actors that embed the corpus side by side; null takes one for every CPU (or GPU) of the cluster."""
    builder_gpus: Annotated[float, Field(ge=0)] = 0
    """GPUs, or a fraction of one, for each embedding actor and each live server."""
    servers: Annotated[int, Field(ge=1)] = 1
    """List servers of each teacher; workers share them evenly."""
    block_steps: Annotated[int, Field(ge=1, le=1024)] = 32
    """Steps whose lists travel as one object; the next block is always asked for ahead."""
    shard_rows: Annotated[int, Field(ge=1)] = 8192
    """Rows of one table shard: what is lost at most when a builder is killed."""
    shuffle_groups: Annotated[int, Field(ge=2)] | None = None
    """Noise: so many neighbours in a list's order change places at random in every step (DistillCSE's Group-P)."""
    tokens_per_batch: Annotated[int, Field(ge=64)] = 4096
    """Tokens in one frozen forward pass."""


class InfoNCESection(Section):
    """InfoNCE over the global batch, one direction (SimCSE Eq. 1; RankCSE §4)."""

    weight: Weight = 1.0
    """Weight of the term in the sum."""


class ConsistencySection(Section):
    """Consistency of the two views' lists (RankCSE Eq. 2)."""

    beta: Weight = 1.0
    """Weight β of the term in the sum."""
    form: Literal["js", "neg_entropy"] = "js"
    """`js` is the paper's Jensen–Shannon divergence; `neg_entropy` is what the public code computes."""


class RankSection(Section):
    """Ranking distillation from the teachers' lists (RankCSE Eq. 4 and 5)."""

    form: Literal["list_net", "list_mle"] = "list_net"
    """ListNet matches the top-one distribution; ListMLE maximises the likelihood of the teachers' order."""
    gamma: Weight = 1.0
    """Weight γ of the term in the sum."""
    tau2: Temperature = 0.05
    """Temperature of the student's list."""
    tau3: Temperature = 0.025
    """Temperature of the teachers' list (ListNet only)."""
    exclude_positive: bool | None = None
    """Leave the sentence itself out of its list; null is the paper's choice: yes for ListNet, no for ListMLE."""
    list_reduction: Literal["sum", "mean"] = "sum"
    """ListMLE's reduction over a list; `mean` divides by the list's length."""
    eps: Annotated[float, Field(gt=0, le=1e-3)] | None = None
    """ListMLE: null is exact; 1e-10 or 1e-7 adds the public codes' constant inside the logarithm."""


class RankRegressionSection(Section):
    """The student's cosines shall be the teachers' rank-space similarities (RankEncoder Eq. 6)."""

    weight: Weight = 0.05
    """Weight λ of the term."""
    lower: Annotated[float, Field(ge=-2, le=2)] = 0.5
    """τl: pairs less similar than this are left out."""
    upper: Annotated[float, Field(ge=-2, le=2)] = 0.8
    """τu: pairs more similar than this are left out; 0.9999 drops the sentence itself alone."""
    student_similarity: Literal["cross_view", "same_view"] = "cross_view"
    """Cosine of a pair's different views, as the public code has it, or of its first views."""

    @model_validator(mode="after")
    def _is_a_range(self) -> RankRegressionSection:
        if self.lower >= self.upper:
            raise ValueError(f"lower is {self.lower} and upper {self.upper}; no pair lies between them")
        return self


class DetectionSection(Section):
    """Replaced token detection, conditioned on the sentence's vector (DiffCSE §3)."""

    weight: Weight = 0.005
    """Weight λ of the term."""
    generator: str | None = None
    """Folder or hub id of a masked language model with the student's vocabulary; `deletion` needs none."""
    operation: Literal["replacement", "insertion", "deletion"] = "replacement"
    """What is done to the sentence (DiffCSE Table 4)."""
    masking_ratio: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of tokens that are masked, inserted or deleted; each view has its own."""
    replace: Literal["all_positions", "masked_only"] = "all_positions"
    """The generator's choice counts everywhere, as in the public code, or at masked positions alone."""
    reduction: Literal["all", "nonpad"] = "all"
    """The mean is over all positions, padding too, as in the public code, to which λ is tuned; or over tokens."""
    condition: Literal["projected", "pooled"] = "projected"
    """The vector that the discriminator is told: behind the projection, or before it."""
    generator_dropout: bool = True
    """Dropout in the frozen generator, as the public code has it."""

    @model_validator(mode="after")
    def _has_a_generator(self) -> DetectionSection:
        if self.generator is None and self.operation != "deletion":
            raise ValueError(f"operation {self.operation} needs a generator; write generator: FOLDER or a hub id")
        return self


class ObjectiveSection(Section):
    """The weighted sum of terms; a term set to null is left out."""

    tau1: Temperature = 0.05
    """Temperature of InfoNCE and of the consistency term."""
    info_nce: InfoNCESection | None = InfoNCESection()
    """The contrastive term."""
    consistency: ConsistencySection | None = ConsistencySection()
    """The consistency term."""
    rank: RankSection | None = RankSection()
    """The distillation term; needs teachers."""
    rank_regression: RankRegressionSection | None = None
    """RankEncoder's term; needs teachers, in rank space as the paper has them."""
    detection: DetectionSection | None = None
    """DiffCSE's term."""
    combine: Literal["sum", "hinge"] = "sum"
    """`sum` of all terms; `hinge` is max(InfoNCE, λ · rank regression) of the batch (RankEncoder Eq. 5), others added."""


class LoopSection(Section):
    """How weights are moved: batch, optimiser, schedule, engine."""

    batch_size: Annotated[int, Field(ge=2)] = 128
    """Sentences (or pairs) of a step over all workers: also the length of every list."""
    epochs: Annotated[float, Field(gt=0)] = 4
    """Passes over the corpus; a fraction is allowed."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Stop (and end the schedule) after so many steps, whatever `epochs` says."""
    lr: Annotated[float, Field(gt=0, le=1)] = 3e-5
    """Peak learning rate of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of all steps in which the rate rises from 0; it then falls linearly to 0."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient; 0 turns clipping off."""
    gradient_accumulation: Annotated[int, Field(ge=1)] = 1
    """Steps whose gradients are averaged before the optimiser moves. Lists stay `batch_size` long."""
    precision: Precision = "fp32"
    """bf16 runs the student under autocast; parameters, losses and optimiser stay fp32."""
    engine: Literal["auto", "deepspeed", "plain"] = "auto"
    """`auto` is DeepSpeed where it is installed, else plain PyTorch."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO stage; 0 is fastest for small students."""
    log_every: Annotated[int, Field(ge=1)] = 10
    """Steps between two reports of loss and rate."""

    @model_validator(mode="after")
    def _stage_has_its_engine(self) -> Self:
        if self.zero_stage and self.engine == "plain":
            raise ValueError("zero_stage needs DeepSpeed; write engine: deepspeed, or zero_stage: 0")
        return self


class TrainingSection(LoopSection):
    """The student's loop, and the workers that run it."""

    workers: Annotated[int, Field(ge=0)] = 1
    """Ray Train workers; 0 runs the same loop in this process, without Ray."""
    cpus_per_worker: Annotated[float, Field(gt=0)] | None = None
    """CPUs (and threads) of a worker; null shares the cluster's CPUs evenly."""
    gpus_per_worker: Annotated[float, Field(ge=0)] | None = None
    """GPUs of a worker; null takes one where the cluster has enough."""
    dropout_streams: Annotated[int, Field(ge=1)] | None = None
    """Parts of a batch with dropout noise of their own; null is one a worker. A run that shall continue to equal weights on
    another number of workers names one number for both (a multiple of each)."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Restarts from the last checkpoint after a worker or node is lost."""

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainingSection:
        for key, parts in (("workers", self.workers or 1), ("dropout_streams", self.dropout_streams or 1)):
            if self.batch_size % parts:
                allowed = ", ".join(str(n) for n in range(1, 65) if self.batch_size % n == 0)
                raise ValueError(
                    f"{key} is {parts}, which does not divide batch_size {self.batch_size}; allowed: {allowed}"
                )
        if self.dropout_streams and self.dropout_streams % (self.workers or 1):
            raise ValueError(
                f"dropout_streams is {self.dropout_streams}, which is no multiple of workers {self.workers}; "
                f"write a multiple of {self.workers}"
            )
        return self


class EvaluationSection(Section):
    """What is measured during the run and at its end."""

    data: str | None = None
    """Folder with labelled sets: `sts/stsb/dev.tsv.gz`, `sts/sts12/test.tsv.gz` and so on."""
    dev: Literal["auto", "stsb", "agreement", "none"] = "auto"
    """Score that picks the best checkpoint: STS-B dev Spearman, agreement with the teachers on held-out rows, or none: the
    last one is taken. `auto` is `stsb` where `data` is given, else `agreement` where there are teachers."""
    held_out: Annotated[int, Field(ge=0)] = 512
    """Rows of the corpus that are never trained on and that `agreement` is measured on."""
    every: Annotated[int, Field(ge=1)] = 125
    """Steps between two dev scores; each is also a checkpoint."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop after so many dev scores without a new best; null never stops early."""
    final: list[Measure] | None = None
    """Measured at the end for start, student and teachers; null takes `sts`, `ranking`, `geometry` and `retrieval` where
    `data` is given, else `agreement`."""
    transfer: Literal["strict", "fast"] = "strict"
    """How the transfer tasks are fitted: as SentEval does, or by scikit-learn."""


class StorageSection(Section):
    """Where things are kept. On a cluster of several nodes every path lies on storage all nodes share."""

    runs: str = "runs"
    """Folder of run directories; each run makes one of its own."""
    cache: str = "~/.cache/distcse"
    """Tokenised corpora and teachers' tables, shared by all runs; DISTCSE_CACHE overrides the default."""


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
        if terms.combine == "hinge" and not (terms.info_nce and terms.rank_regression):
            raise ValueError("objective.combine hinge is between info_nce and rank_regression; keep both, or write sum")
        if self.teachers.mode == "live" and any(teacher.space == "rank" for teacher in self.teachers.encoders):
            raise ValueError("a teacher in rank space serves from a table; write teachers.mode: table")
        if self.evaluation.every % self.training.gradient_accumulation:
            raise ValueError(
                f"evaluation.every is {self.evaluation.every}, which is no multiple of training.gradient_accumulation "
                f"{self.training.gradient_accumulation}; a checkpoint holds no half-summed gradient"
            )
        weights = (
            terms.info_nce and terms.info_nce.weight,
            terms.consistency and terms.consistency.beta,
            terms.rank and terms.rank.gamma,
            terms.rank_regression and terms.rank_regression.weight,
            terms.detection and terms.detection.weight,
        )
        if not any(weights):
            raise ValueError(
                "objective has no term of weight above 0; keep one of "
                "info_nce, consistency, rank, rank_regression, detection"
            )
        return self

    @model_validator(mode="after")
    def _scores_have_what_they_need(self) -> Recipe:
        final = self.evaluation.final or []
        labelled = next((name for name in final if name not in ("agreement", "docstring_retrieval")), None)
        if self.evaluation.data is None and (self.dev_score == "stsb" or labelled):
            raise ValueError(
                f"{'evaluation.dev is stsb' if labelled is None else f'evaluation.final has {labelled}'}, "
                "but evaluation.data is not set; write evaluation.data: FOLDER"
            )
        can_agree = self.teachers.encoders and self.evaluation.held_out >= 3
        if (self.dev_score == "agreement" or "agreement" in final) and not can_agree:
            raise ValueError(
                "agreement needs teachers and evaluation.held_out of at least 3; "
                "or score on labelled data: evaluation.data: FOLDER (with sts/stsb/dev.tsv.gz)"
            )
        if self.dev_score == "none" and self.evaluation.patience is not None:
            raise ValueError(
                "evaluation.patience needs a dev score; set evaluation.data: FOLDER, or write evaluation.patience: null"
            )
        if "docstring_retrieval" in final and self.corpus.docstrings is None:
            raise ValueError("evaluation.final has docstring_retrieval, which needs corpus.docstrings")
        return self
