"""What distcse reads from the settings files of a sentence-transformers folder; anything else that they set is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from pydantic import (
    AliasChoices,
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from distcse.errors import UnsupportedModelError
from distcse.models.json_files import read_json
from distcse.recipe import Pooling

_TRANSFORMER_FILES = tuple(
    f"sentence_{family}_config.json"
    for family in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
"""Names that the transformer's settings have had; the first file with any setting counts."""
_Where = Literal["trust_remote_code", "use_fast", "subfolder", "token", "cache_dir", "revision", "local_files_only"]
"""Arguments that sentence-transformers, too, replaces by the caller's, or that have one value here."""
_WithoutEffect = Literal[
    "dtype", "torch_dtype", "attn_implementation", "device_map", "low_cpu_mem_usage", "use_safetensors",
    "add_pooling_layer",
]  # fmt: skip
"""Arguments of `from_pretrained` that change neither weights nor the function: distcse loads all in float32."""
UNNAMED_PROMPTS = ("query", "document")
"""Prompts that every model has; empty where the folder does not define them."""
LEGACY_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Keys of the pooling file before sentence-transformers 5.4, one of which is true, and the value of today's key."""


class SettingsFile(BaseModel):
    """The content of one file; nulls are as good as missing keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_S = TypeVar("_S", bound=SettingsFile)


def read_settings(file: Path, kind: type[_S]) -> _S:
    """Read a settings file; one that does not exist has the defaults.

    Raises:
        ModelFormatError: The file is not a JSON object.
        UnsupportedModelError: It sets a key that distcse does not use, or to another value than distcse supports.
    """
    content = {key: value for key, value in read_json(file).items() if value not in (None, {}, [])}
    try:
        return kind.model_validate(content)
    except ValidationError as invalid:
        error, *_ = invalid.errors(include_url=False)
    *path, last = error["loc"]
    key = ".".join(map(str, path if last == "[key]" else error["loc"]))
    found = "missing" if error["type"] == "missing" else "set" if last == "[key]" else f"{error['input']!r:.100}"
    allowed = "" if error["type"] == "extra_forbidden" else f" ({error['msg'].removeprefix('Value error, ')})"
    raise UnsupportedModelError(
        f"{file}: {key} is {found}, which distcse does not support{allowed}; use a model without it"
    )


class _Text(SettingsFile):
    method: Literal["forward"]
    method_output_name: Literal["last_hidden_state", "logits"]


class _Modalities(SettingsFile):
    model_config = ConfigDict(extra="allow")
    text: _Text
    message: None = None
    """A chat template that texts are put into."""


class TransformerFile(SettingsFile):
    """`sentence_bert_config.json`."""

    max_seq_length: PositiveInt | None = None
    do_lower_case: bool = False
    transformer_task: Literal["feature-extraction", "sequence-classification"] = "feature-extraction"
    modality_config: _Modalities | None = None
    module_output_name: Literal["token_embeddings", "scores"] = "token_embeddings"
    tokenizer_args: dict[str, Any] = Field({}, validation_alias=AliasChoices("tokenizer_args", "processor_kwargs"))
    config_args: dict[str, Any] = Field({}, validation_alias=AliasChoices("config_args", "config_kwargs"))
    model_args: dict[Literal[_WithoutEffect, _Where], Any] = Field(
        {}, validation_alias=AliasChoices("model_args", "model_kwargs")
    )
    unpad_inputs: Any = None
    query_length: Any = None
    document_length: Any = None


class ModelFile(SettingsFile):
    """`config_sentence_transformers.json`."""

    model_config = ConfigDict(extra="ignore")
    model_type: Literal["SentenceTransformer", "CrossEncoder"] = "SentenceTransformer"
    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None
    truncate_dim: PositiveInt | None = None
    similarity_fn_name: Literal["cosine", "dot", "euclidean", "manhattan"] = "cosine"

    @field_validator("default_prompt_name")
    @classmethod
    def _is_a_prompt(cls, name: str, info: ValidationInfo) -> str:
        prompts = info.data.get("prompts", {})
        if name not in (*prompts, *UNNAMED_PROMPTS):
            raise ValueError(f"it is none of the prompts: {', '.join(prompts) or 'none'}")
        return name

    @property
    def named_prompts(self) -> dict[str, str]:
        """The texts of the prompts that the file names."""
        return {name: prompt or "" for name, prompt in self.prompts.items()}

    @property
    def default_prompt(self) -> str:
        """The text of the default prompt; empty without one."""
        return self.prompts.get(self.default_prompt_name or "") or ""


class PoolingFile(SettingsFile):
    """`1_Pooling/config.json`."""

    pooling_mode: Literal["cls", "mean", "max", "lasttoken"]
    include_prompt: bool = True
    embedding_dimension: Any = None
    word_embedding_dimension: Any = None

    @model_validator(mode="before")
    @classmethod
    def _one_mode(cls, content: dict[str, Any]) -> dict[str, Any]:
        flags = [name for key, name in LEGACY_POOLINGS.items() if content.get(key)]
        mode = content.get("pooling_mode", flags or ["mean"])  # sentence-transformers' default
        others = {key: value for key, value in content.items() if key not in LEGACY_POOLINGS}
        return {**others, "pooling_mode": mode[0] if isinstance(mode, list) and len(mode) == 1 else mode}

    @property
    def pooling(self) -> Pooling:
        """The pooling under distcse's name."""
        return "last_token" if self.pooling_mode == "lasttoken" else self.pooling_mode


class VectorFile(SettingsFile):
    """`config.json` of a module that reads and writes the sentence's vector, as `Normalize`."""

    module_input_name: Literal["sentence_embedding"] = "sentence_embedding"
    module_output_name: Literal["sentence_embedding"] = "sentence_embedding"


def read_transformer_file(folder: Path) -> TransformerFile:
    """Read the settings next to the backbone, under all names that sentence-transformers has given the file."""
    files = [folder / name for name in _TRANSFORMER_FILES]
    return read_settings(next((file for file in files if read_json(file)), files[0]), TransformerFile)


def read_model_file(folder: Path) -> ModelFile:
    """Read prompts, truncation and similarity."""
    return read_settings(folder / "config_sentence_transformers.json", ModelFile)


def without_places(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without those that say where a model is and not what it is."""
    return {key: value for key, value in arguments.items() if key not in get_args(_Where)}


def find_prompt(prompts: Mapping[str, str], name: str) -> str | None:
    """Return the text of a named prompt; None if there is no such prompt."""
    return prompts.get(name, "" if name in UNNAMED_PROMPTS else None)
