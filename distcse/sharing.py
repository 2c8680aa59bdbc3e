"""A model made ready to be given away, and given to the hub."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from distcse.errors import HubUploadError, ModelNotFoundError
from distcse.files import write_text_atomic
from distcse.storage import fetch_folder, is_uri, model_of, resolve_path, to_uri

_TOLD_IN = ("README.md", "config.json", "distcse/recipe.yaml")
"""Files of a model folder that may name places of the machine it was made on."""


@dataclass(frozen=True)
class UploadBundle:
    """A folder that holds what is uploaded."""

    folder: Path
    files: list[str]
    megabytes: float
    remarks: list[str]
    """What a reader of the card will miss."""


def prepare(model: Path, beside: Path, licence: str | None = None) -> UploadBundle:
    """Copy a model folder (a run's model, or one that is named) without the names of this machine's folders.

    Args:
        model: A run's folder, or a model's.
        beside: A folder to be made.
        licence: Written into the card.

    Raises:
        EncoderError: It holds no model, or several, or one that is pickled.
    """
    folder = resolve_path(model_of(to_uri(model)))
    fetch_folder(folder)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"{to_uri(folder)} holds no model (config.json and safetensors); name a run's folder, or a model's"
        )
    shutil.copytree(folder, beside)
    places = sorted(_places(beside / "distcse" / "recipe.yaml"), key=len, reverse=True)
    for file in (beside / name for name in _TOLD_IN):
        if file.is_file():
            write_text_atomic(file, _without(places, file.read_text(encoding="utf-8")))
    remarks = _card(beside / "README.md", licence)
    found = sorted(file for file in beside.rglob("*") if file.is_file())
    size = sum(file.stat().st_size for file in found) / 1e6
    return UploadBundle(beside, [file.relative_to(beside).as_posix() for file in found], size, remarks)


def upload(parcel: UploadBundle, name: str, private: bool = False) -> str:
    """Put a parcel on the hub, in one commit. Returns its address there. The token is HF_TOKEN, or the one of `hf auth login`.

    Raises:
        EncoderError: The hub refuses, or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    hub = HfApi()
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=parcel.folder, commit_message="A student of distcse")
    except Exception as refused:  # the hub's client raises a dozen kinds, all of which mean "it did not take it"
        reason = " ".join(str(refused).split())
        raise HubUploadError(
            f"the hub did not take {name} ({type(refused).__name__}: {reason}). If it is about who you are, set HF_TOKEN to a "
            "token that may write, or run hf auth login; HF_HUB_OFFLINE=1 forbids it"
        ) from refused
    return f"{hub.endpoint}/{name}"


def _places(recipe: Path) -> Iterator[str]:
    """Absolute paths and addresses that a recipe names."""
    if not recipe.is_file():
        return
    open_: list[Any] = [yaml.safe_load(recipe.read_text(encoding="utf-8"))]
    while open_:
        value = open_.pop()
        if isinstance(value, str) and (os.path.isabs(value) or is_uri(value)):
            yield value
        elif isinstance(value, dict | list):
            open_.extend(value.values() if isinstance(value, dict) else value)


def _without(places: list[str], text: str) -> str:
    """Only whole paths: /data is not the end of a name on the hub, nor the beginning of another folder's."""
    for whole in places:
        text = re.sub(rf"(?<![\w./-]){re.escape(whole)}(?![\w-]|\.\w)", lambda found: Path(found[0]).name, text)
    return text


def _card(card: Path, licence: str | None) -> list[str]:
    """Write the licence into a card; what it lacks."""
    if not card.is_file():
        return ["there is no card (README.md): readers will not know what this model is"]
    text = card.read_text(encoding="utf-8")
    if not text.startswith("---\n"):
        return ["the card has no metadata (front matter): the hub will not know what this model is"]
    head, _, body = text.removeprefix("---\n").partition("---\n")
    metadata = yaml.safe_load(head) or {}
    if licence is not None:
        metadata["license"] = licence
        write_text_atomic(card, f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n{body}")
    return (
        []
        if "license" in metadata
        else ["the card names no licence; --licence ID (text, backbone and teachers bound it)"]
    )
