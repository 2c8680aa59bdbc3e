"""The sentence-transformers model folder: read in its old and new forms, written in the form that every reader knows.

sentence-transformers from 5.4 on writes compact files that TEI and older vLLM and llama.cpp misread. The legacy form,
which all of them and sentence-transformers 2 to 6 read, is what distcse writes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from distcse.errors import MissingWeightsError, ModelFormatError, PickledWeightsError, UnsupportedModelError
from distcse.files import checksum, dump_checked_json, fsync, fsync_all, load_checked_json, storage_errors
from distcse.models.head import Dense, DenseShape, head_weights
from distcse.models.pooling import NEEDS_ALL_LAYERS
from distcse.recipe import Pooling

_LEGACY_KEYS: dict[Pooling, str] = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "last_token": "pooling_mode_lasttoken",
}
_NEW_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last_token"}
_OTHER_LEGACY_KEYS = ("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_WEIGHTS = "model.safetensors"
_HEADED = {"ForSequenceClassification": "AutoModelForSequenceClassification", "ForMaskedLM": "AutoModelForMaskedLM"}
CHECKSUMS = Path("distcse") / "checksums.json"
_CHANGED = f"restore it, or if you changed it yourself, remove {CHECKSUMS} in that folder"


@dataclass(frozen=True)
class Layout:
    """What a folder says beside its weights; None where it says nothing."""

    pooling: Pooling | None = None
    max_length: int | None = None
    normalize: bool = False
    prompt: str = ""
    pools_prompt: bool = True
    """Whether the prompt's tokens are pooled with the sentence's."""
    lower_case: bool = False
    """Whether texts are lowercased first, whatever the tokenizer says."""
    head: Sequence[tuple[str, DenseShape | None]] = ()
    """Path and shape of the modules after pooling, as `build_head` takes them; a last `Normalize` is `normalize`."""


def default_pooling(folder: Path, pooling: str | None) -> str | None:
    """A user's pooling for a folder that does not say how it pools; None for one that does, which is read as it says."""
    return pooling if read_layout(folder).pooling is None else None


def read_layout(folder: Path) -> Layout:
    """What modules.json and its companions say of a folder.

    Raises:
        EncoderError: A module distcse cannot reproduce, or files that are no JSON.
    """
    prompt = _default_prompt(written_json(folder / "config_sentence_transformers.json"))
    reading = written_json(folder / "sentence_bert_config.json")
    max_length, lower_case = reading.get("max_seq_length"), bool(reading.get("do_lower_case", False))
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise ModelFormatError(
            f"{folder / 'sentence_bert_config.json'}: max_seq_length is {max_length!r:.60}, no length"
        )
    if not (folder / "modules.json").exists():
        return Layout(max_length=max_length, prompt=prompt, lower_case=lower_case)
    pools_prompt = True
    pooling: Pooling | None = None
    averaged: Pooling | None = None
    head: list[tuple[str, DenseShape | None]] = []
    for module in written_json(folder / "modules.json", kind=list):
        path, kind = _module(folder, module)
        if kind == "Pooling":
            config = folder / path / "config.json"
            pooling, pools_prompt = _pooling(config), bool(written_json(config).get("include_prompt", True))
        elif kind == "Normalize":
            head.append((path, None))
        elif kind == "Dense" and pooling is not None:
            config = folder / path / "config.json"
            head.append((path, DenseShape.read(config, written_json(config))))
        elif kind == "WeightedLayerPooling":
            averaged = _layer_average(folder / path)
        elif kind != "Transformer":
            raise UnsupportedModelError(
                f"{folder} has a {kind} module, which distcse cannot reproduce: its vectors would not be the model's own"
            )
    if averaged is not None and pooling != "mean":
        raise UnsupportedModelError(
            f"{folder} averages layers and pools {pooling!r}; only layers averaged under mean pooling are supported"
        )
    normalize = bool(head) and head[-1][1] is None
    kept = head[:-1] if normalize else head
    return Layout(averaged or pooling, max_length, normalize, prompt, pools_prompt, lower_case, kept)


def _module(folder: Path, module: Any) -> tuple[str, str]:
    """Path and kind of an entry of modules.json, which stays inside the folder."""
    path, kind = (module.get(key) for key in ("path", "type")) if isinstance(module, dict) else (None, None)
    if not isinstance(path, str) or not isinstance(kind, str):
        raise ModelFormatError(f"{folder / 'modules.json'}: expected a path and a type, found {module!r:.100}")
    if _leads_outside(path):
        raise ModelFormatError(
            f"{folder / 'modules.json'} names {path!r}, which is no folder in it; distcse reads none outside"
        )
    return path, kind.rsplit(".", 1)[-1]


