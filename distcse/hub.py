"""Prepare a model for the Hugging Face hub, and upload it. It imports no PyTorch, so that an upload starts at once."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from distcse.compat import fix_of_hub_error
from distcse.errors import HubUploadError, ModelNotFoundError
from distcse.events import Listener, LogMessage
from distcse.model_source import shown_name
from distcse.recipe.names import hub_id
from distcse.report.progress import open_listener
from distcse.storage import find_model, open_store, resolve_path, to_uri, write_text_atomic

_FILES_WITH_PATHS: dict[str, tuple[Callable[[str], Any], Callable[..., str]]] = {
    "README.md": (str, str),
    "config.json": (json.loads, partial(json.dumps, indent=2)),
    "tokenizer_config.json": (json.loads, partial(json.dumps, indent=2)),
    "distcse/recipe.yaml": (
        yaml.safe_load,
        lambda content: str(yaml.safe_dump(content, sort_keys=False, allow_unicode=True)),
    ),
}
"""Files of a model folder that may contain paths of this machine, and how their texts are read and written: YAML folds long
texts, and JSON escapes their characters."""


@dataclass(frozen=True)
class Upload:
    """A model that was uploaded, or that a dry run prepared."""

    files: list[str]
    megabytes: float
    remarks: list[str]
    """What readers of the model card will miss."""
    address: str | None = None
    """The model's page on the hub; None if it was not uploaded."""


def push(
    model: str | Path,
    to: str,
    *,
    licence: str | None = None,
    private: bool = False,
    dry_run: bool = False,
    listen: Listener | None = None,
) -> Upload:
    """Upload a run's model to the Hugging Face hub in one commit: weights, tokenizer, card and recipe; no text, no checkpoints.

    Paths of this machine, buckets and hosts are removed from its texts. The login is HF_TOKEN or that of `hf auth login`.

    Args:
        model: A run's folder or a model's, or the address of either in object storage.
        to: USER/NAME on the hub; created if it does not exist.
        licence: License to write into the card, such as `apache-2.0`. Default: unchanged.
        private: Whether a new model is seen by you alone. Default: False.
        dry_run: Prepare the model, and upload nothing. Default: False.
        listen: Receives a warning for each thing that readers of the card will miss. Default: warns on standard error.

    Raises:
        ModelNotFoundError: The folder has no model, several models, or a pickled one.
        HubUploadError: `to` is no name on the hub, or the hub refuses the upload or cannot be reached.
    """
    name = _hub_name(to)
    with tempfile.TemporaryDirectory() as folder, open_listener(listen) as emit:
        bundle = prepare_upload(resolve_path(model), Path(folder) / "model", licence)
        for remark in bundle.remarks:
            emit(LogMessage(remark, warning=True))
        return bundle if dry_run else replace(bundle, address=_upload(Path(folder) / "model", name, private))


def _hub_name(name: str) -> str:
    try:
        found = hub_id(name)
    except ValueError as error:
        raise HubUploadError(f"--to: {error}") from None
    if found.count("/") != 1 or not all(found.split("/")):
        raise HubUploadError(f"--to {found} is not a name on the hub; write USER/NAME")
    return found


def prepare_upload(model: Path, target: Path, licence: str | None = None) -> Upload:
    """Copy a model folder, and remove paths of this machine, buckets and hosts from its texts."""
    store = open_store(find_model(to_uri(model)))
    store.fetch_folder()
    folder = store.path
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ModelNotFoundError(
            f"{store} contains no model (config.json and safetensors); name a run's or a model's folder"
        )
    shutil.copytree(folder, target)
    recipe = target / "distcse" / "recipe.yaml"
    private = list(_private_names(yaml.safe_load(recipe.read_text(encoding="utf-8")))) if recipe.is_file() else []
    for file, (read, dump) in ((target / name, form) for name, form in _FILES_WITH_PATHS.items()):
        if file.is_file():
            content = read(file.read_text(encoding="utf-8"))
            if (shared := _without(private, content)) != content:
                write_text_atomic(file, dump(shared))
    remarks = _card(target / "README.md", licence)
    found = sorted(file for file in target.rglob("*") if file.is_file())
    size = sum(file.stat().st_size for file in found) / 1e6
    return Upload([file.relative_to(target).as_posix() for file in found], size, remarks)


def _upload(folder: Path, name: str, private: bool) -> str:
    """Upload a folder in one commit, and return the model's address."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    hub = HfApi()
    try:
        hub.create_repo(name, private=private, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="A student of distcse")
    except Exception as error:  # the hub's client raises errors of many types
        reason = " ".join(str(error).split())
        fix = fix_of_hub_error(error, "push from a machine with one", "write access") or "correct what the reason names"
        raise HubUploadError(f"{name} was not uploaded ({type(error).__name__}: {reason}); {fix}") from error
    return f"{hub.endpoint}/{name}"


def _private_names(value: Any) -> Iterator[str]:
    """Yield the absolute paths and addresses in a recipe."""
    if isinstance(value, str):
        if shown_name(value) != value:
            yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _private_names(part)


def _without(private: Sequence[str], value: Any) -> Any:
    """Apply `shorten_paths` to all texts in a value."""
    if isinstance(value, dict):
        return {key: _without(private, part) for key, part in value.items()}
    if isinstance(value, list):
        return [_without(private, part) for part in value]
    return shorten_paths(private, value) if isinstance(value, str) else value


def shorten_paths(private: Sequence[str], text: str) -> str:
    """Replace paths and addresses by what `shown_name` leaves of them; only complete ones: /data is no part of /data-2."""
    for name in sorted(private, key=len, reverse=True):
        text = re.sub(rf"(?<![\w./-]){re.escape(name)}(?![\w-]|\.\w)", lambda found: shown_name(found[0]), text)
    return text


def _card(card: Path, licence: str | None) -> list[str]:
    """Write the license into a model card; return remarks about what the card lacks."""
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
        else ["the model card has no license; add --license ID (text, backbone and teachers limit the choice)"]
    )
