"""The encoders of a recipe: who learns, who teaches, and the actors that host teachers."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from distcse.recipe.own import ClassPath, CustomKwarg
from distcse.recipe.section import FrozenPrecision, Gpus, Labels, Section, decided

Pooling = Literal["cls", "mean", "max", "last_token", "first_last_avg", "last_two_avg", "mask"]
Projection = Literal["tanh_mlp", "batch_norm_mlp", "none"]


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
    layers: list[Annotated[int, Field(ge=0)]] | Literal["auto"] | None = None
    """Indices of the backbone's layers to keep, ascending: [0, 2, 4] makes a three-layer student. `auto` (a student's, with
    `depth`) tries which ones agree best with the teachers before anything is learned."""
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Dropout of the backbone in training; null keeps the backbone's own."""

    @property
    def named_layers(self) -> list[int] | None:
        """The layers to keep, where they are named."""
        return self.layers if isinstance(self.layers, list) else None

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
        if isinstance(self.layers, list) and (not self.layers or sorted(set(self.layers)) != self.layers):
            raise ValueError(f"layers must be ascending and distinct, such as [0, 2, 4]; got {self.layers}")
        return self


class StudentSection(TrainedSection):
    """The encoder that learns from lists."""

    num_layers: Annotated[int, Field(ge=1)] | None = None
    """Layers to keep where `layers` is `auto`; null elsewhere."""
    embedding_size: Annotated[int, Field(ge=2)] | None = None
    """Numbers of a word embedding, by principal components of the backbone's: for very small students, most of whose weights
    are vocabulary. The saved model is an ELECTRA then. null keeps the backbone's."""
    init_weight_mix: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the weights it began with in the student that is scored and saved (WiSE-FT, Wortsman et al. 2022, Eq. 1). Training
    itself goes on from what was learned. 0 saves that alone."""
    projection: Projection = "tanh_mlp"
    """Head between the pooled vector and the objective. In training only; never saved."""

    @model_validator(mode="after")
    def _depth_belongs_to_auto(self) -> Self:
        if (self.layers == "auto") != (self.num_layers is not None):
            raise ValueError(
                f"layers is {self.layers} and num_layers {self.num_layers}; write layers: auto with num_layers: 3 (or another number), or "
                "name the layers without a num_layers"
            )
        return self


class EndpointSection(Section):
    """An OpenAI-compatible embeddings endpoint."""

    url: str
    """Its base, such as http://host:8080/v1; `/embeddings` is asked. The teacher's `backbone` is the model's name there."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the key, where one is needed; the key itself is in no recipe."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Sentences of one request."""
    connections: Annotated[int, Field(ge=1)] = 4
    """Requests under way at a time."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to wait for an answer."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Attempts after a lost connection or an answer such as 429 or 503, the pause doubling from half a second."""

    @field_validator("url")
    @classmethod
    def _is_a_base_without_secrets(cls, url: str) -> str:
        """What is refused for a secret is not repeated: messages end in logs."""
        scheme, _, rest = url.rpartition("://")
        if "@" in rest.partition("/")[0]:
            raise ValueError(
                "url holds a user's name or password; take it out, and give the key in api_key_env's variable"
            )
        base = url.rstrip("/").removesuffix("/embeddings")
        if scheme not in ("http", "https"):
            raise ValueError(f"{url!r} is no address; write one such as http://host:8080/v1")
        if base != url:
            raise ValueError(f"{url!r} ends in what distcse adds; write {base}")
        return url

    @field_validator("api_key_env")
    @classmethod
    def _is_a_variable(cls, name: str) -> str:
        """What is refused is not repeated: it may be the key itself."""
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            raise ValueError(
                "api_key_env is no name of an environment variable (capitals, digits, _); the key itself belongs in no recipe"
            )
        return name


