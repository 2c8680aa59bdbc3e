"""The registry of the kinds of teachers: decides which kind a section of the recipe selects."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from distcse.data import Corpus
from distcse.models import is_cross_encoder, resolve_model
from distcse.models.folder import find_local_model
from distcse.recipe import TeacherSection
from distcse.teachers.kinds.base import TeacherKind
from distcse.teachers.kinds.bi_encoder import BiEncoderKind
from distcse.teachers.kinds.cross_encoder import CrossEncoderKind
from distcse.teachers.teacher import Teacher

K = TypeVar("K", bound=type[TeacherKind])

KINDS: list[type[TeacherKind]] = []
"""Registered kinds of teachers, in order of registration."""


def register_kind(kind: K) -> K:
    """Register a kind of teacher, which its `matches` selects; a class decorator."""
    KINDS.append(kind)
    return kind


def kind_of(section: TeacherSection, only_local: bool = False) -> TeacherKind:
    """Create the teacher that a section of the recipe selects: a registered kind, or else a bi-encoder or cross-encoder.

    No model is loaded. The architecture in a model's config.json tells a cross-encoder from a bi-encoder.

    Args:
        section: The teacher's section.
        only_local: Take a model for a bi-encoder if its config.json would have to be downloaded. Default: False.

    Raises:
        ModelNotFoundError: There is no such model; never with `only_local`.
    """
    registered = next((kind for kind in KINDS if kind.matches(section)), None)
    if registered is not None:
        return registered(section)
    folder = find_local_model(
        section.backbone, section.trust_remote_code
    )  # a model in the hub's cache is not requested from the hub again
    if folder is None and not only_local:
        folder = resolve_model(section.backbone, section.trust_remote_code)
    return CrossEncoderKind(section) if folder is not None and is_cross_encoder(folder) else BiEncoderKind(section)


def open_live(section: TeacherSection, corpus: Path, tokens_per_batch: int | None) -> Teacher:
    """Create a live teacher of the prepared corpus in folder `corpus`; see `TeacherKind.open_live`."""
    return kind_of(section).open_live(Corpus.open(corpus), tokens_per_batch)
