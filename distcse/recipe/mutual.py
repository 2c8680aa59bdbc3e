"""The knobs of Trans-Encoder's self- and mutual distillation. Defaults are those of its common setting (paper, Table 16)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from distcse.recipe.encoders import TrainedSection
from distcse.recipe.schema import CorpusSection, Measure, StorageSection
from distcse.recipe.section import Gpus, Labels, Name, Precision, Section, Weight
from distcse.recipe.track import LoggersSection
from distcse.recipe.training import LoopSection


class BandSection(Section):
    """Neighbours whose cosine lies in [low, high)."""

    low: Annotated[float, Field(ge=-1, le=1)]
    """Least cosine of a pair."""
    high: Annotated[float, Field(ge=-1, le=2)]
    """Pairs from here on belong to another band."""
    share: Weight = 1.0
    """Of the mined pairs, relative to the other shares."""

    @model_validator(mode="after")
    def _is_a_band(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low is {self.low} and high {self.high}; no pair lies between them")
        return self


class MiningSection(Section):
    """Pairs out of raw text: no test set is seen."""

    corpus: CorpusSection
    """Where the sentences come from."""
    pairs: Annotated[int, Field(ge=2)] = 10_000
    """Pairs to mine."""
    num_neighbors: Annotated[int, Field(ge=1)] = 20
    """Nearest sentences looked at for each sentence, by the first group's bi-encoder as it starts, and by BM25."""
    bands: list[BandSection] = Field(
        default_factory=lambda: [
            BandSection(low=0.9, high=2.0),
            BandSection(low=0.7, high=0.9),
            BandSection(low=0.5, high=0.7),
        ]
    )
    """What of the nearest neighbours is taken."""
    bm25_share: Weight = 1.0
    """Share of pairs that BM25 finds: alike in words, whatever the encoder thinks."""
    random_share: Weight = 1.0
    """Share of pairs drawn at random: hardly ever alike."""

    @model_validator(mode="after")
    def _takes_something(self) -> Self:
        if not (sum(band.share for band in self.bands) + self.bm25_share + self.random_share):
            raise ValueError("all shares are 0; give a band, bm25_share or random_share one above 0")
        return self


class PairsSection(Section):
    """The unlabelled sentence pairs: exactly one of `path`, `task` and `mine`."""

    path: str | list[str] | None = None
    """File or files with two columns of sentences: .tsv, .tsv.gz, .jsonl, .jsonl.gz, .parquet."""
    columns: Annotated[list[str], Field(min_length=2, max_length=2)] = Field(
        default_factory=lambda: ["sentence1", "sentence2"]
    )
    """Names of the two columns."""
    task: Name | None = None
    """A task's own pairs, test pairs among them: all files of `pairs/TASK` in `evaluation.data`. Transductive, and marked so."""
    mine: MiningSection | None = None
    """Pairs mined from raw text."""
    limit: Annotated[int, Field(ge=2)] | None = None
    """Keep so many different pairs, drawn by the seed."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [key for key in ("path", "task", "mine") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(f"gives {' and '.join(given) or 'no source'}; pairs have one: path, task or mine")
        return self


class GroupSection(TrainedSection):
    """One pre-trained language model: its bi-encoder as it starts, and what its group of actors is given."""

    name: Name
    """What the group is called in folders, tables and messages."""
    cross_backbone: str | None = None
    """What the cross-encoder starts from; null is `backbone`. The paper: the language model that the bi-encoder came from."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this group's scores in the labels (for the mean)."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Training workers, each with a scorer beside it."""
    cpus_per_worker: Annotated[float, Field(gt=0)] | None = None
    """CPUs (and threads) of a worker; null shares the cluster's CPUs evenly among all workers of all groups."""
    node_labels: Labels | None = None
    """Labels of the nodes that workers and their scorers are put on; null takes any."""
    gpus_per_worker: Gpus | None = None
    """GPUs of a worker, which its scorer shares; null takes one where the cluster has enough for all groups."""

    @model_validator(mode="after")
    def _layers_are_named(self) -> Self:
        if self.layers == "auto":
            raise ValueError(
                "layers: auto is for a student, which has teachers to agree with; name the layers, such as [0, 2, 4]"
            )
        return self

    @model_validator(mode="after")
    def _gpus_are_shared_evenly(self) -> Self:
        gpus = self.gpus_per_worker or 0.0
        if gpus > 2 and gpus % 2:
            raise ValueError(
                f"gpus_per_worker is {gpus:g}, of which a worker and its scorer get {gpus / 2:g} each, and Ray gives no process "
                f"a fraction above 1; write {gpus - 1:g} or {gpus + 1:g}"
            )
        return self


class BiSection(LoopSection):
    """How bi-encoders learn from cross-encoders: mean squared error of the cosine."""

    batch_size: Annotated[int, Field(ge=2)] = 128
    """Pairs of a step over all workers of a group."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] = 10
    """Passes over the pairs: 10 for STS, 15 for binary tasks."""
    lr: Annotated[float, Field(gt=0, le=1)] = 5e-5
    """Peak learning rate of AdamW."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of all steps in which the rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""


