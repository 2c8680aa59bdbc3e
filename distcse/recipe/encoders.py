"""Sections of encoders: what all of them have, what a trained one has, and the student."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from distcse.recipe.names import HubName
from distcse.recipe.section import Section

Pooling = Literal["cls", "mean", "max", "last_token", "mask"]
SearchRole = Literal["query", "document"]
Role = Literal[SearchRole, "text"]
"""What a text is to a search: a query, a document that queries find, or neither."""
MaxLength = Annotated[int, Field(ge=4, le=8192)]
RoleLengths = Annotated[dict[Role, MaxLength], Field(min_length=1)]


class EncoderSection(Section):
    """An encoder to load: a backbone and its pooling."""

    backbone: HubName
    """Folder, hub id, or `package:NAME/FOLDER` in an installed package."""
    pooling: Pooling | None = None
    """Pooling of token vectors into a sentence vector; null reads it from the folder."""
    max_length: MaxLength | RoleLengths | None = None
    """Maximum tokens per sentence, special tokens included; `{query: 32, document: 256}` by [role](../how-to/search.md#roles),
    other rows have the longest. null reads it from the folder."""
    prompt: str = ""
    """Text prepended to every sentence, or a template that contains `{sentence}`."""
    prompts: dict[SearchRole, str] = Field(default_factory=dict)
    """Prompts of the rows with these [roles](../how-to/search.md#roles), in place of `prompt`. A role without one here has
    `prompt`, or else the prompt of its name in the folder (for documents also `passage` and `corpus`)."""
    trust_remote_code: bool = False
    """Run Python code from the model's folder. Read that code first."""

    @property
    def role_prompts(self) -> dict[Role, str]:
        """`prompts` of single roles."""
        return {role: prompt for role, prompt in self.prompts.items()}

    @property
    def longest(self) -> int | None:
        """`max_length` of all roles; None where the folder has it."""
        return max(self.max_length.values()) if isinstance(self.max_length, dict) else self.max_length

    @property
    def role_lengths(self) -> dict[Role, int]:
        """`max_length` of single roles."""
        return self.max_length if isinstance(self.max_length, dict) else {}


class TrainedSection(EncoderSection):
    """An encoder that is trained and saved."""

    pooling: Pooling | None = "cls"
    """Pooling of token vectors into a sentence vector, saved with the model; null reads it from the folder."""
    max_length: MaxLength | RoleLengths | None = 32
    """Maximum tokens per sentence, also of the saved model, which has the longest of several roles; null reads it from the
    folder."""
    layers: list[Annotated[int, Field(ge=0)]] | None = None
    """Layers of the backbone to keep, as ascending indices such as [0, 2, 4]; null keeps all."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout probability of the backbone in training; null keeps the backbone's."""

    @model_validator(mode="after")
    def _can_be_saved(self) -> Self:
        if self.pooling == "mask" or any("{sentence}" in prompt for prompt in (self.prompt, *self.prompts.values())):
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


class IndexProjection(Section):
    """A linear map up to a teacher's vectors, trained and saved as the model's last module (EmbedDistill, LEAF)."""

    to: Annotated[int, Field(ge=0)]
    """The teacher's place in `teachers.encoders`, from 0."""


Projection = Literal["tanh_mlp", "batch_norm_mlp", "none"] | IndexProjection


class StudentSection(TrainedSection):
    """The student encoder."""

    init_weight_mix: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Weight of the initial parameters in the evaluated and saved model (WiSE-FT, Wortsman et al. 2022, Eq. 1). Training
    continues from the unmixed ones."""
    projection: Projection = "tanh_mlp"
    """Projection head between pooled vector and objective, in training only and not saved; or `{to: 0}`, a map into
    [a teacher's index](../methods/vector-targets.md#an-index-of-another-width), which is saved."""

    @property
    def index_of(self) -> int | None:
        """The place of the teacher whose index the student searches by a linear map; None without one."""
        return self.projection.to if isinstance(self.projection, IndexProjection) else None
