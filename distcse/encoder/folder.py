"""The sentence-transformers model folder: read in its old and new forms, written in the form that every reader knows.

sentence-transformers from 5.4 on writes compact files that TEI and older vLLM and llama.cpp misread. The legacy form,
which all of them and sentence-transformers 2 to 6 read, is what distcse writes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from safetensors.torch import load_file, save_file

from distcse.encoder.pooling import NEEDS_ALL_LAYERS
from distcse.errors import EncoderError
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


@dataclass(frozen=True)
class Layout:
    """What a folder says beside its weights; None where it says nothing."""

    pooling: Pooling | None = None
    max_length: int | None = None
    normalize: bool = False
    prompt: str = ""


def read_layout(folder: Path) -> Layout:
    """What modules.json and its companions say of a folder.

    Raises:
        EncoderError: A module distcse cannot reproduce, or files that are no JSON.
    """
    prompt = _default_prompt(written_json(folder / "config_sentence_transformers.json"))
    max_length = written_json(folder / "sentence_bert_config.json").get("max_seq_length")
    if not (folder / "modules.json").exists():
        return Layout(max_length=max_length, prompt=prompt)
    pooling: Pooling | None = None
    averaged: Pooling | None = None
    normalize = False
    for module in written_json(folder / "modules.json", kind=list):
        kind = module["type"].rsplit(".", 1)[-1]
        if kind == "Pooling":
            pooling = _pooling(folder / module["path"] / "config.json")
        elif kind == "Normalize":
            normalize = True
        elif kind == "WeightedLayerPooling":
            averaged = _layer_average(folder / module["path"])
        elif kind != "Transformer":
            raise EncoderError(
                f"{folder} has a {kind} module, which distcse cannot reproduce: its vectors would not be the model's own"
            )
    if averaged is not None and pooling != "mean":
        raise EncoderError(
            f"{folder} averages layers and pools {pooling!r}; only layers averaged under mean pooling are supported"
        )
    return Layout(averaged or pooling, max_length, normalize, prompt)


def refuse_pickled_weights(folder: Path) -> None:
    """Raise `EncoderError` for a folder without safetensors: a pickle can run code when it is opened."""
    if any(folder.glob("*.safetensors")):
        return
    pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)]
    if pickled:
        raise EncoderError(
            f"{folder} holds {pickled[0]} but no safetensors, and distcse opens no pickles; convert it where you trust it: "
            f"AutoModel.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"
        )
    if (folder / "adapter_config.json").is_file():
        raise EncoderError(
            f"{folder} holds an adapter, not a model; merge it into its model (peft: merge_and_unload) and save that"
        )
    raise EncoderError(f"{folder} holds no weights: expected model.safetensors")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A folder to write into, which takes the target's place once it is whole; a failure leaves the target as it was."""
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir()
    try:
        yield beside
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    old = target.with_name(f".{target.name}.{os.getpid()}.old")
    if target.exists():
        os.replace(target, old)
    os.replace(beside, target)
    shutil.rmtree(old, ignore_errors=True)


def write_layout(folder: Path, layout: Layout, dimension: int, depth: int) -> None:
    """Write modules.json, pooling, length and prompt files in the legacy form.

    Args:
        folder: A model's folder, with weights and tokenizer in it.
        layout: What to say; its pooling is not None.
        dimension: Numbers in one vector.
        depth: Layers of the backbone.

    Averages of layers need a module that only sentence-transformers knows. Their pooling file then is not where other
    readers look for it: those refuse the folder instead of pooling the last layer alone.
    """
    pooling = layout.pooling
    assert pooling is not None
    kinds = ["Transformer"]
    if pooling in NEEDS_ALL_LAYERS:
        kinds.append("WeightedLayerPooling")
    kinds.append("Pooling")
    if layout.normalize:
        kinds.append("Normalize")
    paths = {kind: f"{place}_{kind}" if place else "" for place, kind in enumerate(kinds)}
    modules = [
        {"idx": place, "name": str(place), "path": paths[kind], "type": f"sentence_transformers.models.{kind}"}
        for place, kind in enumerate(kinds)
    ]
    _dump(folder / "modules.json", modules)
    for path in paths.values():
        (folder / path).mkdir(exist_ok=True)
    if pooling in NEEDS_ALL_LAYERS:
        _write_layer_average(folder / paths["WeightedLayerPooling"], pooling, dimension, depth)
    after_average: Pooling = "mean" if pooling in NEEDS_ALL_LAYERS else pooling
    flags = {key: kind == after_average for kind, key in _LEGACY_KEYS.items()} | dict.fromkeys(
        _OTHER_LEGACY_KEYS, False
    )
    _dump(
        folder / paths["Pooling"] / "config.json",
        {"word_embedding_dimension": dimension, **flags, "include_prompt": True},
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


def _write_layer_average(folder: Path, pooling: Pooling, dimension: int, depth: int) -> None:
    start = 1 if pooling == "first_last_avg" else depth - 1
    weights = torch.zeros(depth + 1 - start)
    weights[0] = weights[-1] = 1.0
    save_file({"layer_weights": weights}, folder / _WEIGHTS)
    _dump(
        folder / "config.json",
        {"word_embedding_dimension": dimension, "layer_start": start, "num_hidden_layers": depth},
    )
    backbone = folder.parent / "config.json"
    _dump(backbone, {**written_json(backbone), "output_hidden_states": True})


def _layer_average(folder: Path) -> Pooling:
    """The pooling that a WeightedLayerPooling module amounts to, where distcse has it."""
    config = written_json(folder / "config.json")
    if not (folder / _WEIGHTS).exists():
        raise EncoderError(f"{folder} holds no {_WEIGHTS}, and distcse opens no pickles")
    weights = load_file(folder / _WEIGHTS)["layer_weights"].tolist()
    ends_only = weights[0] == weights[-1] != 0 and not any(weights[1:-1])
    if ends_only and config["layer_start"] == 1:
        return "first_last_avg"
    if ends_only and len(weights) == 2:
        return "last_two_avg"
    raise EncoderError(f"{folder}: layer weights {weights} are neither the first and last nor the last two layers")


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
    raise EncoderError(f"{file}: pooling {found!r} is not supported; supported: {', '.join(get_args(Pooling))}")


def _default_prompt(config: dict[str, Any]) -> str:
    name = config.get("default_prompt_name")
    return str((config.get("prompts") or {}).get(name, "")) if name else ""


def written_json(file: Path, kind: type = dict) -> Any:
    """What a JSON file holds; an empty object (or list) where there is none."""
    if not file.exists():
        return kind()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as broken:
        raise EncoderError(f"{file} is not JSON: {broken}") from None
    if not isinstance(content, kind):
        raise EncoderError(f"{file}: expected a JSON {'object' if kind is dict else 'list'}")
    return content


def _dump(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
