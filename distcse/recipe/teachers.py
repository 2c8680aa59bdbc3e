"""Recipe sections of the teachers, and of the actors that host them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from distcse.recipe.encoders import EncoderSection
from distcse.recipe.names import ClassPath, CustomKwarg, hub_id
from distcse.recipe.section import FrozenPrecision, Gpus, KeyValueError, Labels, Section, refuse_secrets


class EndpointSection(Section):
    """An OpenAI-compatible embeddings endpoint, or one that scores documents for a query."""

    url: str
    """Base URL, such as http://host:8080/v1, without `/embeddings` or `/rerank`; a query (Azure's `?api-version=…`) is kept.
    `backbone` is the model's name there."""
    api: Literal["embeddings", "rerank", "tei_rerank"] = "embeddings"
    """`embeddings` is OpenAI's; `rerank` that of Cohere, Jina, vLLM and infinity, `tei_rerank` that of text-embeddings-inference:
    a teacher that scores [candidates](../how-to/search.md#candidates), as a cross-encoder does."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable with the API key, if one is needed; never the key itself."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Most sentences per request; halved if the server refuses one as too large."""
    connections: Annotated[int, Field(ge=1)] = 4
    """Concurrent requests."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to wait for a response."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Retries after a lost connection or a status such as 429 or 503, after `Retry-After` (at most 15 minutes), else after 0.5 s,
    doubled each time."""

    @field_validator("url")
    @classmethod
    def _is_a_base_without_secrets(cls, url: str) -> str:
        """Check the URL. An error about a secret does not repeat the value: messages end in logs."""
        refuse_secrets(url, "url", "give the key in api_key_env's variable")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"{url!r} is no address; write one such as http://host:8080/v1")
        path = parts.path.rstrip("/").removesuffix("/embeddings").removesuffix("/rerank")
        if path != parts.path:
            raise ValueError(f"{url!r} ends in what distcse adds; write {parts._replace(path=path).geturl()}")
        return url

    def route(self, name: str) -> str:
        """Return the address of a route below the base URL, such as `embeddings`, with the URL's query."""
        parts = urlsplit(self.url)
        return parts._replace(path=f"{parts.path}/{name}").geturl()

    @field_validator("api_key_env")
    @classmethod
    def _is_a_variable(cls, name: str) -> str:
        """Check the variable's name. The error does not repeat the value, which may be the key itself."""
        if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
            raise ValueError(
                "api_key_env is no name of an environment variable (capitals, digits, _); the key itself belongs in no recipe"
            )
        return name


_IGNORED_KEYS = {"class_path": ("max_length", "prompt", "prompts"), "endpoint": ("max_length", "precision")}
"""By the key that selects a kind of teacher which is no model: keys of `TeacherSection` that do not apply to it."""


