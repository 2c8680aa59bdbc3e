"""The base of the kinds of teachers, with every question that distcse asks about one; the kinds of models; the registry."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, TypeVar

import torch

from distcse.checks import Check
from distcse.devices.device import HALF_PRECISIONS, default_device
from distcse.errors import UnsuitableTeacherError
from distcse.model_source import CONFIG_FILE
from distcse.models import Encoder, model_fingerprint
from distcse.models.cpu_kernels import use_mkldnn_linear
from distcse.models.folder import find_local_model, overflows_fp16
from distcse.recipe import TeacherSection
from distcse.recipe.section import decided
from distcse.teachers.teacher import Embedder, LiveTeacher, PairScorer, PairTeacher, Teacher
from distcse.text import Corpus

ListSource = Literal["table", "rank", "live"]
"""Where a teacher's lists come from: cosines of its table, rank-space similarities of its table, or its forward passes."""


class TeacherKind(ABC):
    """One teacher of a recipe. A subclass is a kind of teacher, registered with `register_kind`.

    The defaults are those of a teacher that outputs vectors and is not a model folder.
    """

    name: ClassVar[str]
    """The kind's name in the tables of an evaluation."""
    is_model: ClassVar[bool] = False
    """Whether `backbone` names a model to load here: it has a config.json, a tokenizer and a precision."""
    has_vectors: ClassVar[bool] = True
    """Whether it outputs one vector per sentence, so that it can have a table. If not, it scores pairs (`open_scorer`): lists
    live, candidates once."""
    uses_gpu: ClassVar[bool] = True
    """Whether it can compute on a GPU of the process that hosts it."""

    def __init__(self, section: TeacherSection) -> None:
        self.section = section

    @classmethod
    def matches(cls, section: TeacherSection) -> bool:
        """Return whether a section of the recipe selects this kind. Models need no rule: `kind_of` looks at their folder."""
        return False

    @abstractmethod
    def source_fingerprint(self) -> str:
        """Hash what determines the teacher's answers, apart from the section's settings that are part of a table's key."""

    @abstractmethod
    def open_embedder(self) -> Embedder:
        """Create what outputs the vectors, on the default device of this process.

        Pass `precision` to its `encode`.

        Raises:
            UnsuitableTeacherError: The kind has no vectors.
            DistcseError: The teacher cannot be loaded.
        """

    def open_scorer(self) -> PairScorer:
        """Create what scores pairs, on the default device of this process; pass `precision` to it.

        Raises:
            UnsuitableTeacherError: The kind has vectors instead.
            DistcseError: The teacher cannot be loaded.
        """
        raise UnsuitableTeacherError(f"teacher {self.section.backbone} has vectors, and scores no pairs")

    @property
    def source(self) -> str:
        """Where the answers come from: a model's name, a URL, a class."""
        return self.section.backbone

    @property
    def overflows_fp16(self) -> bool:
        """Whether numbers of its forward pass exceed fp16's range, so that `precision: auto` never selects fp16."""
        return False

    @property
    def precision(self) -> str:
        """Precision of the forward pass; fp32 for a teacher that is no model. Raises `ValueError` while it is `auto`."""
        return decided(self.section.precision) if self.is_model else "fp32"

    def list_source(self, mode: str) -> ListSource:
        """Return where its lists come from under `teachers.mode`. `auto` uses a table: a corpus's vectors never change."""
        if mode == "live" or not self.has_vectors:
            return "live"
        return "rank" if self.section.similarity == "rank" else "table"

    def uses_table(self, mode: str) -> bool:
        """Return whether its lists are computed from an embedding table under `teachers.mode`."""
        return self.list_source(mode) != "live"

    @property
    def unread_keys(self) -> Mapping[str, str]:
        """Keys of the section that this kind does not read -> why, in addition to those that the section itself names."""
        return {}

    def check_settings(self) -> None:
        """Check the settings that a recipe cannot check without a look at the model: what a teacher without vectors lacks.

        Raises:
            UnsuitableTeacherError: One is set.
        """
        if self.has_vectors:
            return
        teacher = f"teacher {self.section.backbone} is a {self.name}, which"
        if self.section.similarity == "rank":
            raise UnsuitableTeacherError(f"{teacher} has no vectors for a rank space; write similarity: cosine")
        if prompt := next((key for key in ("prompt", "prompts") if getattr(self.section, key)), None):
            raise UnsuitableTeacherError(f"{teacher} reads pairs without a prompt; remove {prompt}")

    def open_live(self, corpus: Corpus, tokens_per_batch: int | None) -> Teacher:
        """Create a teacher that computes every list on request, without a table.

        Raises:
            UnsuitableTeacherError: The section asks for something that this kind cannot do.
            DistcseError: The teacher cannot be loaded.
        """
        self.check_settings()
        if self.has_vectors:
            return LiveTeacher(self.open_embedder(), corpus, self.precision, tokens_per_batch)
        return PairTeacher(self.open_scorer(), corpus, self.precision, tokens_per_batch)

    def check_source(self) -> list[Check]:
        """Check, for the doctor, that the source is there. Models are checked together with the student's."""
        return []


class ModelKind(TeacherKind):
    """A teacher whose `backbone` is a model folder, a hub id or a model inside a package."""

    is_model = True

    def source_fingerprint(self) -> str:
        """Hash the model's files."""
        return model_fingerprint(self.section.backbone, self.section.trust_remote_code)

    @property
    def overflows_fp16(self) -> bool:
        """See `distcse.models.folder.overflows_fp16`. False for a model whose config.json would have to be downloaded."""
        folder = find_local_model(self.section.backbone, wanted=[CONFIG_FILE])
        return folder is not None and overflows_fp16(folder)


class PairKind(TeacherKind):
    """A teacher that reads pairs and has no vectors."""

    has_vectors = False

    def open_embedder(self) -> Embedder:
        """Raise `UnsuitableTeacherError`: it has no vectors."""
        raise UnsuitableTeacherError(
            f"teacher {self.section.backbone} is a {self.name}, which has no vectors; use a teacher that has"
        )


def frozen_weight_dtype(precision: str, device: str) -> torch.dtype:
    """Return the data type of a frozen model's matrices, for `halve_matrices`.

    On a GPU it is the precision of the forward passes. On a CPU it is float32, which `use_mkldnn_linear` converts.
    """
    return torch.float32 if device == "cpu" else HALF_PRECISIONS.get(precision, torch.float32)


class BiEncoderKind(ModelKind):
    """A bi-encoder's model folder."""

    name = "bi-encoder"

    def open_embedder(self) -> Embedder:
        """Load the encoder, with weights in the teacher's precision."""
        device = default_device()
        encoder = Encoder.from_section(self.section, frozen_weight_dtype(self.precision, device)).to(device).eval()
        use_mkldnn_linear(encoder, self.precision)
        return encoder


K = TypeVar("K", bound=type[TeacherKind])

TEACHER_KINDS: list[type[TeacherKind]] = []
"""Registered kinds of teachers, in order of registration."""


def register_kind(kind: K) -> K:
    """Register a kind of teacher, which its `matches` selects; a class decorator."""
    TEACHER_KINDS.append(kind)
    return kind
