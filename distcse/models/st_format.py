"""Read and write the sentence-transformers folder layout.

sentence-transformers 5.4 and later write compact files that TEI, older vLLM and older llama.cpp misread. distcse reads
both forms, and writes the legacy form that all of them, and sentence-transformers 2 to 6, read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from distcse.errors import ModelFormatError, UnsupportedModelError
from distcse.models.head import Dense, DenseShape, head_weights
from distcse.models.json_files import leads_outside, read_json, write_json
from distcse.models.pooling import NEEDS_ALL_LAYERS
from distcse.models.st_files import (
    LEGACY_POOLINGS,
    PoolingFile,
    VectorFile,
    read_model_file,
    read_settings,
    read_transformer_file,
    without_places,
)
from distcse.models.weight_files import WEIGHTS, require_module_weights, write_checksums
from distcse.recipe import Pooling
from distcse.storage import ArtifactStore, open_store

_LIBRARY = "sentence_transformers."
_WITHOUT_EFFECT = ("Dropout",)
"""Modules that compute nothing at inference."""


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
        transformer: Path of the backbone and its tokenizer inside the folder; empty for the folder itself.
        prompts: The named prompts.
        truncate_dim: Number of first dimensions that a vector keeps; None keeps all.
        similarity: Name of the function that compares vectors.
        config_settings: Settings that replace those of the backbone's config.json.
        tokenizer_settings: Keyword arguments of the tokenizer.
    """

    pooling: Pooling | None = None
    max_length: int | None = None
    normalize: bool = False
    prompt: str = ""
    pools_prompt: bool = True
    lower_case: bool = False
    head: Sequence[tuple[str, DenseShape | None]] = ()
    transformer: str = ""
    prompts: Mapping[str, str] = field(default_factory=dict)
    truncate_dim: int | None = None
    similarity: str = "cosine"
    config_settings: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_settings: Mapping[str, Any] = field(default_factory=dict)


def default_pooling(folder: Path, pooling: str | None) -> str | None:
    """Return the user's pooling for a folder without one; None for a folder whose own pooling is used."""
    return pooling if read_layout(folder).pooling is None else None


def read_layout(folder: Path) -> Layout:
    """Read a folder's modules.json and the configuration files next to it.

    Raises:
        UnsupportedModelError: distcse cannot reproduce a module or a setting.
        ModelFormatError: A file is malformed.
    """
    modules = [_module(folder, module) for module in read_json(folder / "modules.json", kind=list)]
    transformer = _transformer_path(folder, modules)
    settings, text = read_model_file(folder), read_transformer_file(folder / transformer)
    config_settings, tokenizer_settings = without_places(text.config_args), without_places(text.tokenizer_args)
    max_length = tokenizer_settings.pop("model_max_length", text.max_seq_length)
    pooling: PoolingFile | None = None
    averaged: Pooling | None = None
    head: list[tuple[str, DenseShape | None]] = []
    for path, kind in modules:
        config = folder / path / "config.json"
        if kind == "Pooling" and pooling is None:
            if not config.is_file():
                raise ModelFormatError(
                    f"{config} does not exist, but modules.json names its folder; get the model again"
                )
            pooling = read_settings(config, PoolingFile)
        elif kind == "Normalize" and pooling is not None:
            read_settings(config, VectorFile)
            head.append((path, None))
        elif kind == "Dense" and pooling is not None:
            head.append((path, read_settings(config, DenseShape)))
        elif kind == "WeightedLayerPooling" and pooling is None:
            if _outputs_all_layers(folder / transformer, config_settings):
                averaged = _layer_average(folder / path)
        elif kind != "Transformer" and kind not in _WITHOUT_EFFECT:
            raise _unsupported_module(folder, kind)
    if averaged is not None and (pooling is None or pooling.pooling != "mean"):
        raise UnsupportedModelError(
            f"{folder} averages layers without mean pooling, which distcse does not support; use another model"
        )
    normalize = bool(head) and head[-1][1] is None
    return Layout(
        averaged or (pooling.pooling if pooling is not None else None),
        max_length,
        normalize,
        settings.default_prompt,
        pooling is None or pooling.include_prompt,
        text.do_lower_case,
        head[:-1] if normalize else head,
        transformer,
        settings.named_prompts,
        settings.truncate_dim,
        settings.similarity_fn_name,
        config_settings,
        tokenizer_settings,
    )


def backbone_folder(folder: Path) -> Path:
    """Return the folder of a model's backbone and tokenizer: the model's own, or one inside it that modules.json names.

    Raises:
        ModelFormatError: modules.json is malformed.
        UnsupportedModelError: It names modules of another library.
    """
    modules = [_module(folder, module) for module in read_json(folder / "modules.json", kind=list)]
    return folder / _transformer_path(folder, modules)


