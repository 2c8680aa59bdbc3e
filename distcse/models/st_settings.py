"""Read the settings files of a sentence-transformers folder; a setting that would change vectors and is not used is an error."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any

from distcse.errors import ModelFormatError, UnsupportedModelError
from distcse.models.json_files import read_json

_TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names that the transformer's settings have had; the first file with any setting counts."""
_TASKS = ("feature-extraction", "sequence-classification")
_TEXT = {"method": "forward", "method_output_name": "last_hidden_state"}
_TOKEN_VECTORS = "token_embeddings"
_USED = (
    "max_seq_length",
    "do_lower_case",
    "transformer_task",
    "modality_config",
    "module_output_name",
    *("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs"),
)
_WITHOUT_EFFECT = ("unpad_inputs", "query_length", "document_length")
"""Settings of speed, and of tasks that `encode` does not name."""
_MODEL_SETTINGS_WITHOUT_EFFECT = (
    *("dtype", "torch_dtype", "attn_implementation", "device_map", "low_cpu_mem_usage", "use_safetensors"),
    "add_pooling_layer",
)
"""Arguments of `from_pretrained` that change neither weights nor the function: distcse loads all in float32."""
_WHERE = ("trust_remote_code", "use_fast", *("subfolder", "token", "cache_dir", "revision", "local_files_only"))
"""Arguments that sentence-transformers, too, replaces by the caller's, or that have one value here."""
_KINDS = (None, "SentenceTransformer", "CrossEncoder")
_COMPUTING = ("python", "torch", "transformers", "tokenizers")
"""Packages whose versions `requirements` may name and that distcse computes vectors with."""
_SPECIFIER = re.compile(r"\s*(===?|~=|!=|[<>]=?)\s*\d")
"""How a version specifier begins (PEP 440); transformers takes other text for a part of the package's name."""
_SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
UNNAMED_PROMPTS = ("query", "document")
"""Prompts that every model has; empty where the folder does not define them."""


