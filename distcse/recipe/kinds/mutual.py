"""Recipe of Trans-Encoder's self- and mutual distillation. Defaults are its common setting (paper, Table 16)."""

from __future__ import annotations

from math import lcm
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, ValidationError, model_validator

from distcse.recipe.base import BaseRecipe, RecipeInputs, register_recipe
from distcse.recipe.encoders import EncoderSection, TrainedSection
from distcse.recipe.evaluation import Measure
from distcse.recipe.names import HubName, absolute, absolute_folder, absolute_path, absolute_paths, is_path
from distcse.recipe.section import Gpus, Labels, Name, Precision, Section, Seed, Seeds
from distcse.recipe.storage import LoggersSection, StorageSection
from distcse.recipe.text import PairsSection
from distcse.recipe.training import (
    KINDS,
    BiSection,
    CrossOverrides,
    CrossSection,
    LoopOverrides,
    LoopSection,
    ResourcesSection,
    can_share_gpu,
    check_gpu_keys,
)


class GroupSection(TrainedSection):
    """One language model: its initial bi-encoder, its own settings, and the resources of its actors."""

    name: Name
    """Name of the group in folders, tables and messages."""
    cross_backbone: HubName | None = None
    """Initial model of the cross-encoder with `mutual.initialization: refresh`, in the paper the bi-encoder's language model.
    null is `backbone`."""
    weight: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this group's scores in the labels, the weighted mean of all groups' cosines or sigmoid outputs."""
    label_band: Literal["shared", "own"] = "shared"
    """Mean and standard deviation of the bi-encoder's labels: `shared`, of the combined scores, as in the paper, or `own`, of
    the group's start, so that e5 and others keep a narrow band of cosines."""
    init_weight_mix: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight of a phase's initial parameters in its evaluated and saved bi-encoder (WiSE-FT), 0 in the paper. Others need
    `mutual.initialization: refresh`."""
    bi: LoopOverrides = LoopOverrides()
    """Settings of its bi-encoders that differ from `bi`."""
    cross: CrossOverrides = CrossOverrides()
    """Settings of its cross-encoders that differ from `cross`."""
    workers: Annotated[int, Field(ge=1)] = 1
    """Training workers, each with a scoring actor; with `mutual.shared_workers` the fewest of the group."""
    max_workers: Annotated[int, Field(ge=1)] | None = None
    """Most workers that the group takes from `mutual.shared_workers`: a multiple of `workers` that divides both batch sizes. As
    the number of dropout random streams, it changes the results; the workers that run do not. null is `workers`, or with
    shared workers in proportion to the model's size."""
    cpus_per_worker: Annotated[float, Field(gt=0)] | None = None
    """CPUs (and threads) per worker; null divides the cluster's CPUs evenly among all groups' workers."""
    node_labels: Labels | None = None
    """Node labels that workers and scorers require; null is any node."""
    gpus_per_worker: Gpus | None = None
    """GPUs per worker, shared with its scorer; null is one where nodes have GPUs. With at most 0.5, two workers may share a GPU,
    which needs `engine: torch` in `bi` and `cross`."""

    @property
    def rng_streams(self) -> int:
        """Parts of a batch with a dropout random stream each."""
        return self.max_workers or self.workers

    def overrides(self, kind: Literal["bi", "cross"]) -> LoopOverrides:
        """Return the group's own settings of a kind of encoder."""
        return self.bi if kind == "bi" else self.cross

    @model_validator(mode="after")
    def _gpus_are_shared_evenly(self) -> Self:
        gpus = self.gpus_per_worker or 0.0
        if gpus > 2 and gpus % 2:
            raise ValueError(
                f"gpus_per_worker is {gpus:g}, of which a worker and its scorer get {gpus / 2:g} each, and Ray gives no process "
                f"a fraction above 1; write {gpus - 1:g} or {gpus + 1:g}"
            )
        return self


