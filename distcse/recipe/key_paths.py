"""Paths of all keys of a document, and the nearest of them to a key that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import Any, get_args, get_origin

from pydantic import BaseModel

_CLOSE = 0.7
"""Least similarity of two keys, from 0 to 1, for which one is suggested for the other."""
_VERY_CLOSE = 0.8
"""The same, of keys in different sections."""
_ELSEWHERE = {
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "train_batch_size": "batch_size",
    "per_device_train_batch_size": "batch_size",
    "max_seq_length": "max_length",
    "warmup_ratio": "warmup",
    "logging_steps": "log_every",
    "gradient_accumulation_steps": "gradient_accumulation",
    "max_grad_norm": "gradient_clipping",
    "num_samples": "trials",
}
"""Our keys by their names in the training arguments of transformers and sentence-transformers, and in Ray Tune."""


def sections_of(model: type[BaseModel], path: str = "") -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield a section, then the sections inside it, in the order of their keys; `*` is an index or a name."""
    yield path, model
    for name, field in model.model_fields.items():
        star, inner = section_in(field.annotation)
        if inner is not None:
            yield from sections_of(inner, f"{path}.{name}{star}".removeprefix("."))


def section_in(annotation: Any) -> tuple[str, type[BaseModel] | None]:
    """Return the section that a key holds, and `.*` if it holds several."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "", annotation
    many = ".*" if get_origin(annotation) in (list, dict) else ""
    for part in get_args(annotation):
        star, found = section_in(part)
        if found is not None:
            return many + star, found
    return "", None


def key_paths(model: type[BaseModel]) -> Iterator[tuple[str, bool]]:
    """Yield the path of each key of a document, and whether it holds sections; `*` is an index or a name."""
    for path, section in sections_of(model):
        for name, field in section.model_fields.items():
            yield f"{path}.{name}".removeprefix("."), section_in(field.annotation)[1] is not None


def moved_path(model: type[BaseModel], path: str) -> str | None:
    """Return the path of a key that exists, but elsewhere: for `tau2` and `objective.tau2`, `objective.rank.tau2`.

    Args:
        model: The document's class.
        path: A path that does not exist. One of several keys is only looked up where the first key is nearly the same, or is
            no section, and one path alone ends with its last key.

    Returns:
        The nearest path that ends with the same key, or else with what other libraries call so, or else, of one key, with nearly
        the same; the shorter of equally near ones. None if there is none.
    """
    first, *inner = path.split(".")
    last = path.rpartition(".")[2]
    inside = [known for known, _ in key_paths(model) if "." in known]
    keys = {known.rpartition(".")[2] for known in inside}
    wanted = last if last in keys else _ELSEWHERE.get(last) or ("" if inner else _nearly(last, keys))
    ending = [known for known in inside if known.rpartition(".")[2] == wanted]
    is_unique = len(ending) == 1 and first not in model.model_fields
    places = [
        (-known.count("."), _similarity(path, known), known)
        for known in ending
        if not inner or is_unique or _similarity(first, known.partition(".")[0]) >= _CLOSE
    ]
    return _with_places_of(path, max(places)[-1]) if places else None


def _nearly(key: str, keys: Iterable[str]) -> str:
    alike = sorted(known for known in keys if known[:2] == key[:2])
    return next(iter(difflib.get_close_matches(key, alike, n=1, cutoff=_VERY_CLOSE)), "")


def _similarity(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


def _with_places_of(path: str, known: str) -> str:
    """Replace the stars of a known path by the keys that the given path has there, where its keys before are the same."""
    given, keys = path.split("."), known.split(".")
    for position, key in enumerate(keys):
        if key == "*":
            is_same_place = len(given) > position and given[:position] == keys[:position]
            keys[position] = given[position] if is_same_place else "0"
    return ".".join(keys)