class TeacherSection(EncoderSection):
    """One frozen teacher: an encoder, a cross-encoder (its folder says so), an endpoint, or a class of your own."""

    endpoint: EndpointSection | None = None
    """Where the teacher is asked over HTTP instead of being loaded."""
    class_path: ClassPath | None = None
    """`module:Class` of a custom kind of teacher ([how to write one](../how-to/extend.md)); `backbone` is then its name."""
    kwargs: dict[str, CustomKwarg] = Field(default_factory=dict)
    """What `class_path` is made with, by name."""

    alpha: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this teacher's cosines. Weights are divided by their sum: 1 and 2 are the paper's α = 1/3 and
    1 − α (RankCSE §4.4, the unnumbered formula)."""
    alpha_by_domain: dict[str, Annotated[float, Field(ge=0)]] | None = None
    """Weights in its place in lists for rows of a domain (`corpus.domain`): {legal: 3, news: 0}; alpha for any other."""
    similarity: Literal["cosine", "rank"] = "cosine"
    """What a list holds: cosines, or rank-space similarities (RankEncoder Eq. 4) among `num_references` sentences."""
    num_references: Annotated[int, Field(ge=2)] = 100_000
    """Sentences of the corpus that a rank-space teacher orders, drawn alike for every seed; all of a smaller corpus."""
    rank_method: Literal["sort", "histogram"] = "sort"
    """How a rank-space teacher orders them: exactly, or by counting into 65,536 bins, which takes less time among tens of
    thousands and moves a similarity by 1e-5 at most (1e-6 among 100,000)."""
    precision: FrozenPrecision = "auto"
    """Arithmetic of the frozen forward pass, and on a GPU its weights, which take half the memory then. fp16 moves cosines by up
    to 6e-4, bf16 by 4e-3 (MiniLM, 512 sentences); tables are stored in fp16 either way. `auto` is bf16 where all devices that may
    host this teacher have fast bf16 units, else fp32."""

    @property
    def forward_precision(self) -> str:
        """The decided precision; fp32 for a teacher that is not loaded here. `ValueError` while it is still `auto`."""
        return decided(self.precision) if self.is_model else "fp32"

    @property
    def is_model(self) -> bool:
        """Whether `backbone` names a model that is loaded: neither one behind an endpoint nor one of your own."""
        return self.endpoint is None and self.class_path is None

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if self.class_path is not None and self.endpoint is not None:
            raise ValueError("class_path and endpoint are two kinds of teacher; keep one of them")
        if self.kwargs and self.class_path is None:
            raise ValueError("kwargs are for a teacher of your own; write class_path: module:Class, or take them away")
        if not self.is_model:
            kind, others = (
                ("class_path", ("max_length", "prompt"))
                if self.class_path
                else ("endpoint", ("max_length", "precision"))
            )
            plain = {name: field.default for name, field in type(self).model_fields.items()}
            if self.precision == "fp32":  # what it comes to for a teacher of these kinds
                plain["precision"] = "fp32"
            if said := [name for name in others if getattr(self, name) != plain[name]]:
                raise ValueError(
                    f"{said[0]} is of a model that is loaded here, and this teacher's {kind} would not hear of it; take it away"
                )
        return self


class TeachersSection(Section):
    """The frozen teachers and the actors that host them."""

    encoders: list[TeacherSection] = Field(default_factory=list)
    """The teachers; none leaves the rank term without lists."""
    mode: Literal["auto", "table", "live"] = "auto"
    """`table` embeds the corpus once and serves lists from disk; `live` runs the teacher for every list; `auto` is
    `table` wherever the rows are fixed. A cross-encoder has no vectors and always runs live."""
    embedding_workers: Annotated[int, Field(ge=1)] | None = None
    """Actors that embed the corpus side by side; null takes one for every CPU (or GPU) of the cluster."""
    gpus_per_actor: Gpus | None = None
    """GPUs, or a fraction of one, for each embedding actor and each server that answers live or in rank space; null gives an
    embedding actor a whole one where there are any, and a server, which works beside the students, none."""
    node_labels: Labels | None = None
    """Labels of the nodes that embedding actors and servers are put on; null takes any."""
    num_servers: Annotated[int, Field(ge=1)] = 1
    """List servers of each teacher; workers share them evenly."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Seconds without a sign of life after which a server, an embedding actor or the process of dev scores hangs, and is ended
    and started again. It gives signs while it works, however long a list or a shard takes."""
    prefetch_steps: Annotated[int, Field(ge=1, le=1024)] = 32
    """Steps whose lists travel as one object; the next block is always asked for ahead."""
    shard_rows: Annotated[int, Field(ge=1)] = 4096
    """Rows of one table shard: what is lost at most when a builder is killed."""
    rank_noise_group: Annotated[int, Field(ge=2)] | None = None
    """Noise: so many neighbours in a list's order change places at random in every step (DistillCSE's Group-P)."""
    disagreement_scale: Annotated[float, Field(gt=0)] | None = None
    """Pairs on which several teachers disagree count less: by exp(-spread / trust), the spread being the standard deviation
    over teachers of a pair's similarity, in standard deviations of its list. null lets all pairs count alike."""
    tokens_per_batch: Annotated[int, Field(ge=64)] = 4096
    """Tokens in one frozen forward pass."""
