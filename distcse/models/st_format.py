"""Read and write the sentence-transformers folder layout.

sentence-transformers 5.4 and later write compact files that TEI, older vLLM and older llama.cpp misread. distcse reads
both forms, and writes the legacy form that all of them, and sentence-transformers 2 to 6, read.
"""

from __future__ import annotations

import json
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
from distcse.models.head import Dense, DenseShape, head_weights
from distcse.models.pooling import NEEDS_ALL_LAYERS
from distcse.recipe import Pooling
from distcse.storage import checksum, dump_checked_json, load_checked_json, open_store

_LEGACY_KEYS: dict[Pooling, str] = {
    "cls": "pooling_mode_cls_token",
    "mean": "pooling_mode_mean_tokens",
    "max": "pooling_mode_max_tokens",
    "last_token": "pooling_mode_lasttoken",
}
_NEW_NAMES: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "max": "max", "lasttoken": "last_token"}
_OTHER_LEGACY_KEYS = ("pooling_mode_mean_sqrt_len_tokens", "pooling_mode_weightedmean_tokens")
_WEIGHTS = "model.safetensors"
_AUTO_CLASSES = {
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForMaskedLM": "AutoModelForMaskedLM",
}
CHECKSUMS = Path("distcse") / "checksums.json"
_RESTORE = f"restore it, or if you changed it yourself, remove {CHECKSUMS} in that folder"


@dataclass(frozen=True)
class Layout:
    """Settings of a model's folder, apart from weights and tokenizer.

    Attributes:
        pooling: The pooling; None where the folder does not say.
        max_length: Maximum number of tokens; None where the folder does not say.
        normalize: Whether the last module is `Normalize`.
        prompt: The default prompt.
        pools_prompt: Whether the prompt's tokens are pooled with the sentence's.
        lower_case: Whether texts are lowercased before the tokenizer.
        head: Paths and shapes of the modules after pooling for `build_head`, without a last `Normalize`.
    """

    pooling: Pooling | None = None
    max_length: int | None = None
    normalize: bool = False
    prompt: str = ""
    pools_prompt: bool = True
    lower_case: bool = False
    head: Sequence[tuple[str, DenseShape | None]] = ()


def default_pooling(folder: Path, pooling: str | None) -> str | None:
    """Return the user's pooling for a folder without one; None for a folder whose own pooling is used."""
    return pooling if read_layout(folder).pooling is None else None


def read_layout(folder: Path) -> Layout:
    """Read a folder's modules.json and the configuration files next to it.

    Raises:
        UnsupportedModelError: distcse cannot reproduce a module.
        ModelFormatError: A file is malformed.
    """
    prompt = _default_prompt(read_json(folder / "config_sentence_transformers.json"))
    transformer = read_json(folder / "sentence_bert_config.json")
    max_length, lower_case = transformer.get("max_seq_length"), bool(transformer.get("do_lower_case", False))
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise ModelFormatError(
            f"{folder / 'sentence_bert_config.json'}: max_seq_length is {max_length!r:.60}, not a positive integer"
        )
    if not (folder / "modules.json").exists():
        return Layout(max_length=max_length, prompt=prompt, lower_case=lower_case)
    pools_prompt = True
    pooling: Pooling | None = None
    averaged: Pooling | None = None
    head: list[tuple[str, DenseShape | None]] = []
    for module in read_json(folder / "modules.json", kind=list):
        path, kind = _module(folder, module)
        if kind == "Pooling":
            config = folder / path / "config.json"
            pooling, pools_prompt = _pooling(config), bool(read_json(config).get("include_prompt", True))
        elif kind == "Normalize":
            head.append((path, None))
        elif kind == "Dense" and pooling is not None:
            config = folder / path / "config.json"
            head.append((path, DenseShape.from_config(config, read_json(config))))
        elif kind == "WeightedLayerPooling":
            averaged = _layer_average(folder / path)
        elif kind != "Transformer":
            raise UnsupportedModelError(
                f"{folder} has a {kind} module, which distcse does not support; use a model without it"
            )
    if averaged is not None and pooling != "mean":
        raise UnsupportedModelError(
            f"{folder} averages layers and pools {pooling!r}; an average of layers is supported with mean pooling only"
        )
    normalize = bool(head) and head[-1][1] is None
    inner = head[:-1] if normalize else head
    return Layout(averaged or pooling, max_length, normalize, prompt, pools_prompt, lower_case, inner)


