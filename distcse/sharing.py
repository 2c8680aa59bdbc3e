"""Prepare a model for the Hugging Face hub, and upload it."""

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
from distcse.storage import find_model, is_uri, open_store, to_uri, write_text_atomic

_FILES_WITH_PATHS = ("README.md", "config.json", "distcse/recipe.yaml")
"""Files of a model folder that may contain paths of this machine."""


@dataclass(frozen=True)
class UploadBundle:
    """A folder to upload."""

    folder: Path
    files: list[str]
    megabytes: float
    remarks: list[str]
    """What readers of the model card will miss."""


def prepare_upload(model: Path, target: Path, licence: str | None = None) -> UploadBundle:
    """Copy a model folder, and remove the paths of this machine from its texts.

    Args:
        model: A run's or a model's folder.
        target: The copy, a new folder.
        licence: Licence to write into the card. Default: unchanged.

    Returns:
        The copy, with the list of its files.

    Raises:
        ModelNotFoundError: The folder has no model, several models, or a pickled one.
    """
    store = open_store(find_model(to_uri(model)))
    store.fetch_folder()
    folder = store.path
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"{store} contains no model (config.json and safetensors); name a run's or a model's folder"
        )
    shutil.copytree(folder, target)
    local_paths = sorted(_local_paths(target / "distcse" / "recipe.yaml"), key=len, reverse=True)
    for file in (target / name for name in _FILES_WITH_PATHS):
        if file.is_file():
            write_text_atomic(file, shorten_paths(local_paths, file.read_text(encoding="utf-8")))
    remarks = _card(target / "README.md", licence)
    found = sorted(file for file in target.rglob("*") if file.is_file())
    size = sum(file.stat().st_size for file in found) / 1e6
    return UploadBundle(target, [file.relative_to(target).as_posix() for file in found], size, remarks)


def upload(bundle: UploadBundle, name: str, private: bool = False) -> str:
    """Upload a bundle to the hub in one commit, as HF_TOKEN or the login of `hf auth login`.

    Args:
        bundle: From `prepare_upload`.
        name: USER/NAME on the hub; created if it does not exist.
        private: Whether a new model is private.

    Returns:
        The model's address.

    Raises:
        HubUploadError: The hub refuses the upload or cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    hub = HfApi()
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=bundle.folder, commit_message="A student of distcse")
    except Exception as error:  # the hub's client raises errors of many types
        reason = " ".join(str(error).split())
        raise HubUploadError(
            f"the hub refused {name} ({type(error).__name__}: {reason}). Set HF_TOKEN to a token with write access, or run hf "
            "auth login; unset HF_HUB_OFFLINE if it is 1"
        ) from error
    return f"{hub.endpoint}/{name}"


def _local_paths(recipe: Path) -> Iterator[str]:
    """Yield the absolute paths and addresses in a recipe."""
    if not recipe.is_file():
        return
    pending: list[Any] = [yaml.safe_load(recipe.read_text(encoding="utf-8"))]
    while pending:
        value = pending.pop()
        if isinstance(value, str) and (os.path.isabs(value) or is_uri(value)):
            yield value
        elif isinstance(value, dict | list):
            pending.extend(value.values() if isinstance(value, dict) else value)


def shorten_paths(local_paths: list[str], text: str) -> str:
    """Replace each path by its last part; only complete paths: /data is no part of a hub id or of /data-2."""
    for path in local_paths:
        text = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w-]|\.\w)", lambda found: Path(found[0]).name, text)
    return text


def _card(card: Path, licence: str | None) -> list[str]:
    """Write the licence into a model card; return remarks about what the card lacks."""
    if not card.is_file():
        return ["there is no model card (README.md), so readers will not know what this model is; write one"]
    text = card.read_text(encoding="utf-8")
    if not text.startswith("---\n"):
        return ["the model card has no metadata (front matter), which the hub needs; add it"]
    head, _, body = text.removeprefix("---\n").partition("---\n")
    metadata = yaml.safe_load(head) or {}
    if licence is not None:
        metadata["license"] = licence
        write_text_atomic(card, f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---\n{body}")
    return (
        []
        if "license" in metadata
        else ["the model card has no licence; add --licence ID (text, backbone and teachers limit the choice)"]
    )