def _transformer_path(folder: Path, modules: Sequence[tuple[str, str]]) -> str:
    paths = [path for path, kind in modules if kind == "Transformer"]
    if modules and modules[0][1] != "Transformer":
        raise _unsupported_module(folder, modules[0][1])
    if len(paths) > 1:
        raise UnsupportedModelError(f"{folder / 'modules.json'} has several Transformers; use a model with one")
    return paths[0] if paths else ""


def _unsupported_module(folder: Path, kind: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{folder} has a {kind} module at a place where distcse does not support one; use a model without it"
    )


def _module(folder: Path, module: Any) -> tuple[str, str]:
    """Return path and class name of an entry of modules.json, and refuse a path outside the folder, and custom code."""
    path, kind = (module.get(key) for key in ("path", "type")) if isinstance(module, dict) else (None, None)
    if not isinstance(path, str) or not isinstance(kind, str):
        raise ModelFormatError(f"{folder / 'modules.json'}: expected a path and a type, found {module!r:.100}")
    if leads_outside(path):
        raise ModelFormatError(
            f"{folder / 'modules.json'} names {path!r}, which is outside the folder; distcse does not read it"
        )
    if not kind.startswith(_LIBRARY):
        raise UnsupportedModelError(
            f"{folder / 'modules.json'} names the module {kind}, which is not one of sentence-transformers; distcse does not "
            "run it. Use a model without it"
        )
    return path, kind.rsplit(".", 1)[-1]


def _outputs_all_layers(backbone: Path, settings: Mapping[str, Any]) -> bool:
    """Return whether the backbone outputs all layers; without them, sentence-transformers skips an average of layers."""
    config = {**read_json(backbone / "config.json"), **settings}
    return bool(config.get("output_hidden_states", False))


@contextmanager
def replacing(path: str | Path | ArtifactStore) -> Iterator[Path]:
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
        write_checksums(temporary)
    store.publish()


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
    write_json(folder / "modules.json", modules)
    for path in paths:
        (folder / path).mkdir(exist_ok=True)
    if pooling in NEEDS_ALL_LAYERS:
        _write_layer_average(folder / paths[kinds.index("WeightedLayerPooling")], pooling, width, depth)
    after_pooling = kinds.index("Pooling") + 1
    for path, module in zip(paths[after_pooling:], head, strict=False):
        if isinstance(module, Dense):
            write_json(folder / path / "config.json", module.shape.to_config())
            save_file(head_weights(module), folder / path / WEIGHTS)
    after_average: Pooling = "mean" if pooling in NEEDS_ALL_LAYERS else pooling
    name = "lasttoken" if after_average == "last_token" else after_average
    flags = {key: mode == name for key, mode in LEGACY_POOLINGS.items()}
    write_json(
        folder / paths[after_pooling - 1] / "config.json",
        {"word_embedding_dimension": width, **flags, "include_prompt": layout.pools_prompt},
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": layout.max_length, "do_lower_case": False})
    prompts, default = _named_prompts(layout)
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "SentenceTransformer",
            "__version__": {},
            "prompts": prompts,
            "default_prompt_name": default,
            "similarity_fn_name": layout.similarity,
            **({} if layout.truncate_dim is None else {"truncate_dim": layout.truncate_dim}),
        },
    )


def _named_prompts(layout: Layout) -> tuple[dict[str, str], str | None]:
    """Return the prompts to save, and the name of the default one: the folder's name for it, or else `default`."""
    prompts = dict(layout.prompts)
    if not layout.prompt:
        return prompts, None
    name = next((name for name, prompt in prompts.items() if prompt == layout.prompt), "default")
    return {**prompts, name: layout.prompt}, name


def _write_layer_average(folder: Path, pooling: Pooling, width: int, depth: int) -> None:
    start = 1 if pooling == "first_last_avg" else depth - 1
    weights = torch.zeros(depth + 1 - start)
    weights[0] = weights[-1] = 1.0
    save_file({"layer_weights": weights}, folder / WEIGHTS)
    write_json(
        folder / "config.json",
        {"word_embedding_dimension": width, "layer_start": start, "num_hidden_layers": depth},
    )
    backbone = folder.parent / "config.json"
    write_json(backbone, {**read_json(backbone), "output_hidden_states": True})


def _layer_average(folder: Path) -> Pooling:
    """Return the pooling that a WeightedLayerPooling module is equal to."""
    config = read_json(folder / "config.json")
    file = require_module_weights(folder.parent, folder.name)
    try:
        weights = load_file(file)["layer_weights"].tolist()
        ends_only = weights[0] == weights[-1] != 0 and not any(weights[1:-1])
    except (OSError, SafetensorError, LookupError, TypeError) as error:
        raise ModelFormatError(f"{file} has no layer weights ({error}); get the model again") from None
    if ends_only and config.get("layer_start") == 1:
        return "first_last_avg"
    if ends_only and len(weights) == 2:
        return "last_two_avg"
    raise UnsupportedModelError(
        f"{folder}: layer weights {weights} select neither the first and last nor the last two layers; use another model"
    )