def _module(folder: Path, module: Any) -> tuple[str, str]:
    """Return path and class name of an entry of modules.json, and refuse a path outside the folder."""
    path, kind = (module.get(key) for key in ("path", "type")) if isinstance(module, dict) else (None, None)
    if not isinstance(path, str) or not isinstance(kind, str):
        raise ModelFormatError(f"{folder / 'modules.json'}: expected a path and a type, found {module!r:.100}")
    if _leads_outside(path):
        raise ModelFormatError(
            f"{folder / 'modules.json'} names {path!r}, which is outside the folder; distcse does not read it"
        )
    return path, kind.rsplit(".", 1)[-1]


def _leads_outside(name: str) -> bool:
    return Path(name).is_absolute() or ".." in Path(name).parts


def refuse_pickled_weights(folder: Path) -> None:
    """Refuse a folder without safetensors, because loading a pickle can run code.

    Raises:
        PickledWeightsError: The weights are pickles.
        UnsupportedModelError: The folder has an adapter only.
        MissingWeightsError: The folder has no weights.
    """
    if any(folder.glob("*.safetensors")):
        return
    pickled = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for file in folder.glob(pattern)]
    if pickled:
        raise PickledWeightsError(
            f"{folder} has {pickled[0]} but no safetensors, and distcse does not load pickles; convert a trusted model: "
            f"{_conversion(folder)}"
        )
    if (folder / "adapter_config.json").is_file():
        raise UnsupportedModelError(
            f"{folder} has an adapter, not a model; merge it into its model (peft: merge_and_unload), and save that model "
            "and its tokenizer"
        )
    raise MissingWeightsError(f"{folder} has no weights; add model.safetensors")


