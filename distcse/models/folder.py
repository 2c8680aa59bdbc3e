"""Open a model's folder: the one place that knows where its files lie, and whether distcse can use them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distcse.errors import EncoderError, StorageError
from distcse.model_source import CONFIG_FILE, resolve_model
from distcse.models.loading import load_config, load_tokenizer, lowercase, model_class
from distcse.models.st_format import Layout, backbone_folder, read_layout
from distcse.models.weight_files import check_weights, require_module_weights, require_weights


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

    def check_weights(self) -> None:
        """Verify the checksums of the weights.

        Raises:
            ModelFormatError: A weight file changed since it was saved.
        """
        check_weights(self.root)

    def load_config(self) -> Any:
        """Load the backbone's config, with the folder's settings of it.

        Raises:
            ModelFormatError: transformers cannot read it.
        """
        return load_config(self.backbone, self.trust_remote_code, self.layout.config_settings)

    def load_tokenizer(self) -> Any:
        """Load the fast tokenizer, with the folder's settings of it.

        Raises:
            EncoderError: As for `load_tokenizer`.
        """
        tokenizer = load_tokenizer(self.backbone, self.trust_remote_code, self.layout.tokenizer_settings)
        if self.layout.lower_case:
            lowercase(tokenizer)
        return tokenizer

    def check_config(self) -> None:
        """Refuse a config that does not load, or a family that is not supported.

        Raises:
            ModelFormatError: transformers cannot read the config.
            UnsupportedModelError: The family is not supported.
        """
        model_class(self.load_config())

    def check(self) -> None:
        """Refuse a model that would not load, as far as its config and its tokenizer tell.

        Raises:
            EncoderError: As for `check_config` and `load_tokenizer`.
        """
        self.load_tokenizer()  # first: where config.json is missing too, this error says more
        self.check_config()


def open_model(name: str, trust_remote_code: bool = False, only_local: bool = False) -> ModelFolder:
    """Find a model by name, read its layout, and check that its weights can be loaded.

    Args:
        name: Folder, URI, `package:NAME/FOLDER` or hub id (see `resolve_model`).
        trust_remote_code: Whether to run the model's Python code.
        only_local: Use the local hub cache only, without network access.

    Raises:
        ModelNotFoundError: No such model exists.
        PickledWeightsError: The weights are not safetensors.
        ModelFormatError: Weights are missing. A file is malformed, or a Git LFS pointer.
        UnsupportedModelError: distcse does not support something that the folder contains.
    """
    root = resolve_model(name, trust_remote_code, only_local=only_local)
    require_weights(backbone_folder(root))
    folder = ModelFolder.read(root, trust_remote_code)
    for path, shape in folder.layout.head:
        if shape is not None:
            require_module_weights(root, path)
    return folder


def find_local_model(name: str, trust_remote_code: bool = False, wanted: Sequence[str] | None = None) -> Path | None:
    """Return a model's local folder with a config.json; None if it would have to be downloaded, or does not exist.

    Args:
        name: As for `resolve_model`.
        trust_remote_code: As for `resolve_model`.
        wanted: Patterns of the files that must be in the hub's cache. Default: all that an encoder needs.
    """
    try:
        folder = resolve_model(name, trust_remote_code, wanted, only_local=True)
        return folder if (backbone_folder(folder) / CONFIG_FILE).is_file() else None
    except (EncoderError, StorageError):
        return None
