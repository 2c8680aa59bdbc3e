"""Resolve a model's name to a local folder (from disk, object storage, a package or the hub), and fingerprint it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from distcse.compat import fix_of_hub_error
from distcse.devices.host import PACKAGE, path_in_package
from distcse.errors import ModelNotFoundError, first_line
from distcse.recipe.names import hub_id
from distcse.storage import ArtifactStore, Digest, checksum, open_store

CONFIG_FILE = "config.json"

_ADDRESS = re.compile(r"\w+://\S+")

_MODEL_FILES = (".safetensors", ".json", ".txt", ".model", ".tiktoken")
"""Suffixes of the files from which a model and its tokenizer are loaded; with its code, also `.py`."""
_HUB_FILES = [*(f"*{suffix}" for suffix in _MODEL_FILES), "1_Pooling/*", "2_Normalize/*", "README.md"]
"""The last one has the license and the language that a student's card inherits."""
_IGNORED_HUB_FILES = [
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.h5",
    "*.msgpack",
    "*.onnx",
    "*.pkl",
    "onnx/*",
    "openvino/*",
]
_NOT_FINGERPRINTED = ("README", "train_script", "data_config", "results", "trainer_state", "recipe")


def resolve_model(
    name: str, trust_remote_code: bool = False, wanted: Sequence[str] | None = None, only_local: bool = False
) -> Path:
    """Return the local folder of a model, after downloading it if necessary.

    The name is a folder, a URI of object storage, `package:NAME/FOLDER` inside an installed package, which is not imported, or a
    hub id. Of the hub only safetensors, configuration and tokenizer are downloaded, and Python files if they are trusted.
    """
    try:
        name = hub_id(name)
    except ValueError as error:
        raise ModelNotFoundError(str(error)) from None
    if name.startswith(PACKAGE):
        return _in_package(name)
    store = open_store(name)
    if store.is_remote:
        return _from_storage(store)
    folder = store.path.expanduser()
    if os.path.isdir(folder):  # Path.is_dir raises for an overlong name
        if (folder / "recipe.yaml").is_file() and not (folder / CONFIG_FILE).is_file():
            raise ModelNotFoundError(f"{folder} is a run's folder; write its model's folder, {folder / 'model'}")
        return folder.absolute()
    if os.path.isfile(folder):
        raise ModelNotFoundError(f"model {folder} is a file; write its folder, {folder.parent}")
    if not is_hub_id(name):
        is_page = name.startswith(("huggingface.co/", "hf.co/"))
        way_out = f"write https://{name} for the model on the hub" if is_page else "correct the path"
        raise ModelNotFoundError(f"no model folder {folder.absolute()}; {way_out}")
    return fetch_from_hub(name, [*(wanted or _HUB_FILES), *(["*.py"] if trust_remote_code else [])], only_local)


def is_hub_id(name: str) -> bool:
    """Return whether a model's name is a hub id, and not an existing file or folder, a package, a URI or a path."""
    if name.startswith((PACKAGE, ".", "/", "~")) or name.count("/") > 1 or (os.sep != "/" and os.sep in name):
        return False
    return not os.path.exists(name)


def model_fingerprint(name: str | Path, trust_remote_code: bool = False) -> str:
    """Return a hash of all that can change a model's outputs: weights, configuration, tokenizer, pooling, code that runs."""
    folder, digest = resolve_model(str(name), trust_remote_code), Digest()
    configs = [config for kind in (CONFIG_FILE, "tokenizer_config.json") for config in folder.rglob(kind)]
    runs_code = trust_remote_code and any(b'"auto_map"' in config.read_bytes() for config in configs)
    if runs_code:
        digest.update(b"code\0")
    suffixes = (*_MODEL_FILES, ".py") if runs_code else _MODEL_FILES
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        path = file.relative_to(folder).as_posix()
        if path.endswith(suffixes) and not path.startswith((*_NOT_FINGERPRINTED, "distcse/")):
            digest.update(f"{path}\0{checksum(file)}\0".encode())
    return digest.hexdigest()


def _in_package(name: str) -> Path:
    try:
        folder = path_in_package(name)
    except LookupError as error:
        raise ModelNotFoundError(f"{name}: {error.args[0]}") from None
    if not os.path.isdir(folder):
        package, _, inside = name.removeprefix(PACKAGE).partition("/")
        raise ModelNotFoundError(f"{name}: package {package!r} has no folder {inside!r}")
    return folder


def _from_storage(store: ArtifactStore) -> Path:
    if store.fetch_folder():
        return store.path
    if store.fetch("recipe.yaml"):
        raise ModelNotFoundError(f"{store} is a run's folder; write its model's folder, {store / 'model'}")
    raise ModelNotFoundError(f"{store} contains no model that distcse stored; copy other models to a local folder")


def fetch_from_hub(name: str, wanted: Sequence[str], only_local: bool) -> Path:
    """Return the cached snapshot of a model on the hub, with the wanted files; `only_local` downloads nothing."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                name, allow_patterns=list(wanted), ignore_patterns=_IGNORED_HUB_FILES, local_files_only=only_local
            )
        )
    except Exception as error:  # the hub's client raises many types, and all mean that the download failed
        fix = fix_of_hub_error(error, "write a local folder") or "check the name, or write a local folder"
        raise ModelNotFoundError(
            f"model {name!r} is not a local folder and cannot be downloaded from the hub ({type(error).__name__}: "
            f"{first_line(error)}); {fix}"
        ) from error


def shown_name(model: str) -> str:
    """Return a name for readers elsewhere: of a folder or an address, the last part of its path, without host or bucket."""
    if _ADDRESS.fullmatch(model):
        address = urlsplit(model)
        path = PurePosixPath(address.path)
        if not path.name:
            return address.scheme
    elif os.path.isabs(model) and PurePosixPath(model).name:
        path = PurePosixPath(model)
    else:
        return model
    return f"{path.parent.name}/{path.name}" if path.name == "model" and path.parent.name else path.name
