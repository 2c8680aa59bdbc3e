"""What an experiment writes about a model that it trained: the parts of a model card."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distcse import __version__
from distcse.devices.host import PACKAGE
from distcse.errors import EncoderError, StorageError
from distcse.models import resolve_model
from distcse.storage import is_uri

_INHERITED = ("language", "license", "license_name", "license_link")
"""Metadata that hold for a model because they hold for its initial model."""
USE = """from sentence_transformers import SentenceTransformer

model = SentenceTransformer("path/to/this/folder")
vectors = model.encode(["A sentence.", "Another one."])"""
"""Code of the section Use of an encoder's card."""


@dataclass(frozen=True)
class ModelCard:
    """The card of one model, without its scores: the report adds those of the run's evaluation."""

    model: Path
    """The model's folder."""
    metadata: Mapping[str, Any]
    """The hub's metadata, for the front matter."""
    title: str
    sections: Sequence[str]
    """Markdown before the scores; empty sections are left out."""
    closing: Sequence[str]
    """Markdown after the scores."""
    files: Sequence[Path] = ()
    """Files of the run to copy into the model's folder `distcse/`."""
    evaluated_as: str = "student"
    """The model's name in the run's evaluation, whose scores become metadata."""


def hub_metadata(backbone: str, pipeline: str, tags: Sequence[str], rows: int) -> dict[str, Any]:
    """Return the hub's metadata of a model."""
    return {
        "library_name": "sentence-transformers",
        "pipeline_tag": pipeline,
        "tags": ["sentence-transformers", *tags, "distillation", "distcse", f"dataset_size:{rows}"],
        **base_model(backbone),
        **inherited_metadata(backbone),
    }


def inherited_metadata(backbone: str) -> dict[str, Any]:
    """Return licence and language of an initial model, from the card in its folder; empty without one on this machine."""
    try:
        card = resolve_model(backbone, only_local=True) / "README.md"
    except (EncoderError, StorageError):
        return {}
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    head, separator, _ = text.removeprefix("---\n").partition("\n---")
    if not text.startswith("---\n") or not separator:
        return {}
    try:
        metadata = yaml.safe_load(head)
    except yaml.YAMLError:  # somebody else's card; ours is valid without it
        return {}
    return {key: metadata[key] for key in _INHERITED if key in metadata} if isinstance(metadata, dict) else {}


def base_model(backbone: str) -> dict[str, str]:
    """Return the hub's `base_model` metadata; empty if the initial model is not from the hub."""
    outside_hub = os.path.isabs(backbone) or is_uri(backbone) or backbone.startswith(PACKAGE)
    return {} if outside_hub else {"base_model": backbone}


def usage(code: str) -> str:
    """Return the section that shows how to load the model."""
    return f"## Use\n\n```python\n{code}\n```"


def limits(text: str) -> str:
    """Return the section about limits and licences, with distcse's version."""
    return f"## Limits\n\n{text} Made by distcse {__version__}."
