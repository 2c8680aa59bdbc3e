"""Sections of training loops, on text and on pairs, of their workers, and of the resources that a run may use.

The defaults of a student's loop are RankCSE's (paper, App. A).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from distcse.devices.gpu_plan import GpuMode
from distcse.recipe.section import Gpus, Labels, Precision, Section, switch_text

_DECIDED = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization.stage": "zero_stage",
    "optimizer": "lr and weight_decay",
    "scheduler": "lr and warmup",
    "fp16": "precision",
    "bf16": "precision",
    "amp": "precision",
    "torch_autocast": "precision",
}
"""DeepSpeed settings that a recipe key already sets."""
_UNKNOWN_TO_CHECKPOINTS = ("offload_optimizer", "offload_param")


class LoopSection(Section):
    """Training loop: batch, optimizer, learning-rate schedule and engine."""

    batch_size: Annotated[int, Field(ge=2)] = 128
    """Sentences (or pairs) per step over all workers, the length of every list. A default or packaged value is lowered if it
    leaves fewer than ten steps."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] = 4
    """Passes over the corpus; fractions are allowed."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Steps after which training and schedule end; null sets no limit."""
    lr: Annotated[float, Field(gt=0, le=1)] = 3e-5
    """Peak learning rate of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay of matrices; biases and norms have none."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of steps with a linearly rising learning rate; then it falls linearly to 0."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Maximum norm of the gradient; 0 disables clipping."""
    gradient_accumulation: Annotated[int, Field(ge=1)] = 1
    """Steps whose gradients are averaged per optimizer step; lists stay `batch_size` long."""
    precision: Precision = "auto"
    """Precision of forward and backward passes: `bf16` by autocast; parameters, losses and optimizer in fp32. `auto` is bf16 if
    all devices that may train have fast bf16 units, else fp32."""
    engine: Literal["auto", "deepspeed", "torch"] = "auto"
    """`auto` is PyTorch with CUDA graphs or without DeepSpeed, else DeepSpeed."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    """DeepSpeed ZeRO stage; 0 is fastest for small students."""
    deepspeed: dict[str, Any] | None = None
    """DeepSpeed settings that no recipe key sets: a mapping, or a YAML or JSON file, which is read into the recipe."""
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    """On a GPU, capture the step as a CUDA graph. `auto` does so [if possible](../explanation/gpus.md#recorded-steps), with
    several workers after a check; `on` fails otherwise, and needs `engine: torch`."""
    log_every: Annotated[int, Field(ge=1)] = 10
    """Steps between reports of loss and learning rate."""

    @model_validator(mode="after")
    def _stage_has_its_engine(self) -> Self:
        if self.zero_stage and self.engine == "torch":
            raise ValueError("zero_stage needs DeepSpeed; write engine: deepspeed, or zero_stage: 0")
        if self.deepspeed is not None and self.engine != "deepspeed":
            raise ValueError("deepspeed has settings of DeepSpeed; write engine: deepspeed, or deepspeed: null")
        return self

    @model_validator(mode="after")
    def _says_nothing_twice(self) -> Self:
        given = self.deepspeed or {}
        zero = given.get("zero_optimization", {})
        if not isinstance(zero, dict):
            raise ValueError(f"deepspeed.zero_optimization is {zero!r}; expected a mapping")
        names = {*given, *(f"zero_optimization.{name}" for name in zero)}
        for name, key in _DECIDED.items():
            if name in names:
                raise ValueError(f"deepspeed sets {name}, which {key} decides; take it out, and set {key} instead")
        for name in _UNKNOWN_TO_CHECKPOINTS:
            if name in zero:
                raise ValueError(
                    f"deepspeed sets zero_optimization.{name}, from where checkpoints cannot be made; take it out"
                )
        return self

    @field_validator("cuda_graphs", "compile_layers", mode="before", check_fields=False)
    @classmethod
    def _switches_are_text(cls, value: object) -> object:
        return switch_text(value)

    @model_validator(mode="after")
    def _can_be_recorded(self) -> Self:
        fixes = self.changes_to_record + (["engine: torch"] if self.engine == "auto" else [])
        if self.cuda_graphs == "on" and fixes:
            raise ValueError(f"cuda_graphs records entire steps; write {', '.join(fixes)}, or cuda_graphs: off")
        return self

    @property
    def needs_deepspeed(self) -> bool:
        """Whether only DeepSpeed can train with this section; `engine: auto` may take it too."""
        return self.engine == "deepspeed" or self.zero_stage > 0

    @property
    def changes_to_record(self) -> list[str]:
        """Changes of this section without which a step cannot be captured as a CUDA graph; `engine: auto` needs none."""
        fixes = {
            "engine: torch": self.needs_deepspeed,
            "zero_stage: 0": self.zero_stage > 0,
            "gradient_accumulation: 1": self.gradient_accumulation > 1,
        }
        return [fix for fix, is_needed in fixes.items() if is_needed]


MAX_RECORDED_STREAMS = 16
"""Most dropout streams of a recorded step: a CUDA graph of BERT-base has about 8,000 kernels per stream."""


class TrainingSection(LoopSection):
    """Training loop of a student, and its workers."""

    workers: Annotated[int, Field(ge=0)] = 1
    """Ray Train workers; 0 trains in the calling process, without Ray."""
    min_workers: Annotated[int, Field(ge=1)] | None = None
    """Elastic training: fewest workers. The run takes the largest number up to `workers` that fits and divides the batch;
    batches, lists and dropout masks don't change. null waits ten minutes for room for all."""
    cpus_per_worker: Annotated[float, Field(gt=0)] | None = None
    """CPUs (and threads) per worker; null divides the cluster's CPUs evenly."""
    gpus_per_worker: Gpus | None = None
    """GPUs per worker, or a fraction; null is one where nodes have GPUs. At most 0.5 lets workers share a GPU, which needs
    `engine: torch`."""
    node_labels: Labels | None = None
    """Node labels that workers require; null is any node."""
    dropout_rng_streams: Annotated[int, Field(ge=1)] | None = None
    """Parts of a batch with separate dropout random streams; null is one per worker. With one value, a multiple of both, two
    numbers of workers give equal weights."""
    grad_cache_chunk: Annotated[int, Field(ge=1)] | None = None
    """Sentences per forward pass of the student, recomputed in the backward pass (GradCache, Gao et al. 2021): constant memory,
    the full batch's gradient. Each chunk is a dropout random stream, so `dropout_rng_streams` stays null. null processes the
    batch as one."""
    compile_layers: Literal["auto", "on", "off"] = "auto"
    """Compile the student's layers (`torch.compile`) in steps recorded as CUDA graphs, which takes up to a minute. `auto` does
    so in runs of at least 2,000 steps without a gradient cache. If it fails, layers run uncompiled."""
    max_failures: Annotated[int, Field(ge=0)] = 3
    """Restarts from the last checkpoint after the loss of a worker or node."""

    @model_validator(mode="after")
    def _chunks_divide(self) -> Self:
        if self.grad_cache_chunk is None:
            return self
        if self.dropout_rng_streams is not None:
            raise ValueError("grad_cache_chunk and dropout_rng_streams both part the batch; keep one of them")
        rows = self.batch_size // (self.workers or 1)
        if rows % self.grad_cache_chunk:
            allowed = ", ".join(str(n) for n in range(1, rows + 1) if rows % n == 0)
            raise ValueError(
                f"grad_cache_chunk is {self.grad_cache_chunk}, which does not divide a worker's {rows} rows; allowed: {allowed}"
            )
        return self

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainingSection:
        least = self.min_workers or 1
        if self.min_workers is not None and least > self.workers:
            raise ValueError(
                f"min_workers is {least}, and workers {self.workers}; write min_workers of at most workers"
            )
        parts_of = {
            "workers": self.workers or 1,
            "min_workers": least,
            "dropout_rng_streams": self.dropout_rng_streams or 1,
        }
        for key, parts in parts_of.items():
            if self.batch_size % parts:
                allowed = ", ".join(str(n) for n in range(1, 65) if self.batch_size % n == 0)
                raise ValueError(
                    f"{key} is {parts}, which does not divide batch_size {self.batch_size}; allowed: {allowed}"
                )
        for key, number in (("workers", self.workers or 1), ("min_workers", least)):
            if self.dropout_rng_streams and self.dropout_rng_streams % number:
                raise ValueError(
                    f"dropout_rng_streams is {self.dropout_rng_streams}, which is no multiple of {key} {number}; "
                    f"write a multiple of {number}"
                )
        return self

    @model_validator(mode="after")
    def _gpu_can_be_shared(self) -> Self:
        if can_share_gpu(self.workers, self.gpus_per_worker) and self.engine != "torch":
            raise ValueError(
                f"gpus_per_worker is {self.gpus_per_worker:g}, with which two workers may be placed on one GPU; NCCL refuses "
                "that, and DeepSpeed communicates by NCCL on GPUs; write engine: torch, or gpus_per_worker: 1"
            )
        return self

    @property
    def layer_compilation(self) -> Literal["auto", "on", "off"]:
        """`compile_layers`, with `auto` off for a gradient cache, whose compiled and recorded steps no GPU has run."""
        return "off" if self.compile_layers == "auto" and self.grad_cache_chunk is not None else self.compile_layers

    @property
    def changes_to_record(self) -> list[str]:
        fixes = super().changes_to_record
        if not self.can_record_streams:
            named = ("grad_cache_chunk", "dropout_rng_streams", "min_workers")
            fixes.append(f"{next(key for key in named if getattr(self, key) is not None)}: null")
        return fixes

    @property
    def can_record_streams(self) -> bool:
        """Whether a worker has at most `MAX_RECORDED_STREAMS` dropout streams, with the fewest workers that the run may use."""
        fewest = min((number or 1 for number in self.worker_counts), default=1)
        return self.streams <= MAX_RECORDED_STREAMS * fewest

    @property
    def worker_counts(self) -> list[int]:
        """Numbers of workers that the run may use, ascending: those that divide its batch and its dropout streams."""
        rows = math.gcd(self.batch_size, self._named_streams or self.batch_size)
        return [n for n in range(self.min_workers or self.workers, self.workers + 1) if n == 0 or rows % n == 0]

    @property
    def streams(self) -> int:
        """Number of dropout random streams, the same for all numbers of workers that the run may use."""
        return self._named_streams or math.lcm(*(n or 1 for n in self.worker_counts))

    @property
    def _named_streams(self) -> int | None:
        return self.batch_size // self.grad_cache_chunk if self.grad_cache_chunk else self.dropout_rng_streams


class ResourcesSection(Section):
    """Resources that a run may use."""

    gpu: GpuMode = "auto"
    """`auto` gives each worker a GPU and each helper a quarter, where nodes have GPUs. `required` starts only if every process
    that computes with a model gets one. `none` hides all GPUs."""
    wait_s: Annotated[float, Field(ge=0)] = 0
    """Seconds to wait at the start for an [autoscaler's nodes](../how-to/cluster.md#autoscaling); also set
    `training.cpus_per_worker` and `training.gpus_per_worker`. 0 refuses a run that does not fit."""


def check_gpu_keys(mode: GpuMode, gpus: Mapping[str, float | None]) -> None:
    """Check that keys of GPUs do not contradict `resources.gpu`."""
    for key, number in gpus.items():
        if mode == "required" and number == 0:
            raise ValueError(f"resources.gpu is required, and {key} is 0; write {key}: null, or resources.gpu: auto")
        if mode == "none" and number:
            raise ValueError(
                f"resources.gpu is none, and {key} is {number:g}; write {key}: null, or resources.gpu: auto"
            )


def can_share_gpu(workers: int, gpus: float | None) -> bool:
    """Return whether two of a run's workers may be placed on one GPU: two parts of at most a half fit on it."""
    return workers > 1 and gpus is not None and 0 < gpus <= 0.5


L = TypeVar("L", bound=LoopSection)
KINDS: tuple[Literal["bi"], Literal["cross"]] = ("bi", "cross")
"""Kinds of encoders that a group trains, by the key of their settings."""


class BiSection(LoopSection):
    """Training of bi-encoders on the cross-encoders' labels: mean squared error of the cosine."""

    batch_size: Annotated[int, Field(ge=2)] = 128
    """Pairs per step over all workers of a group. A default or packaged value is lowered if it leaves fewer than ten steps in a
    phase."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] = 10
    """Passes over the pairs: 10 for STS, 15 for binary tasks."""
    lr: Annotated[float, Field(gt=0, le=1)] = 5e-5
    """Peak learning rate of AdamW."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of steps with a linearly rising learning rate; then it falls linearly to 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""


class CrossSection(LoopSection):
    """Training of cross-encoders on the bi-encoders' labels: binary cross-entropy with soft labels."""

    batch_size: Annotated[int, Field(ge=2)] = 32
    """Pairs per step over all workers of a group; lowered as that of `bi` is."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] = 1
    """Passes over the pairs: 1 for STS, 3 for binary tasks."""
    lr: Annotated[float, Field(gt=0, le=1)] = 2e-5
    """Peak learning rate of AdamW."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of steps with a linearly rising learning rate; then it falls linearly to 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""
    max_length: Annotated[int, Field(ge=8, le=8192)] = 64
    """Maximum tokens per pair, in training, labeling and the saved model."""
    both_orders: bool = True
    """Train on each pair in both orders; labels are computed in one."""


class LoopOverrides(Section):
    """One group's own settings; null takes the run's value."""

    batch_size: Annotated[int, Field(ge=2)] | None = None
    """Pairs per step over all workers of the group; 64 for the paper's large bi-encoders."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Passes over the pairs."""
    lr: Annotated[float, Field(gt=0, le=1)] | None = None
    """Peak learning rate of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Decoupled weight decay of matrices; biases and norms have none."""
    warmup: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of steps with a linearly rising learning rate; then it falls linearly to 0."""
    gradient_clipping: Annotated[float, Field(ge=0)] | None = None
    """Maximum norm of the gradient; 0 disables clipping."""
    gradient_accumulation: Annotated[int, Field(ge=1)] | None = None
    """Steps whose gradients are averaged per optimizer step; lists stay `batch_size` long."""
    precision: Precision | None = None
    """Precision of training; `auto` depends on this group's devices alone."""
    engine: Literal["auto", "deepspeed", "torch"] | None = None
    """`auto` is PyTorch with CUDA graphs or without DeepSpeed, else DeepSpeed."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """DeepSpeed ZeRO stage; 0 is fastest for small students."""
    cuda_graphs: Literal["auto", "on", "off"] | None = None
    """Capture steps as CUDA graphs."""

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _switches_are_text(cls, value: object) -> object:
        return switch_text(value)

    @property
    def named(self) -> dict[str, Any]:
        """The keys that are set, with their values."""
        return {key: value for key, value in self if value is not None}

    def over(self, section: L) -> L:
        """Return the run's section with the values that are set here."""
        return section.model_copy(update=self.named)


class CrossOverrides(LoopOverrides):
    """One group's own settings of cross-encoders; null takes the run's value."""

    max_length: Annotated[int, Field(ge=8, le=8192)] | None = None
    """Maximum tokens per pair, in training, labeling and the saved model."""
