"""Open a model's folder: the one place that knows where its files lie, and whether distcse can use them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcse.compat import without_noise
from distcse.devices.process import gc_paused
from distcse.errors import (
    EncoderError,
    ModelFormatError,
    StorageError,
    TokenizerError,
    UnsupportedModelError,
)
from distcse.model_source import CONFIG_FILE, resolve_model
from distcse.models.files import (
    read_json,
    require_module_weights,
    require_weights,
)
from distcse.models.st_format import Layout, backbone_folder, read_layout

_ENCODER_DECODERS = ("t5", "mt5", "umt5")
"""Families of which the encoder alone is used."""
_SHIFTING_DECODERS = ("bart", "mbart")
"""Families whose decoder reads the text itself, shifted by one token, as in sentence-transformers."""
_OVERFLOW_FP16 = ("t5", "mt5", "umt5", "gemma")
"""First letters of model types (config.json) whose activations exceed fp16's largest number, 65,504."""
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.*.json",
    "vocab.txt",
    "vocab.json",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
_VOCABULARY_NAMES = "tokenizer.json, vocab.txt, vocab.json with merges.txt, or a SentencePiece *.model"
_UNUSED_TOKEN = re.compile(r"[\[<]unused_?\d+[\]>]")


@dataclass(frozen=True)
class ModelFolder:
    """A model's folder whose layout was read.

    Attributes:
        root: The folder, with modules.json where it has one.
        layout: Its settings.
        trust_remote_code: Whether to run its Python code.
    """

    root: Path
    layout: Layout
    trust_remote_code: bool = False

    @classmethod
    def read(cls, root: Path, trust_remote_code: bool = False) -> ModelFolder:
        """Read a folder's layout only: its weights are neither needed nor checked, as they are by `open_model`."""
        return cls(root, read_layout(root), trust_remote_code)

    @property
    def backbone(self) -> Path:
        """Folder of the backbone and its tokenizer: `root`, or a folder inside it."""
        return self.root / self.layout.transformer

    @without_noise()
    def load_config(self) -> Any:
        """Load the backbone's config.json, with the folder's settings of it."""
        with gc_paused():
            from transformers import AutoConfig

        folder, trusts_code = self.backbone, self.trust_remote_code
        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trusts_code, **self.layout.config_settings)
        except Exception as error:  # the libraries raise many types
            if "auto_map" in read_json(folder / CONFIG_FILE) and not trusts_code:
                raise ModelFormatError(
                    f"{folder} has Python code, which is not run without your consent; read it, and set trust_remote_code: true"
                ) from None
            raise ModelFormatError(
                f"{folder} cannot be loaded as an encoder: {' '.join(str(error).split())[:400]}"
            ) from error
        config.return_dict = True  # as sentence-transformers asks for in each call
        return config

    def dimension(self) -> int:
        """Return the dimension of the model's vectors, which its configuration files say."""
        sizes = [shape.out_features for _, shape in self.layout.head if shape is not None]
        size = sizes[-1] if sizes else int(self.load_config().hidden_size)
        return min(size, self.layout.truncate_dim or size)

    @without_noise()
    def load_tokenizer(self) -> Any:
        """Load the fast tokenizer, with the folder's settings of it."""
        with gc_paused():
            from transformers import AutoTokenizer

        folder = self.backbone
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, use_fast=True, trust_remote_code=self.trust_remote_code, **self.layout.tokenizer_settings
            )
        except Exception as error:  # the libraries raise many types, tokenizers a bare Exception
            raise _tokenizer_error(folder, f"does not load: {' '.join(str(error).split())[:400]}") from error
        if not tokenizer.is_fast:
            raise TokenizerError(
                f"{folder} has only a slow tokenizer; save the fast one (tokenizer.json) in the folder"
            )
        _refuse_empty_vocabulary(folder, tokenizer)
        if self.layout.lower_case:
            _lowercase(tokenizer)
        return tokenizer

    def supported_config(self) -> Any:
        """Load the config, and refuse a family that is not supported."""
        config = self.load_config()
        model_class(config)
        return config


