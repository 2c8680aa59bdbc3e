"""Sections that train bi- and cross-encoders on labelled pairs: a run's, and a group's own settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, field_validator

from distcse.recipe.section import Precision, Section, switch_text
from distcse.recipe.training import LoopSection

L = TypeVar("L", bound=LoopSection)
KINDS: tuple[Literal["bi"], Literal["cross"]] = ("bi", "cross")
"""Kinds of encoders that a group trains, by the key of their settings."""


class BiSection(LoopSection):
    """Training of bi-encoders on the cross-encoders' labels: mean squared error of the cosine."""

    batch_size: Annotated[int, Field(ge=2)] = 128
    """Pairs per step over all workers of a group. This default, or a packaged recipe's, is lowered where it would leave fewer
    than ten steps in a phase. A value of yours is kept."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] = 10
    """Passes over the pairs: 10 for STS, 15 for binary tasks."""
    lr: Annotated[float, Field(gt=0, le=1)] = 5e-5
    """Peak learning rate of AdamW."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of steps over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""


class CrossSection(LoopSection):
    """Training of cross-encoders on the bi-encoders' labels: binary cross-entropy with soft labels."""

    batch_size: Annotated[int, Field(ge=2)] = 32
    """Pairs per step over all workers of a group; lowered for few pairs, as that of `bi` is."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] = 1
    """Passes over the pairs: 1 for STS, 3 for binary tasks."""
    lr: Annotated[float, Field(gt=0, le=1)] = 2e-5
    """Peak learning rate of AdamW."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of steps over which the learning rate rises linearly from 0."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    """Decoupled weight decay."""
    max_length: Annotated[int, Field(ge=8, le=8192)] = 64
    """Maximum tokens per pair, in training, in labelling and in the saved model."""
    both_orders: bool = True
    """Train on each pair in both orders. Labels are computed in one order."""


class LoopOverrides(Section):
    """Settings with which one group is trained instead of the run's. A key that is null takes the run's value."""

    batch_size: Annotated[int, Field(ge=2)] | None = None
    """Pairs per step over all workers of the group, such as 64 for large bi-encoders (paper, Table 16)."""
    epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Passes over the pairs."""
    lr: Annotated[float, Field(gt=0, le=1)] | None = None
    """Peak learning rate of AdamW."""
    weight_decay: Annotated[float, Field(ge=0)] | None = None
    """Decoupled weight decay."""
    warmup: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of steps over which the learning rate rises linearly from 0."""
    gradient_clipping: Annotated[float, Field(ge=0)] | None = None
    """Maximum norm of the gradient; 0 disables clipping."""
    gradient_accumulation: Annotated[int, Field(ge=1)] | None = None
    """Steps whose gradients are averaged before each optimiser step."""
    precision: Precision | None = None
    """Precision of the forward and backward passes; `auto` is decided by the devices of this group alone."""
    engine: Literal["auto", "deepspeed", "torch"] | None = None
    """Engine of the training loop."""
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """DeepSpeed ZeRO stage."""
    cuda_graphs: Literal["auto", "on", "off"] | None = None
    """Whether steps are captured as CUDA graphs on a GPU."""

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
    """Settings with which one group's cross-encoders are trained instead of `cross`. A key that is null takes the run's value."""

    max_length: Annotated[int, Field(ge=8, le=8192)] | None = None
    """Maximum tokens per pair, in training, in labelling and in the saved model."""
