"""The files of a model's folder: JSON, and weights that are present, safetensors, complete and unchanged since saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from distcse.errors import (
    EncoderError,
    ModelFormatError,
    ModelNotFoundError,
    PickledWeightsError,
    UnsupportedModelError,
)
from distcse.storage import checksum, dump_checked_json, load_checked_json

WEIGHTS = "model.safetensors"
CHECKSUMS = Path("distcse") / "checksums.json"
_INDEX = f"{WEIGHTS}.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_ADAPTER = "adapter_config.json"
_RESTORE = f"restore it, or if you changed it yourself, remove {CHECKSUMS} in that folder"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(file: Path, kind: type = dict) -> Any:
    """Return the content of a JSON file; an empty object (or list) if the file does not exist."""
    if not file.exists():
        return kind()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, kind):
        raise ModelFormatError(f"{file}: expected a JSON {'object' if kind is dict else 'list'}")
    return content


def leads_outside(name: str) -> bool:
    """Return whether a relative path in a model's file leads out of the model's folder."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def refuse_pointer(file: Path) -> None:
    """Refuse the pointer that a clone without Git LFS has in place of a file."""
    if not file.is_file():
        return
    with file.open("rb") as opened:
        if opened.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise ModelFormatError(
                f"{file} is a Git LFS pointer, not the file; download it: git -C {file.parent} lfs pull"
            )


def write_json(file: Path, content: Any) -> None:
    """Write a JSON file."""
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")


def require_weights(folder: Path) -> None:
    """Refuse a folder whose weights transformers would not load, or not as those of a full-precision model."""
    if (folder / _ADAPTER).is_file():  # transformers and sentence-transformers load it on top of another model
        raise UnsupportedModelError(
            f"{folder} has an adapter ({_ADAPTER}), which distcse does not load; merge it into its model (peft: "
            "merge_and_unload), and save that model and its tokenizer"
        )
    shards = _shards(folder)
    for name in shards:
        if not (folder / name).is_file():
            raise ModelFormatError(f"{folder} lacks {name}, which {_INDEX} names; download it again")
    if not shards and not (folder / WEIGHTS).is_file():
        raise _without_weights(folder)
    for name in shards or [WEIGHTS]:
        refuse_pointer(folder / name)
    if read_json(folder / "config.json").get("quantization_config"):
        raise UnsupportedModelError(
            f"{folder} has quantized weights (quantization_config in config.json), which distcse does not load; use the "
            "model's weights before quantization"
        )


def has_any_weights(folder: Path) -> bool:
    """Return whether a folder has weights of any kind, also those that distcse refuses; false for a config alone."""
    return any(any(folder.rglob(pattern)) for pattern in ("*.safetensors", *_PICKLES, _ADAPTER))


def require_module_weights(root: Path, path: str) -> Path:
    """Return the weight file of a module after the backbone."""
    file = root / path / WEIGHTS
    refuse_pointer(file)
    if file.is_file():
        return file
    raise _pickles(root / path, f"SentenceTransformer({str(root)!r}).save_pretrained(FOLDER)") or ModelFormatError(
        f"{root / path} has no {WEIGHTS}; get the model again"
    )


def check_weights(folder: Path) -> None:
    """Verify the checksums of the weights that `write_checksums` wrote; folders from other tools have none.

    A flipped bit yields a valid weight, so only a checksum detects it.
    """
    if not (folder / CHECKSUMS).is_file():
        return
    try:
        expected = load_checked_json(folder / CHECKSUMS)
        outside = [name for name in expected if leads_outside(name)]
        changed = outside or [name for name, digest in expected.items() if checksum(folder / name) != digest]
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{folder / CHECKSUMS} cannot be verified: {error}; {_RESTORE}") from None
    if changed:
        raise ModelFormatError(
            f"{folder / changed[0]} has changed since it was written: its checksum differs; {_RESTORE}"
        )


def write_checksums(folder: Path) -> None:
    """Write the checksums of all weights in a folder."""
    file = folder / CHECKSUMS
    file.parent.mkdir(exist_ok=True)
    weights = sorted(folder.rglob("*.safetensors"))
    file.write_text(dump_checked_json({found.relative_to(folder).as_posix(): checksum(found) for found in weights}))


def _shards(folder: Path) -> list[str]:
    """Return the names of the weight files that the index lists; none without an index."""
    index = read_json(folder / _INDEX).get("weight_map", {})
    names: set[str] = set()
    for name in index.values() if isinstance(index, dict) else [None]:
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelFormatError(
                f"{folder} lists weights in {name!r}, which is outside the folder; distcse does not read it"
            )
        names.add(name)
    return [] if (folder / WEIGHTS).is_file() else sorted(names)


def _without_weights(folder: Path) -> EncoderError:
    if pickled := _pickles(folder, _conversion(folder)):
        return pickled
    if inside := _models_inside(folder):
        several = f" (the newest of {len(inside)} models)" if len(inside) > 1 else ""
        return ModelNotFoundError(f"{folder} is no model's folder; write {inside[0]}{several}")
    return ModelFormatError(f"{folder} has no weights: neither {WEIGHTS} nor {_INDEX}; get the model again")


def _pickles(folder: Path, conversion: str) -> EncoderError | None:
    """Return the error for weights that are pickles; None where there are none."""
    pickled = [file for pattern in _PICKLES for file in sorted(folder.glob(pattern))]
    if not pickled:
        return None
    return PickledWeightsError(
        f"{folder} has {pickled[0].name} but no safetensors, and distcse does not load pickles; convert a trusted model: "
        f"{conversion}"
    )


def _models_inside(folder: Path) -> list[Path]:
    """Return the folders of models below one of a hub's cache, of runs or of a sweep, the newest first.

    For a folder inside a run, such as `checkpoints`, those of the run.
    """
    run = next((above for above in folder.absolute().parents[:2] if (above / "recipe.yaml").is_file()), folder)
    found = [file.parent for depth in range(1, 5) for file in run.glob(f"{'*/' * depth}{WEIGHTS}")]
    inside = [model for model in found if (model / "config.json").is_file()]
    return sorted(inside, key=lambda model: (model / WEIGHTS).stat().st_mtime, reverse=True)


def _conversion(folder: Path) -> str:
    """Return Python code that saves a pickled model as safetensors, with its head, pooling and tokenizer."""
    named = read_json(folder / "config.json").get("architectures")
    kind = str(named[0]) if isinstance(named, list) and named else "AutoModel"
    if (folder / "modules.json").is_file() and not kind.endswith("ForSequenceClassification"):
        return f"SentenceTransformer({str(folder)!r}).save_pretrained(FOLDER)"
    return f"for kind in ({kind}, AutoTokenizer): kind.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"
