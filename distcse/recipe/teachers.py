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
    """An OpenAI-compatible embeddings endpoint."""

    url: str
    """Base URL, such as http://host:8080/v1; requests go to its `/embeddings`, before a query (Azure's
    `?api-version=…`). The teacher's `backbone` is the model name there."""
    api_key_env: str = "OPENAI_API_KEY"
    """Environment variable that holds the API key, if the endpoint needs one. Recipes never contain the key."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Sentences per request, at most. A request that the server finds too large is halved, and so are later ones."""
    connections: Annotated[int, Field(ge=1)] = 4
    """Concurrent requests."""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """Seconds to wait for a response."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Retries after a lost connection or a status such as 429 or 503. The delay is what the server asks for (`Retry-After`, at
    most 15 minutes), or else starts at 0.5 s, times 2 for each retry."""

    @field_validator("url")
    @classmethod
    def _is_a_base_without_secrets(cls, url: str) -> str:
        """Check the URL. An error about a secret does not repeat the value: messages end in logs."""
        refuse_secrets(url, "url", "give the key in api_key_env's variable")
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"{url!r} is no address; write one such as http://host:8080/v1")
        path = parts.path.rstrip("/").removesuffix("/embeddings")
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


_IGNORED_KEYS = {"class_path": ("max_length", "prompt"), "endpoint": ("max_length", "precision")}
"""By the key that selects a kind of teacher which is no model: keys of `TeacherSection` that do not apply to it."""


class TeacherSection(EncoderSection):
    """One frozen teacher: a bi-encoder or a cross-encoder (read from its folder), an endpoint, or a custom class."""

    backbone: str
    """Folder, hub id, or `package:NAME/FOLDER` for a model inside an installed Python package. With `endpoint`, the model's
    name there; with `class_path`, any name."""
    endpoint: EndpointSection | None = None
    """HTTP endpoint that computes the embeddings; null loads the model."""
    class_path: ClassPath | None = None
    """`module:Class` of a custom teacher ([how to write one](../how-to/extend.md)); `backbone` is then its name."""
    kwargs: dict[str, CustomKwarg] = Field(default_factory=dict)
    """Keyword arguments of `class_path`'s constructor."""

    alpha: Annotated[float, Field(gt=0)] = 1.0
    """Weight of this teacher's cosines, divided by the sum over teachers: 1 and 2 are the paper's α = 1/3 and 1 − α (RankCSE
    §4.4, the unnumbered formula)."""
    similarity: Literal["cosine", "rank"] = "cosine"
    """Similarity in the lists: cosine, or rank-space similarity (RankEncoder Eq. 4) over `num_references` sentences."""
    num_references: Annotated[int, Field(ge=2)] = 100_000
    """Corpus sentences that a rank-space teacher ranks: the same for every seed, and all of a smaller corpus."""
    rank_method: Literal["sort", "histogram"] = "sort"
    """How a rank-space teacher ranks them: `sort` is exact; `histogram` counts into 65,536 bins, which is faster on CPUs for
    tens of thousands of sentences and changes a similarity by at most 1e-5 (1e-6 for 100,000). GPUs sort in either case."""
    precision: FrozenPrecision = "auto"
    """Precision of the frozen forward pass and, on a GPU, of its matrices. fp16 changes cosines by up to 3.3e-4, bf16 by 4e-3
    ([how measured](../explanation/gpus.md#precision-of-teachers)); tables are stored in fp16 either way. `auto` is fp16 if
    only GPUs may host this teacher (bf16 for T5 and Gemma), bf16 where all devices have fast bf16 units, else fp32."""

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
        model = ("pooling", "trust_remote_code")
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
            plain = {name: field.default for name, field in type(self).model_fields.items()}
            if self.precision == "fp32":  # the resolved precision of these kinds
                plain["precision"] = "fp32"
            if ignored := [name for name in _IGNORED_KEYS[kind] if getattr(self, name) != plain[name]]:
                raise ValueError(
                    f"{ignored[0]} applies to a model that is loaded here, and this teacher's {kind} ignores it; remove it"
                )
        return self


class TeachersSection(Section):
    """The frozen teachers and the actors that host them."""

    encoders: list[TeacherSection] = Field(default_factory=list)
    """The teachers; without any, terms that need teachers must be null."""
    mode: Literal["auto", "table", "live"] = "auto"
    """`table` embeds the corpus once and serves lists from disk; `live` runs the teacher for every list; `auto` is `table`
    wherever the rows are fixed. Cross-encoders have no sentence vectors and always run live."""
    serve: Literal["auto", "actor"] = "auto"
    """Where lists of cosines from a table are computed. `auto`: in every training worker, which reads the vectors of its rows
    and gathers those of the others. `actor`: in servers, on CPUs; without Ray, in a thread of this process. Lists are bitwise
    equal on CPUs, and to 1e-6 on GPUs. Live, cross-encoder and rank-space teachers always have servers."""
    embedding_workers: Annotated[int, Field(ge=1)] | None = None
    """Actors that embed the corpus in parallel; null starts one per CPU (or GPU) of the cluster. Those that find none free
    wait without work, and take part once there is one."""
    gpus_per_actor: Gpus | None = None
    """GPUs, or a fraction of one, of each embedding actor and of each server that runs live or in rank space. null assigns
    embedding actors one GPU each, and servers, which run during training, a quarter of one, where the nodes have GPUs."""
    node_labels: Labels | None = None
    """Node labels that embedding actors and servers require; null allows any node."""
    num_servers: Annotated[int, Field(ge=1)] = 1
    """List servers per teacher; workers are distributed evenly over them."""
    heartbeat_timeout_s: Annotated[float, Field(gt=0)] = 60
    """Seconds without a heartbeat before a server, an embedding actor or the dev-score process counts as hung and is killed
    and restarted. Heartbeats are sent during work, however long a list or a shard takes."""
    prefetch_steps: Annotated[int, Field(ge=1, le=1024)] = 32
    """Steps whose lists are sent, or whose vectors a worker reads, as one block; the next block is always prefetched."""
    shard_rows: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Rows per table shard, which is the most work lost when an embedding actor is killed. `auto` is 4,096 for up to 2,500
    shards, and twice that, four times that, … for more rows, because a process keeps a limited number of shards open."""
    tokens_per_batch: Annotated[int, Field(ge=64)] | None = None
    """Tokens per forward pass of a teacher, with padding. null is 2,048 on a CPU and 65,536 on a GPU; a GPU that runs out of
    memory continues with half, and logs it."""
