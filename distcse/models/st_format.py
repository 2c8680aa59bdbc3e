"""Read the settings of a sentence-transformers folder; anything that distcse cannot reproduce is an error.

sentence-transformers 5.4 and later write compact files. distcse reads both forms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
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
from torch import nn

from distcse.errors import ModelFormatError, UnsupportedModelError
from distcse.models.files import leads_outside, read_json
from distcse.recipe import Pooling

_LIBRARY = "sentence_transformers."
_WITHOUT_EFFECT = ("Dropout",)
"""Modules that compute nothing at inference."""
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
# A fixed table, because a class named by a model's file must not be imported.
_KINDS: tuple[type[nn.Module], ...] = (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Sigmoid)
ACTIVATIONS: dict[str, type[nn.Module]] = {
    **{f"torch.nn.modules.activation.{kind.__name__}": kind for kind in _KINDS[1:]},
    "torch.nn.modules.linear.Identity": nn.Identity,
    **{f"torch.nn.{kind.__name__}": kind for kind in _KINDS},
}


class SettingsFile(BaseModel):
    """The content of one file; nulls are as good as missing keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


_S = TypeVar("_S", bound=SettingsFile)


def read_settings(file: Path, kind: type[_S]) -> _S:
    """Read a settings file; one that does not exist has the defaults."""
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


def _known_activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise ValueError(f"supported: {', '.join(kind.__name__ for kind in _KINDS)}")
    return name


class DenseShape(VectorFile):
    """The config.json of a `Dense` module: dimensions, bias, qualified name of the activation's class, residual."""

    in_features: PositiveInt
    out_features: PositiveInt
    bias: bool = True
    activation_function: Annotated[str, AfterValidator(_known_activation)] = "torch.nn.modules.activation.Tanh"
    use_residual: bool = False

    def to_config(self) -> dict[str, Any]:
        """Return the content of config.json; `use_residual`, unknown to older readers, is written only when true."""
        names = {"module_input_name", "module_output_name", *(() if self.use_residual else ("use_residual",))}
        return self.model_dump(exclude=names)


def read_model_file(folder: Path) -> ModelFile:
    """Read prompts, truncation and similarity."""
    return read_settings(folder / "config_sentence_transformers.json", ModelFile)


def without_places(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without those that say where a model is and not what it is."""
    return {key: value for key, value in arguments.items() if key not in get_args(_Where)}


def find_prompt(prompts: Mapping[str, str], name: str) -> str | None:
    """Return the text of a named prompt; None if there is no such prompt."""
    return prompts.get(name, "" if name in UNNAMED_PROMPTS else None)


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
    """Read a folder's modules.json and the configuration files next to it."""
    modules = [_module(folder, module) for module in read_json(folder / "modules.json", kind=list)]
    transformer = _transformer_path(folder, modules)
    settings, text_files = read_model_file(folder), [folder / transformer / name for name in _TRANSFORMER_FILES]
    text = read_settings(next((file for file in text_files if read_json(file)), text_files[0]), TransformerFile)
    config_settings, tokenizer_settings = without_places(text.config_args), without_places(text.tokenizer_args)
    max_length = tokenizer_settings.pop("model_max_length", text.max_seq_length)
    pooling: PoolingFile | None = None
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
        elif kind != "Transformer" and kind not in _WITHOUT_EFFECT:
            raise _unsupported_module(folder, kind)
    normalize = bool(head) and head[-1][1] is None
    return Layout(
        pooling.pooling if pooling is not None else None,
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
    """Return the folder of a model's backbone and tokenizer: the model's own, or one inside it that modules.json names."""
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