def _conversion(folder: Path) -> str:
    """Return Python code that saves a pickled model as safetensors, with its head, pooling and tokenizer."""
    architectures = read_json(folder / "config.json").get("architectures")
    names = [name for name in architectures if isinstance(name, str)] if isinstance(architectures, list) else []
    kind = next((auto for end, auto in _AUTO_CLASSES.items() for name in names if name.endswith(end)), "AutoModel")
    if (folder / "modules.json").is_file() and kind != "AutoModelForSequenceClassification":
        return f"SentenceTransformer({str(folder)!r}).save_pretrained(FOLDER)"
    return f"for kind in ({kind}, AutoTokenizer): kind.from_pretrained({str(folder)!r}).save_pretrained(FOLDER)"


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Replace a model's folder atomically, with checksums of its weights, and store it; a failure leaves the old one unchanged.

    Args:
        path: The folder, or its address in object storage.

    Yields:
        A temporary folder to write into.

    Raises:
        StorageError: The folder cannot be written.
    """
    store = open_store(path)
    with store.write_folder() as temporary:
        yield temporary
        _write_checksums(temporary)
    store.publish()


def refuse_external_weights(folder: Path) -> None:
    """Refuse a folder that refers to weights outside it.

    Raises:
        ModelFormatError: The index of shards names a file outside the folder.
        UnsupportedModelError: The folder has an adapter.
    """
    index = read_json(folder / f"{_WEIGHTS}.index.json").get("weight_map", {})
    for shard in index.values() if isinstance(index, dict) else [None]:
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise ModelFormatError(
                f"{folder} lists weights in {shard!r}, which is outside the folder; distcse does not read it"
            )
    if (folder / "adapter_config.json").exists():
        raise UnsupportedModelError(
            f"{folder} has an adapter to another model, which distcse does not load; merge it into its model"
        )


def check_weights(folder: Path) -> None:
    """Verify the checksums of the weights that `replacing` wrote; folders from other tools have none.

    A flipped bit yields a valid weight, so only a checksum detects it.

    Raises:
        ModelFormatError: A weight file changed, or weights are outside the folder.
        UnsupportedModelError: The folder has an adapter.
    """
    refuse_external_weights(folder)
    if not (folder / CHECKSUMS).is_file():
        return
    try:
        expected = load_checked_json(folder / CHECKSUMS)
        outside = [name for name in expected if _leads_outside(name)]
        changed = outside or [name for name, digest in expected.items() if checksum(folder / name) != digest]
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{folder / CHECKSUMS} cannot be verified: {error}; {_RESTORE}") from None
    if changed:
        raise ModelFormatError(
            f"{folder / changed[0]} has changed since it was written: its checksum differs; {_RESTORE}"
        )


def _write_checksums(folder: Path) -> None:
    file = folder / CHECKSUMS
    file.parent.mkdir(exist_ok=True)
    weights = sorted(folder.rglob("*.safetensors"))
    file.write_text(dump_checked_json({found.relative_to(folder).as_posix(): checksum(found) for found in weights}))


def write_layout(folder: Path, layout: Layout, width: int, depth: int, head: nn.Sequential) -> None:
    """Write modules.json and the files for pooling, head, length and prompt, in the legacy form.

    An average of layers needs a module that only sentence-transformers supports. It shifts the pooling file's path, so that
    other readers refuse the folder instead of pooling only the last layer.

    Args:
        folder: The model's folder, with weights and tokenizer.
        layout: The settings; `pooling` must be set, and `head` is not used.
        width: Dimension H of pooled vectors.
        depth: Number of the backbone's layers.
        head: The modules after pooling (see `build_head`).
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
    paths = [f"{index}_{kind}" if index else "" for index, kind in enumerate(kinds)]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    _dump(folder / "modules.json", modules)
    for path in paths:
        (folder / path).mkdir(exist_ok=True)
    if pooling in NEEDS_ALL_LAYERS:
        _write_layer_average(folder / paths[kinds.index("WeightedLayerPooling")], pooling, width, depth)
    after_pooling = kinds.index("Pooling") + 1
    for path, module in zip(paths[after_pooling:], head, strict=False):
        if isinstance(module, Dense):
            _dump(folder / path / "config.json", module.shape.to_config())
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
    _dump(backbone, {**read_json(backbone), "output_hidden_states": True})


def _layer_average(folder: Path) -> Pooling:
    """Return the pooling that a WeightedLayerPooling module is equal to."""
    config = read_json(folder / "config.json")
    if not (folder / _WEIGHTS).exists():
        raise PickledWeightsError(
            f"{folder} has no {_WEIGHTS}, and distcse does not load pickles; convert a trusted model"
        )
    try:
        weights = load_file(folder / _WEIGHTS)["layer_weights"].tolist()
        ends_only = weights[0] == weights[-1] != 0 and not any(weights[1:-1])
    except (OSError, SafetensorError, LookupError, TypeError) as error:
        raise MissingWeightsError(f"{folder / _WEIGHTS} has no layer weights ({error}); get the model again") from None
    if ends_only and config.get("layer_start") == 1:
        return "first_last_avg"
    if ends_only and len(weights) == 2:
        return "last_two_avg"
    raise UnsupportedModelError(
        f"{folder}: layer weights {weights} select neither the first and last nor the last two layers; use another model"
    )


def _pooling(file: Path) -> Pooling:
    config = read_json(file)
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


def read_json(file: Path, kind: type = dict) -> Any:
    """Return the content of a JSON file; an empty object (or list) if the file does not exist.

    Args:
        file: The file.
        kind: Required type of the content, `dict` (default) or `list`.

    Raises:
        ModelFormatError: The file is not JSON, or of another type.
    """
    if not file.exists():
        return kind()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFormatError(f"{file} is not JSON: {error}") from None
    if not isinstance(content, kind):
        raise ModelFormatError(f"{file}: expected a JSON {'object' if kind is dict else 'list'}")
    return content


def _dump(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2), encoding="utf-8")
