"""The function between a cross-encoder's logits and its scores, which its folder names as sentence-transformers does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.errors import UnsupportedModelError
from distcse.models.folder import ModelFolder
from distcse.models.json_files import read_json

SIGMOID = "torch.nn.modules.activation.Sigmoid"
"""The default for a head with one label."""
_SETTINGS, _KEY = "sentence_transformers", "activation_fn"
_HISTORIC = "sbert_ce_default_activation_function"


def _sigmoid(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    scores: NDArray[np.float64] = 1 / (1 + np.exp(-logits))
    return scores


_FUNCTIONS: dict[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]] = {
    "Sigmoid": _sigmoid,
    "Identity": lambda logits: logits,
    "Tanh": np.tanh,
}
# A fixed table, because a class named by a model's file must not be imported.


def read_activation(folder: ModelFolder, config: Any) -> str:
    """Return the qualified name of a cross-encoder's activation.

    Args:
        folder: The model's folder.
        config: Its transformers config, where sentence-transformers 2 to 5.3 name the activation.

    Raises:
        UnsupportedModelError: distcse does not compute it.
    """
    has_modules = (
        folder.root / "modules.json"
    ).is_file()  # without it, sentence-transformers does not read the first file
    named = read_json(folder.root / "config_sentence_transformers.json").get(_KEY) if has_modules else None
    settings = getattr(config, _SETTINGS, None)
    if named is None and isinstance(settings, dict) and _KEY in settings:
        named = settings[_KEY]
    elif named is None:
        named = getattr(config, _HISTORIC, None)
    name = SIGMOID if named is None else named
    if not isinstance(name, str) or not name.startswith("torch.nn.") or name.rpartition(".")[2] not in _FUNCTIONS:
        raise UnsupportedModelError(
            f"{folder.root} turns logits into scores by {name!r:.100}, which distcse does not compute; supported: "
            f"{', '.join(_FUNCTIONS)}"
        )
    return name


def write_activation(config: Any, name: str) -> None:
    """Set the activation in a config, where every version of sentence-transformers that reads our folders finds it."""
    for key in (_SETTINGS, _HISTORIC):
        vars(config).pop(key, None)
    if name != SIGMOID:
        setattr(config, _SETTINGS, {_KEY: name})


def activate(logits: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """Return the scores of logits under an activation."""
    return _FUNCTIONS[name.rpartition(".")[2]](logits)