class CrossSection(LoopSection):
    """How cross-encoders learn from bi-encoders: binary cross-entropy with soft labels."""

    batch_size: Annotated[int, Field(ge=2)] = 32
    """Pairs of a step over all workers of a group."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] = 1
    """Passes over the pairs: 1 for STS, 3 for binary tasks."""
    lr: Annotated[float, Field(gt=0, le=1)] = 2e-5
    """Peak learning rate of AdamW."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of all steps in which the rate rises from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""
    max_length: Annotated[int, Field(ge=8, le=8192)] = 64
    """Tokens kept of a pair, in training, in labelling and in the saved model."""
    both_orders: bool = True
    """Learn each pair in both orders. Labels are asked for in one."""


class MutualSection(Section):
    """How the groups' labels come together, and for how long."""

    cycles: Annotated[int, Field(ge=1)] = 3
    """Cycles of bi → cross → bi: 3 for STS, 5 for binary tasks."""
    initialization: Literal["refresh", "sequential"] = "refresh"
    """Where each phase starts: `refresh` from the backbones, `sequential` from the weights of the phase before."""
    combine: Literal["mean", "median", "trimmed_mean"] = "mean"
    """How the groups' scores of a pair become its label: of raw cosines, or of sigmoid outputs; never of logits."""
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.25
    """Share of scores that a trimmed mean leaves out at either end, at least one where there are three groups."""
    precision: Precision = "auto"
    """Arithmetic in which pairs are scored for their labels. bf16 moves a score by up to 1e-2. `auto` is bf16 where the devices
    of all groups have fast bf16 units, else fp32."""
    clamp: bool = False
    """Cut cosines at 0 and 1 before they are labels; the paper's code leaves them as they are."""
    patience: Annotated[int, Field(ge=1)] | None = None
    """Stop after so many cycles in which no group had a new best dev score; null does all cycles."""
    on_failure: Literal["stop", "drop"] = "stop"
    """What becomes of the run when a group cannot go on: it ends, or goes on without the group and says so."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Times a group is started again, from its last checkpoint, after it lost a worker or a scorer."""


class MutualEvaluationSection(Section):
    """What is measured during the run and at its end."""

    data: str | None = None
    """Folder with labelled sets, as for all recipes."""
    dev: str = "stsb"
    """What picks the best checkpoint of a phase, and the best cycle: `stsb` (STS-B dev in `data`); the name of a set in `data`
    (`pairs/NAME/dev`), or a file of labelled pairs (Spearman with its column `score`, or area under the ROC curve with its
    column `label`); or `none`, and the last one is taken."""
    dev_is_test: bool = False
    """The dev set is a test set, and that is meant: figures on it are then chosen by it, and no measurement."""
    eval_steps: Annotated[int, Field(ge=1)] = 200
    """Steps of an epoch between two dev scores, each also a checkpoint; the end of an epoch is one, too."""
    precision: Precision = "auto"
    """Arithmetic of dev scores and of the final evaluation. `auto` is bf16 where the devices that score have fast bf16 units,
    else fp32; the report names it."""
    final_suites: list[Measure] | None = None
    """Measured at the end for all starts, bi-encoders, cross-encoders and their ensembles; null is sts where there is data."""


class MutualRecipe(Section):
    """One run of self-distillation (one group) or mutual distillation (several)."""

    name: Name = "mutual"
    """Name of the run directory."""
    seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = 2021
    """Seed of sampling, dropout and fresh weights."""
    pairs: PairsSection
    """What the labels are for."""
    groups: Annotated[list[GroupSection], Field(min_length=1)]
    """The language models."""
    bi: BiSection = BiSection()
    """Cross → bi."""
    cross: CrossSection = CrossSection()
    """Bi → cross."""
    mutual: MutualSection = MutualSection()
    """Cycles and labels."""
    evaluation: MutualEvaluationSection = MutualEvaluationSection()
    """What is measured."""
    storage: StorageSection = StorageSection()
    """Where results live."""
    loggers: LoggersSection = LoggersSection()
    """Who else is told of the run."""
    ray: bool = True
    """Run the groups side by side as actors; false runs them in this process, in turns."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [group.name for group in self.groups]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two groups are called {repeated}; each needs a name of its own")
        for group in self.groups:
            for kind, section in (("bi", self.bi), ("cross", self.cross)):
                if section.batch_size % group.workers:
                    raise ValueError(
                        f"group {group.name} has {group.workers} workers, which do not divide {kind}.batch_size "
                        f"{section.batch_size}"
                    )
        if self.pairs.mine is not None and self.pairs.mine.corpus.exclude_evaluation and self.evaluation.data is None:
            raise ValueError(
                "pairs.mine.corpus.exclude_evaluation leaves out the sentences of labelled sets; write evaluation.data: FOLDER"
            )
        dev = self.evaluation.dev
        named = dev != "none" and not any(sign in dev for sign in "./")
        wants_data = [named and f"evaluation.dev is {dev}", self.pairs.task and "pairs.task is set"]
        if self.evaluation.data is None and (told := next((text for text in wants_data if text), None)):
            raise ValueError(f"{told}, but evaluation.data is not set; write evaluation.data: FOLDER")
        if self.evaluation.dev == "none" and self.mutual.patience is not None:
            raise ValueError("mutual.patience needs a dev score; write evaluation.dev, or mutual.patience: null")
        return self