class TeacherSection(EncoderSection):
    """One frozen teacher: a bi-encoder or cross-encoder, an endpoint, or a custom class."""

    backbone: str
    """Folder, hub id, or `package:NAME/FOLDER`; with `endpoint` the model's name there, with `class_path` any name."""
    endpoint: EndpointSection | None = None
    """HTTP endpoint that computes the vectors or scores; null loads the model."""
    class_path: ClassPath | None = None
    """`module:Class` of a [custom teacher](../how-to/extend.md#add-a-kind-of-teacher)."""
    kwargs: dict[str, CustomKwarg] = Field(default_factory=dict)
    """Arguments of its constructor."""

    engine: Literal["torch", "vllm"] = "torch"
    """What computes a bi-encoder's vectors for training: PyTorch, or [vLLM](../how-to/teachers.md#vllm)."""

    alpha: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this teacher's cosines, divided by the sum over teachers: 1 and 2 are RankCSE's α = 1/3 and 1 − α (§4.4)."""
    similarity: Literal["cosine", "rank"] = "cosine"
    """Similarity in the lists: cosine, or rank-space similarity (RankEncoder Eq. 4)."""
    num_references: Annotated[int, Field(ge=2)] = 100_000
    """Corpus sentences that a rank-space teacher ranks, the same for every seed; at most all."""
    rank_method: Literal["sort", "histogram"] = "sort"
    """`sort` is exact; `histogram` counts into 65,536 bins: faster on CPUs from tens of thousands of sentences, off by at most
    1e-5 (1e-6 for 100,000). GPUs sort."""
    precision: FrozenPrecision = "auto"
    """Precision of the forward pass; tables are always fp16. fp16 changes cosines by up to 3.3e-4, bf16 by 2.6e-3
    ([table](../explanation/gpus.md#precision-of-teachers)). `auto` is fp16 if only GPUs may host this teacher (bf16 for T5 and
    Gemma), bf16 where all devices have fast bf16 units, else fp32."""

    @property
    def loads_model(self) -> bool:
        """Whether `backbone` names a model that is loaded here, and not only what an endpoint or a class is called."""
        return self.endpoint is None and self.class_path is None

    @property
    def unread_keys(self) -> Mapping[str, str]:
        ranks = (
            {}
            if self.similarity == "rank"
            else dict.fromkeys(("num_references", "rank_method"), "similarity is cosine")
        )
        kind = next((key for key in _IGNORED_KEYS if getattr(self, key) is not None), None)
        model = ("pooling", "trust_remote_code", "engine")
        return (
            ranks
            if kind is None
            else {**ranks, **dict.fromkeys(model, f"{kind} gives the vectors, and no model is loaded")}
        )

    @model_validator(mode="before")
    @classmethod
    def _backbone_is_an_id(cls, section: Any) -> Any:
        """Take the id in an address on the hub; a model that is not loaded may have an address as its name."""
        is_section = isinstance(section, dict) and isinstance(section.get("backbone"), str)
        if not is_section or any(section.get(kind) is not None for kind in _IGNORED_KEYS):
            return section
        try:
            return {**section, "backbone": hub_id(section["backbone"])}
        except ValueError as error:
            raise KeyValueError("backbone", str(error)) from None

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        selected = [key for key in _IGNORED_KEYS if getattr(self, key) is not None]
        if len(selected) > 1:
            raise ValueError(f"{selected[0]} and {selected[1]} are two kinds of teacher; keep one of them")
        if self.kwargs and self.class_path is None:
            raise ValueError("kwargs are for a custom teacher; write class_path: module:Class, or remove them")
        for kind in selected:
            plain = {
                name: field.get_default(call_default_factory=True) for name, field in type(self).model_fields.items()
            }
            if self.precision == "fp32":  # the resolved precision of these kinds
                plain["precision"] = "fp32"
            if ignored := [name for name in _IGNORED_KEYS[kind] if getattr(self, name) != plain[name]]:
                raise ValueError(
                    f"{ignored[0]} applies to a model that is loaded here, and this teacher's {kind} ignores it; remove it"
                )
        return self


class TeachersSection(Section):
    """The frozen teachers and their actors."""

    encoders: list[TeacherSection] = Field(default_factory=list)
    """The teachers; without any, terms that need them must be null."""
    mode: Literal["auto", "table", "live"] = "auto"
    """`table` embeds the corpus once and reads vectors from disk; `live` runs the teacher for every list, like cross-encoders.
    `auto` is `table` for teachers that have vectors."""
    serve: Literal["auto", "actor"] = "auto"
    """Where lists are computed from tables: `auto` in training workers, `actor` in servers on CPUs (without Ray, a thread),
    equal bitwise on CPUs and to 1e-6 on GPUs. Live, cross-encoder and rank-space teachers always have servers."""
    embedding_workers: Annotated[int, Field(ge=1)] | None = None
    """Actors that embed the corpus in parallel; null starts one per CPU (or GPU) of the cluster."""
    gpus_per_actor: Gpus | None = None
    """GPUs, or a fraction, of each embedding actor and live or rank-space server. null: one for actors, a quarter for servers,
    where nodes have GPUs."""
    node_labels: Labels | None = None
    """Node labels that embedding actors and servers require; null is any node."""
    num_servers: Annotated[int, Field(ge=1)] = 1
    """List servers per teacher, shared evenly by the workers."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Seconds without a heartbeat until a server, embedding actor or dev-score process is restarted. Heartbeats continue during
    long work."""
    prefetch_steps: Annotated[int, Field(ge=1, le=1024)] = 32
    """Steps whose lists or vectors are one block; the next block is always prefetched."""
    shard_rows: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows per table shard, the most that a killed embedding actor loses. `auto` is 4,096, doubled until at most 2,500 shards
    result."""
    tokens_per_batch: Annotated[int, Field(ge=64)] | None = None
    """Tokens per forward pass, with padding; halved when a GPU runs out of memory. null is 2,048 on a CPU, 65,536 on a GPU."""