@dataclass(frozen=True)
class TransformerSettings:
    """Content of `sentence_bert_config.json`; the attributes are those of `Layout`."""

    max_length: int | None = None
    lower_case: bool = False
    config_settings: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSettings:
    """Content of `config_sentence_transformers.json`; the attributes are those of `Layout`."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    truncate_dim: int | None = None
    similarity: str = "cosine"


def read_transformer_settings(folder: Path) -> TransformerSettings:
    """Read the settings next to the backbone, under all names that sentence-transformers has given the file.

    Args:
        folder: The backbone's folder.

    Raises:
        ModelFormatError: A value has the wrong type.
        UnsupportedModelError: A setting is not supported.
    """
    files = [folder / name for name in _TRANSFORMER_FILES]
    file = next((file for file in files if read_json(file)), files[0])
    settings = read_json(file)
    _refuse_unused(file, settings)
    tokenizer = _arguments(file, settings, "tokenizer_args", "processor_kwargs")
    is_given = "model_max_length" in tokenizer
    max_length = tokenizer.pop("model_max_length", settings.get("max_seq_length"))
    if is_given and max_length is None:
        raise UnsupportedModelError(
            f"{file}: model_max_length is null, which truncates no text; write a number of tokens"
        )
    if max_length is not None and (type(max_length) is not int or max_length < 1):
        raise ModelFormatError(
            f"{file}: max_seq_length is {max_length!r:.60}, not a positive integer; write a number of tokens, or null"
        )
    return TransformerSettings(
        max_length,
        bool(settings.get("do_lower_case", False)),
        _arguments(file, settings, "config_args", "config_kwargs"),
        tokenizer,
    )


def read_model_settings(folder: Path) -> ModelSettings:
    """Read prompts, truncation and similarity.

    Args:
        folder: The model's folder.

    Raises:
        ModelFormatError: A value has the wrong type, or the default prompt has no text.
        UnsupportedModelError: The folder has a model without sentence vectors, or an unknown similarity.
    """
    file = folder / "config_sentence_transformers.json"
    settings = read_json(file)
    kind, similarity = settings.get("model_type"), settings.get("similarity_fn_name") or "cosine"
    if kind not in _KINDS:
        raise UnsupportedModelError(
            f"{folder} has a {kind!s:.60}, which has no sentence vectors; use a SentenceTransformer"
        )
    if similarity not in _SIMILARITIES:
        raise UnsupportedModelError(
            f"{file}: similarity_fn_name is {similarity!r:.60}; supported: {', '.join(_SIMILARITIES)}"
        )
    _refuse_other_versions(file, settings.get("requirements"))
    size = settings.get("truncate_dim")
    if size is not None and (type(size) is not int or size < 1):
        raise ModelFormatError(
            f"{file}: truncate_dim is {size!r:.60}, not a positive integer; write the number of dimensions to keep, or null "
            "for all"
        )
    prompts = settings.get("prompts") or {}
    texts = isinstance(prompts, dict) and all(isinstance(prompt, str | None) for prompt in prompts.values())
    if not texts:
        raise ModelFormatError(
            f"{file}: prompts are {prompts!r:.60}, not names with their texts; write prompts such as "
            '{"query": "query: "}'
        )
    named = {name: prompt or "" for name, prompt in prompts.items()}
    return ModelSettings(named, _default_prompt(file, settings.get("default_prompt_name"), named), size, similarity)


def _refuse_other_versions(file: Path, requirements: Any) -> None:
    """Refuse a model that asks for other versions of the libraries that compute its vectors.

    As in sentence-transformers, a requirement that is no version specifier is ignored.
    """
    for name, wanted in requirements.items() if isinstance(requirements, dict) else ():
        package = "torch" if name == "pytorch" else name
        specifier = wanted.get("specifier") if isinstance(wanted, dict) else wanted
        if package not in _COMPUTING or not isinstance(specifier, str) or not _SPECIFIER.match(specifier):
            continue
        from transformers.utils.versions import require_version  # takes seconds to import, and few models need it

        try:
            require_version(f"{package}{specifier}")
        except ValueError:
            continue
        except ImportError:
            installed = python_version() if package == "python" else version(package)
            raise UnsupportedModelError(
                f"{file}: the model requires {package}{specifier}, and {installed} is installed; install such a version, or use "
                "another model"
            ) from None


def find_prompt(prompts: Mapping[str, str], name: str) -> str | None:
    """Return the text of a named prompt; None if there is no such prompt."""
    return prompts.get(name, "" if name in UNNAMED_PROMPTS else None)


def _default_prompt(file: Path, name: Any, prompts: Mapping[str, str]) -> str:
    if name is None:
        return ""
    prompt = find_prompt(prompts, name) if isinstance(name, str) else None
    if prompt is None:
        raise ModelFormatError(
            f"{file}: default_prompt_name is {name!r:.60}, which is none of the prompts ({', '.join(prompts) or 'none'}); write "
            "one of them, or null"
        )
    return prompt


def _refuse_unused(file: Path, settings: Mapping[str, Any]) -> None:
    for key, value in settings.items():
        if key not in (*_USED, *_WITHOUT_EFFECT) and value not in (None, {}, []):
            raise UnsupportedModelError(
                f"{file}: {key} is {value!r:.60}, which distcse does not support; use a model without it"
            )
    task = settings.get("transformer_task", _TASKS[0])
    if task not in _TASKS:
        raise UnsupportedModelError(f"{file}: transformer_task is {task!r:.60}; supported: {', '.join(_TASKS)}")
    modalities = settings.get("modality_config", {"text": _TEXT})
    text = modalities.get("text") if isinstance(modalities, dict) else None
    if task == _TASKS[0] and text != _TEXT:
        raise UnsupportedModelError(f"{file}: text is computed by {text!r:.100}; supported: {_TEXT}")
    output = settings.get("module_output_name") or _TOKEN_VECTORS
    if task == _TASKS[0] and output != _TOKEN_VECTORS:
        raise UnsupportedModelError(f"{file}: module_output_name is {output!r:.60}; supported: {_TOKEN_VECTORS}")
    if isinstance(modalities, dict) and "message" in modalities:
        raise UnsupportedModelError(
            f"{file}: texts are put into a chat template (modality_config: message), which distcse does not support; save the "
            "model with the modality text alone"
        )
    for key in _arguments(file, settings, "model_args", "model_kwargs"):
        if key not in _MODEL_SETTINGS_WITHOUT_EFFECT:
            raise UnsupportedModelError(f"{file}: model argument {key!r:.60} is not supported; use a model without it")


def _arguments(file: Path, settings: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Return the keyword arguments under one of their names, without those that say where a model is and not what it is."""
    found: Any = next((settings[name] for name in names if settings.get(name) is not None), {})
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ModelFormatError(f"{file}: {names[0]} is {found!r:.60}, not an object; write {{}} for no arguments")
    return {key: value for key, value in found.items() if key not in _WHERE}