def open_model(name: str, trust_remote_code: bool = False) -> ModelFolder:
    """Find a model by name, read its layout, and check that its weights can be loaded.

    Raises:
        ModelNotFoundError: No such model exists.
        PickledWeightsError: The weights are not safetensors.
        ModelFormatError: Weights are missing, or a file is malformed or a Git LFS pointer.
        UnsupportedModelError: distcse does not support something that the folder contains.
    """
    root = resolve_model(name, trust_remote_code)
    require_weights(backbone_folder(root))
    folder = ModelFolder.read(root, trust_remote_code)
    for path, shape in folder.layout.head:
        if shape is not None:
            require_module_weights(root, path)
    return folder


def find_local_model(name: str, trust_remote_code: bool = False, wanted: Sequence[str] | None = None) -> Path | None:
    """Return a model's local folder with a config.json; None if it would have to be downloaded, or does not exist."""
    try:
        folder = resolve_model(name, trust_remote_code, wanted, only_local=True)
        return folder if (backbone_folder(folder) / CONFIG_FILE).is_file() else None
    except (EncoderError, StorageError):
        return None


def _lowercase(tokenizer: Any) -> None:
    """Put lowercasing before a tokenizer's own normalization, unless it lowercases itself."""
    from tokenizers.normalizers import Lowercase, Sequence

    backend = tokenizer.backend_tokenizer
    own = [] if backend.normalizer is None else [backend.normalizer]
    if not own or own[0].normalize_str("A") != "a":
        backend.normalizer = Sequence([Lowercase(), *own])


def model_class(config: Any) -> Any:
    """Return the transformers class that computes token vectors; for T5's families, the encoder alone."""
    from transformers import AutoModel, AutoModelForTextEncoding

    supported = (*_ENCODER_DECODERS, *_SHIFTING_DECODERS)
    if getattr(config, "is_encoder_decoder", False) and config.model_type not in supported:
        raise UnsupportedModelError(
            f"{config.model_type} is an encoder with a decoder, which distcse does not support; supported with a decoder: "
            f"{', '.join(supported)}"
        )
    return AutoModelForTextEncoding if config.model_type in _ENCODER_DECODERS else AutoModel


def overflows_fp16(folder: Path) -> bool:
    """Return whether the numbers of a model folder's family exceed fp16's range: T5 and Gemma, by their model cards."""
    return str(read_json(backbone_folder(folder) / "config.json").get("model_type", "")).startswith(_OVERFLOW_FP16)


def _vocabulary_files(folder: Path) -> list[Path]:
    """Return the folder's vocabulary files, by the file names that transformers' tokenizers use."""
    return sorted({file for pattern in _VOCABULARIES for file in folder.glob(pattern) if file.is_file()})


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a vocabulary file."""
    return bool(_vocabulary_files(folder))


def _refuse_empty_vocabulary(folder: Path, tokenizer: Any) -> None:
    """Refuse a loaded tokenizer whose vocabulary has only special, added and unused tokens."""
    others = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    for token in tokenizer.get_vocab():
        if token not in others and token.strip(" ▁Ġ") and not _UNUSED_TOKEN.fullmatch(token):
            return
    kind = type(tokenizer)
    reads = ", ".join(sorted({str(name) for name in kind.vocab_files_names.values()}))
    raise _tokenizer_error(folder, f"has no vocabulary: {kind.__name__} reads {reads}")


def _tokenizer_error(folder: Path, problem: str) -> TokenizerError:
    """Return the error for a tokenizer with a problem, or for a missing one; custom code may read files of other names."""
    names = ", ".join(file.name for file in _vocabulary_files(folder))
    is_custom = "auto_map" in read_json(folder / "tokenizer_config.json")
    found = f"has a tokenizer that {problem}; the folder has {names or 'no file of a vocabulary'}"
    missing = f"has no tokenizer: it has none of {_VOCABULARY_NAMES}"
    return TokenizerError(
        f"{folder} {found if names or is_custom else missing}; save the original model's tokenizer there: "
        f"AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})"
    )