class MutualSection(Section):
    """Cycles, and how the groups' scores are combined into labels."""

    cycles: Annotated[int, Field(ge=1)] = 3
    """Cycles of bi → cross → bi: 3 for STS, 5 for binary tasks."""
    initialization: Literal["refresh", "sequential"] = "refresh"
    """Start of each phase: `refresh` the backbones, `sequential` the previous phase's model (first `backbone`)."""
    shared_workers: Annotated[int, Field(ge=1)] | Literal["auto"] | None = None
    """Workers that all groups share: each takes some for a phase, more while the others wait. `auto` is as many as fit on the
    cluster's GPUs, or CPUs; null gives each group its own `workers`."""
    standardize: bool = False
    """Give all groups' scores one mean and standard deviation (the weighted mean) before they are combined, so that narrow
    bands of cosines count equally. The paper combines raw scores."""
    learn_from: Literal["other", "both"] = "other"
    """Scores that make a phase's labels: `other`, the latest of the other formulation, as in the paper; `both`, also those of
    the trained formulation from the previous cycle, which needs `standardize`."""
    weigh_by: Literal["group", "group_and_dev"] = "group"
    """Weight of a model's scores: its group's `weight`, as in the paper, or that times ρ / (1 - ρ²) for a dev score ρ, optimal
    for independent errors. The latter needs `standardize` and dev pairs with a `score`."""
    precision: Precision = "auto"
    """Precision of scoring pairs; bf16 changes a score by up to 1e-2. `auto` is bf16 where all groups' devices have fast bf16
    units, else fp32."""
    on_failure: Literal["stop", "drop"] = "stop"
    """If a group diverges, runs out of memory or loses its workers too often, `stop` ends the run, `drop` continues without the
    group."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Restarts per phase: of a group's training from its last checkpoint, and of each part of its scoring."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Seconds without a heartbeat until a worker or scorer is restarted. Heartbeats continue during long work."""


class MutualEvaluationSection(Section):
    """Evaluation during mutual distillation and at its end."""

    data: str | None = None
    """Folder of labeled sets ([layout](../how-to/evaluate.md#the-data-folder))."""
    dev: str = "stsb"
    """Score that selects a phase's checkpoint and the best cycle: `stsb`, `sickr` or `stsb_sickr`, as for a student; another set
    in `data`, by the NAME of `pairs/NAME/dev`; [your own file](../how-to/evaluate.md#the-dev-set); or `none`, which takes the
    last."""
    dev_is_test: bool = False
    """Allow a test set as dev set; its scores are then no measurement."""
    eval_steps: Annotated[int, Field(ge=1)] = 200
    """Steps of an epoch between dev scores; each, like the end of an epoch, also writes a checkpoint."""
    precision: Precision = "auto"
    """Precision of dev scores and final evaluation; `auto` is bf16 where all evaluating devices have fast bf16 units, else
    fp32."""
    final_suites: list[Measure] | None = None
    """Suites of the final evaluation of starts, bi-encoders, cross-encoders and ensembles. null is `sts` with `data`; else your
    `dev` file, and the bi-encoders' agreement with the first group's start on the pairs' sentences."""


