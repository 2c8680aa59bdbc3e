"""Results of evaluated models as plain JSON, so that a stopped evaluation can continue; nothing is pickled."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from distcse.evaluation.bootstrap import AucOf, AverageOf, Fixed, MeanOf, PearsonOf, SpearmanOf
from distcse.evaluation.evaluation import ModelResults
from distcse.evaluation.models import RecordedScores
from distcse.evaluation.results import ModelInfo
from distcse.evaluation.tasks import TaskResult

_CLASSES: Mapping[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        ModelResults,
        ModelInfo,
        TaskResult,
        Fixed,
        MeanOf,
        PearsonOf,
        SpearmanOf,
        AucOf,
        AverageOf,
        RecordedScores,
    )
}


def encode_result(value: Any) -> Any:
    """Return a result as JSON values."""
    if isinstance(value, np.ndarray):
        content = b64encode(np.ascontiguousarray(value).tobytes()).decode("ascii")
        return {"array": content, "dtype": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value):
        name = _name_of(value)
        return {
            "class": name,
            "fields": {part.name: encode_result(getattr(value, part.name)) for part in fields(value)},
        }
    if isinstance(value, Mapping):
        return {"entries": [[encode_result(key), encode_result(entry)] for key, entry in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [encode_result(entry) for entry in value]}
    if isinstance(value, list):
        return [encode_result(entry) for entry in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"a stored result cannot contain a {type(value).__name__}")


def decode_result(encoded: Any) -> Any:
    """Return the result that `encode_result` encoded; a named tuple as a tuple."""
    if isinstance(encoded, list):
        return [decode_result(entry) for entry in encoded]
    if not isinstance(encoded, dict):
        return encoded
    if "array" in encoded:
        flat = np.frombuffer(b64decode(encoded["array"]), dtype=np.dtype(encoded["dtype"]))
        return flat.reshape(encoded["shape"]).copy()
    if "class" in encoded:
        return _CLASSES[encoded["class"]](**{name: decode_result(part) for name, part in encoded["fields"].items()})
    if "tuple" in encoded:
        return tuple(decode_result(entry) for entry in encoded["tuple"])
    return {decode_result(key): decode_result(entry) for key, entry in encoded["entries"]}


def _name_of(value: Any) -> str:
    name = type(value).__name__
    if _CLASSES.get(name) is not type(value):
        raise TypeError(f"a stored result cannot contain a {name}")
    return name