def _leads_outside(name: str) -> bool:
    return Path(name).is_absolute() or ".." in Path(name).parts


def refuse_pickled_weights(folder: Path) -> None:
    """Raise `EncoderError` for a folder without safetensors: a pickle can run code when it is opened."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)]
    if pickled:
        raise PickledWeightsError(
            f"{folder} holds {pickled[0]} but no safetensors, and distcse opens no pickles; convert it where you trust it: "
            f"{_conversion(folder)}"
        )
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{folder} holds an adapter, not a model; merge it into its model (peft: merge_and_unload), and save that model "
            "and its tokenizer"
        )
    raise MissingWeightsError(f"{folder} holds no weights: expected model.safetensors")


def _conversion(folder: Path) -> str:
    """Python that saves a pickled model as safetensors, with its head, its pooling and its tokenizer."""
    named = written_json(folder / "config.json").get("architectures")
    names = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    kind = next((auto for end, auto in _HEADED.items() for name in names if name.endswith(end)), "AutoModel")
    if (folder / "modules.json").is_file() and kind != "AutoModelForSequenceClassification":
        return f"SentenceTransformer({str(folder)!r}).save_pretrained(FOLDER)"
    return f"for kind in ({kind}, AutoTokenizer): kind.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes the target's place once it is whole; a failure leaves the target as it was."""
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    with storage_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    try:
        with storage_errors(target):
            yield beside
            _note_checksums(beside)
            fsync_all(beside)
            # A folder that holds something cannot be renamed over: the old one steps aside first. Killed between the two, the
            # new one is whole under its other name, and whoever resumes the run writes it again.
            if target.exists():
                os.replace(target, old)
            os.replace(beside, target)
            fsync(target.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def refuse_weights_elsewhere(folder: Path) -> None:
    """Raise `EncoderError` where weights would be read from outside the folder."""
    index = written_json(folder / f"{_WEIGHTS}.index.json").get("weight_map", {})
    for shard in index.values() if isinstance(index, dict) else [None]:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelFormatError(
                f"{folder} lists weights in {shard!r}, which is no file in it; distcse reads none outside"
            )
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{folder} holds an adapter to a model elsewhere, which distcse does not follow; merge it into its model first"
        )


def check_weights(folder: Path) -> None:
    """Raise `EncoderError` where weights are not those that `replacing` noted, or would be read from outside the folder.

    A flipped bit is still a number, so only a checksum tells; folders that others wrote have none.
    """
    refuse_weights_elsewhere(folder)
    if not (folder / CHECKSUMS).is_file():
        return
    try:
        noted = load_checked_json(folder / CHECKSUMS)
        outside = [name for name in noted if _leads_outside(name)]
        changed = outside or [name for name, digest in noted.items() if checksum(folder / name) != digest]
    except (OSError, ValueError) as broken:
        raise ModelFormatError(f"{folder / CHECKSUMS} cannot be held to: {broken}; {_CHANGED}") from None
    if changed:
        raise ModelFormatError(f"{folder / changed[0]} is not what was written: its checksum differs; {_CHANGED}")


def _note_checksums(folder: Path) -> None:
    file = folder / CHECKSUMS
    file.parent.mkdir(exist_ok=True)
    weights = sorted(folder.rglob("*.safetensors"))
    file.write_text(dump_checked_json({found.relative_to(folder).as_posix(): checksum(found) for found in weights}))