@register_recipe
class MutualRecipe(BaseRecipe):
    """One run of self-distillation (one group) or mutual distillation (several)."""

    title: ClassVar[str] = "recipe of mutual distillation"
    schema_name: ClassVar[str] = "mutual"
    summary: ClassVar[str] = (
        "A recipe with `groups`: one or several language models teach each other ([how](../methods/trans-encoder.md))."
    )
    identifying_key: ClassVar[str] = "groups"
    loop_keys: ClassVar[tuple[str, ...]] = ("bi", "cross")
    resumable_keys: ClassVar[tuple[str, ...]] = (
        "ray",
        "groups.cpus_per_worker",
        "groups.gpus_per_worker",
        "groups.node_labels",
        "groups.bi.engine",
        "groups.bi.zero_stage",
        "groups.bi.cuda_graphs",
        "groups.cross.engine",
        "groups.cross.zero_stage",
        "groups.cross.cuda_graphs",
        "bi.engine",
        "bi.zero_stage",
        "bi.deepspeed",
        "bi.cuda_graphs",
        "bi.log_every",
        "cross.engine",
        "cross.zero_stage",
        "cross.deepspeed",
        "cross.cuda_graphs",
        "cross.log_every",
        "mutual.shared_workers",
        "mutual.on_failure",
        "mutual.max_failures",
        "mutual.heartbeat_timeout_s",
        "evaluation.final_suites",
        "resources",
        "storage.cache",
        "loggers",
    )
    searchable_keys: ClassVar[tuple[str, ...]] = ("groups", "bi", "cross", "mutual")

    name: Name = "mutual"
    """Name of the run directory."""
    seed: Seed = 2021
    """Seed of sampling, dropout and newly initialized weights."""
    seeds: Seeds = Field(default_factory=list)
    """One run per seed, in place of `seed`; the report gives mean ± standard deviation."""
    pairs: PairsSection
    """Sentence pairs to label."""
    groups: Annotated[list[GroupSection], Field(min_length=1)]
    """The language models."""
    bi: BiSection = BiSection()
    """Training of bi-encoders (cross → bi)."""
    cross: CrossSection = CrossSection()
    """Training of cross-encoders (bi → cross)."""
    mutual: MutualSection = MutualSection()
    """Cycles and labels."""
    evaluation: MutualEvaluationSection = MutualEvaluationSection()
    """Dev scores and final evaluation."""
    resources: ResourcesSection = ResourcesSection()
    """Resources that the run may use."""
    storage: StorageSection = StorageSection()
    """Where runs and caches are stored."""
    loggers: LoggersSection = LoggersSection()
    """Experiment trackers."""
    ray: bool = True
    """Run the groups in parallel as Ray actors; false runs them one after another in this process."""

    @property
    def uses_ray(self) -> bool:
        return self.ray

    @property
    def dev_score(self) -> str:
        return self.evaluation.dev

    @property
    def inputs(self) -> RecipeInputs:
        starts = [
            EncoderSection(backbone=start, trust_remote_code=group.trust_remote_code)
            for group in self.groups
            if (start := self.cross_start(group)) != group.backbone
        ]
        mine = self.pairs.mine
        corpus = None if mine is None else mine.corpus
        dev = self.evaluation.dev
        uses = {
            f"evaluation.dev is {dev}": dev != "none" and not is_path(dev),
            f"pairs.task is {self.pairs.task}": self.pairs.task is not None,
            "pairs.mine.corpus.exclude_evaluation is true": corpus is not None
            and corpus.exclude_evaluation
            and not is_path(dev),
        }
        return RecipeInputs(
            [*self.groups, *starts],
            corpus=corpus,
            labelled=self.evaluation.data,
            labelled_for=next((use for use, needs_data in uses.items() if needs_data), None),
        )

    @property
    def loop_sections(self) -> list[LoopSection]:
        return [self.loop_of(group, kind) for group in self.groups for kind in KINDS]

    def bi_of(self, group: GroupSection) -> BiSection:
        """Return the settings with which a group's bi-encoders are trained."""
        return group.bi.over(self.bi)

    def cross_of(self, group: GroupSection) -> CrossSection:
        """Return the settings with which a group's cross-encoders are trained."""
        return group.cross.over(self.cross)

    def loop_of(self, group: GroupSection, kind: Literal["bi", "cross"]) -> LoopSection:
        """Return the settings with which a group's encoders of a kind are trained."""
        return self.bi_of(group) if kind == "bi" else self.cross_of(group)

    def loop_path(self, group: GroupSection, kind: Literal["bi", "cross"]) -> str:
        """Return the path of the section to change in advice: the group's own if it sets any key, else the run's."""
        return f"groups.{self.groups.index(group)}.{kind}" if group.overrides(kind).named else kind

    def batch_sizes(self, kind: Literal["bi", "cross"]) -> list[int]:
        """Return the sizes that `bi.batch_size` or `cross.batch_size` may have, the largest first.

        These are the value, and, unless a user gave it, all lower ones that the workers of the groups with this size divide.
        """
        size: int = getattr(self, kind).batch_size
        if (kind, "batch_size") in self.given_keys:
            return [size]
        parts = lcm(*(group.rng_streams for group in self.groups if group.overrides(kind).batch_size is None))
        return [lower for lower in range(size, 1, -1) if lower % parts == 0]

    def cross_start(self, group: GroupSection) -> str:
        """Return the model from which a group's first cross-encoder starts (Trans-Encoder §5.2)."""
        is_sequential = self.mutual.initialization == "sequential"
        return group.backbone if is_sequential or group.cross_backbone is None else group.cross_backbone

    @property
    def model_folders(self) -> list[str]:
        return [f"models/{group.name}/{kind}" for group in self.groups for kind in KINDS]

    def with_absolute_paths(self) -> Self:
        mine = self.pairs.mine
        if mine is not None:
            mine = mine.model_copy(update={"corpus": mine.corpus.with_absolute_paths()})
        evaluation = {"data": absolute(self.evaluation.data), "dev": absolute_path(self.evaluation.dev)}
        groups = [
            group.model_copy(
                update={
                    "backbone": absolute_folder(group.backbone),
                    "cross_backbone": absolute_folder(group.cross_backbone),
                }
            )
            for group in self.groups
        ]
        return self.model_copy(
            update={
                "pairs": self.pairs.model_copy(update={"path": absolute_paths(self.pairs.path), "mine": mine}),
                "groups": groups,
                "evaluation": self.evaluation.model_copy(update=evaluation),
                "storage": self.storage.with_absolute_paths(),
            }
        )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        names = [group.name for group in self.groups]
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"two groups are called {repeated}; each needs a different name")
        for number, group in enumerate(self.groups):
            loops = {self.loop_path(group, kind): self.loop_of(group, kind) for kind in KINDS}
            for path, section in loops.items():
                _require_valid(section, path)
                if section.batch_size % group.workers:
                    raise ValueError(
                        f"group {group.name} has {group.workers} workers, which do not divide {path}.batch_size "
                        f"{section.batch_size}; write another number in groups.{number}.workers, or another batch_size"
                    )
                if section.batch_size % group.rng_streams:
                    raise ValueError(
                        f"group {group.name} has max_workers {group.max_workers}, which does not divide {path}.batch_size "
                        f"{section.batch_size}"
                    )
                if section.cuda_graphs == "on" and group.rng_streams > group.workers:
                    raise ValueError(
                        f"{path}.cuda_graphs records steps with one dropout stream on each worker; write "
                        f"groups.{number}.max_workers: null, or {path}.cuda_graphs: off"
                    )
            if group.init_weight_mix and loops[self.loop_path(group, "bi")].zero_stage == 3:
                raise ValueError(
                    f"groups.{number}.init_weight_mix is mixed into full weights, which no worker holds under ZeRO 3; write "
                    f"{self.loop_path(group, 'bi')}.zero_stage: 2, or groups.{number}.init_weight_mix: 0"
                )
            if group.init_weight_mix and self.mutual.initialization == "sequential":
                raise ValueError(
                    f"groups.{number}.init_weight_mix mixes in the weights with which a phase begins, and with "
                    "mutual.initialization: sequential these are a cross-encoder's; write refresh, or "
                    f"groups.{number}.init_weight_mix: 0"
                )
            if group.rng_streams % group.workers:
                raise ValueError(
                    f"group {group.name} has max_workers {group.max_workers}, which is no multiple of its workers {group.workers}"
                )
            changes = [f"{path}.engine: torch" for path, section in loops.items() if section.engine != "torch"]
            if can_share_gpu(group.workers, group.gpus_per_worker) and changes:
                raise ValueError(
                    f"group {group.name} has {group.workers} workers and gpus_per_worker {group.gpus_per_worker:g}, with which "
                    "two may be placed on one GPU; NCCL refuses that, and DeepSpeed communicates by NCCL on GPUs; "
                    f"write {' and '.join(changes)}, or gpus_per_worker: 1"
                )
        if self.mutual.learn_from == "both" and not self.mutual.standardize:
            raise ValueError(
                "mutual.learn_from is both, but cosines and sigmoid outputs are not on one scale; write "
                "mutual.standardize: true, or mutual.learn_from: other"
            )
        if self.mutual.weigh_by == "group_and_dev":
            self._check_dev_weights()
        if self.mutual.shared_workers is not None:
            self._check_shared_workers()
        check_gpu_keys(
            self.resources.gpu,
            {f"groups.{number}.gpus_per_worker": group.gpus_per_worker for number, group in enumerate(self.groups)},
        )
        return self

    def _check_dev_weights(self) -> None:
        """Check that scores can be weighed by the dev scores of their models."""
        if not self.mutual.standardize:
            raise ValueError(
                "mutual.weigh_by is group_and_dev, whose weights are those of a mean of standardized scores; write "
                "mutual.standardize: true, or mutual.weigh_by: group"
            )
        if self.evaluation.dev == "none":
            raise ValueError(
                "mutual.weigh_by is group_and_dev, but evaluation.dev is none; name a dev set, or write mutual.weigh_by: group"
            )

    def _check_shared_workers(self) -> None:
        """Check that each group can use each shared worker."""
        for key in ("cpus_per_worker", "gpus_per_worker", "node_labels"):
            if any(getattr(group, key) != getattr(self.groups[0], key) for group in self.groups):
                raise ValueError(
                    f"groups share workers, but differ in {key}; write the same in each group, or mutual.shared_workers: null"
                )
        gpus = self.groups[0].gpus_per_worker
        if gpus is not None and 0 < gpus <= 0.5:
            raise ValueError(
                f"groups share workers, but two with gpus_per_worker {gpus:g} may be placed on one GPU, which NCCL refuses; "
                "write gpus_per_worker: 1, or mutual.shared_workers: null"
            )


def _require_valid(section: LoopSection, path: str) -> None:
    """Raise `ValueError` if a group's settings and the run's, each valid, do not go together."""
    try:
        type(section).model_validate(section.model_dump())
    except ValidationError as invalid:
        reason = invalid.errors(include_url=False)[0]["msg"].removeprefix("Value error, ")
        raise ValueError(f"{path}: {reason}") from None