def write_layout(folder: Path, layout: Layout, width: int, depth: int, head: nn.Sequential) -> None:
    """Write modules.json, pooling, head, length and prompt files in the legacy form.

    Args:
        folder: A model's folder, with weights and tokenizer in it.
        layout: What to say; its pooling is not None, and its head that which follows.
        width: Numbers in a pooled vector.
        depth: Layers of the backbone.
        head: What `build_head` made.

    Averages of layers need a module that only sentence-transformers knows. Their pooling file then is not where other
    readers look for it: those refuse the folder instead of pooling the last layer alone.
    """
    pooling = layout.pooling
    assert pooling is not None
    kinds = ["Transformer"]
    if pooling in NEEDS_ALL_LAYERS:
        kinds.append("WeightedLayerPooling")
    kinds.append("Pooling")
    kinds += ["Dense" if isinstance(module, Dense) else "Normalize" for module in head]
    if layout.normalize:
        kinds.append("Normalize")
    paths = [f"{place}_{kind}" if place else "" for place, kind in enumerate(kinds)]
    modules = [
        {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for place, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    _dump(folder / "modules.json", modules)
    for path in paths:
        (folder / path).mkdir(exist_ok=True)
    if pooling in NEEDS_ALL_LAYERS:
        _write_layer_average(folder / paths[kinds.index("WeightedLayerPooling")], pooling, width, depth)
    after_pooling = kinds.index("Pooling") + 1
    for path, module in zip(paths[after_pooling:], head, strict=False):
        if isinstance(module, Dense):
            _dump(folder / path / "config.json", module.shape.written())
            save_file(head_weights(module), folder / path / _WEIGHTS)
    after_average: Pooling = "mean" if pooling in NEEDS_ALL_LAYERS else pooling
    flags = {key: kind == after_average for kind, key in _LEGACY_KEYS.items()} | dict.fromkeys(
        _OTHER_LEGACY_KEYS, False
    )
    _dump(
        folder / paths[after_pooling - 1] / "config.json",
        {"word_embedding_dimension": width, **flags, "include_prompt": True},
    )
    _dump(folder / "sentence_bert_config.json", {"max_seq_length": layout.max_length, "do_lower_case": False})
    _dump(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "__version__": {},
            "prompts": {"default": layout.prompt} if layout.prompt else {},
            "default_prompt_name": "default" if layout.prompt else None,
            "similarity_fn_name": "cosine",
        },
    )


def _write_layer_average(folder: Path, pooling: Pooling, width: int, depth: int) -> None:
    start = 1 if pooling == "first_last_avg" else depth - 1
    weights = torch.zeros(depth + 1 - start)
    weights[0] = weights[-1] = 1.0
    save_file({"layer_weights": weights}, folder / _WEIGHTS)
    _dump(
        folder / "config.json",
        {"word_embedding_dimension": width, "layer_start": start, "num_hidden_layers": depth},
    )
    backbone = folder.parent / "config.json"
    _dump(backbone, {**written_json(backbone), "output_hidden_states": True})


def _layer_average(folder: Path) -> Pooling:
    """The pooling that a WeightedLayerPooling module amounts to, where distcse has it."""
    config = written_json(folder / "config.json")
    if not (folder / _WEIGHTS).exists():
        raise PickledWeightsError(f"{folder} holds no {_WEIGHTS}, and distcse opens no pickles")
    try:
        weights = load_file(folder / _WEIGHTS)["layer_weights"].tolist()
        ends_only = weights[0] == weights[-1] != 0 and not any(weights[1:-1])
    except (OSError, SafetensorError, LookupError, TypeError) as broken:
        raise MissingWeightsError(f"{folder / _WEIGHTS} holds no layer weights ({broken})") from None
    if ends_only and config.get("layer_start") == 1:
        return "first_last_avg"
    if ends_only and len(weights) == 2:
        return "last_two_avg"
    raise UnsupportedModelError(
        f"{folder}: layer weights {weights} are neither the first and last nor the last two layers"
    )


def _pooling(file: Path) -> Pooling:
    config = written_json(file)
    named = config.get("pooling_mode")
    chosen = [kind for kind, key in _LEGACY_KEYS.items() if config.get(key)]
    other = [key for key in _OTHER_LEGACY_KEYS if config.get(key)]
    if isinstance(named, str) and named in _NEW_NAMES:
        return _NEW_NAMES[named]
    if named is None and len(chosen) == 1 and not other:
        return chosen[0]
    found = named or [*chosen, *other]
    raise UnsupportedModelError(
        f"{file}: pooling {found!r} is not supported; supported: {', '.join(get_args(Pooling))}"
    )


def _default_prompt(config: dict[str, Any]) -> str:
    name = config.get("default_prompt_name")
    prompts = config.get("prompts")
    return str(prompts.get(name, "")) if isinstance(name, str) and isinstance(prompts, dict) else ""


def written_json(file: Path, kind: type = dict) -> Any:
    """What a JSON file holds; an empty object (or list) where there is none."""
    if not file.exists():
        return kind()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as broken:
        raise ModelFormatError(f"{file} is not JSON: {broken}") from None
    if not isinstance(content, kind):
        raise ModelFormatError(f"{file}: expected a JSON {'object' if kind is dict else 'list'}")
    return content


def _dump(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
