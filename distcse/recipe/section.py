"""Base class of recipe sections, value types that several sections share, and walks over the sections of a document."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import parse_qsl

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Precision = Literal["auto", "fp32", "bf16"]
"""Precision of a trained model. `auto` is resolved at the start of a run, by what its devices are fast at."""
FrozenPrecision = Literal["auto", "fp32", "fp16", "bf16"]
"""Precision of a frozen model's forward pass."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=128)]
Weight = Annotated[float, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, le=2**31 - 1)]


def _differ(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds is {seeds}; a seed twice is no second measurement")
    return seeds


Seeds = Annotated[list[Seed], AfterValidator(_differ)]
Labels = Annotated[dict[str, str], Field(min_length=1)]
"""Labels of a Ray node, such as {role: students}."""


def _divides_one_gpu(gpus: float) -> float:
    """Refuse a number of GPUs such as 1.5, which Ray rejects only when the process starts."""
    if gpus > 1 and gpus % 1:
        raise ValueError(
            f"{gpus:g} is above 1 and not an integer, and Ray gives a process a fraction of one GPU or entire GPUs; "
            f"write {gpus // 1:g} or {gpus // 1 + 1:g}"
        )
    return gpus


Gpus = Annotated[float, Field(ge=0), AfterValidator(_divides_one_gpu)]
"""GPUs of one process."""


_SECRET = re.compile(r"key|token|secret|passw|auth$|authori|credential|^(sig|code|pwd)", re.IGNORECASE)


def is_secret(name: str) -> bool:
    """Return whether the name of a key, variable or query parameter suggests a secret, which messages must not show."""
    return _SECRET.search(name) is not None


def refuse_secrets(url: str, key: str, place: str) -> None:
    """Refuse a URL with credentials or a key. The error does not repeat the URL: messages end in logs."""
    server, _, _ = (url.partition("://")[2] or url).partition("/")
    query = url.partition("?")[2]
    secrets = [name for name, _ in parse_qsl(query, keep_blank_values=True) if is_secret(name)]
    found = None
    if "@" in server:
        found = "a user's name or password"
    elif "#" in url or secrets or (query and "=" not in query):
        found = "a key or a fragment behind its path"
    if found is not None:
        raise ValueError(f"{key} holds {found}; take it out, and {place}")


def decided(precision: str) -> str:
    """Return a resolved precision. Raises `ValueError` for `auto`, which each worker would resolve for itself."""
    if precision == "auto":
        raise ValueError("precision is still auto; decide it first (distcse.preflight.precision.decide_precisions)")
    return precision


_MOST = 2**53
"""Largest integer below which all integers are exact as floating-point numbers."""


class KeyValueError(ValueError):
    """A section's validator refuses the value of one of its keys."""

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(reason)
        self.key = key


class Section(BaseModel):
    """A section of a recipe: no unknown keys, no type conversion, immutable after validation."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @property
    def unread_keys(self) -> Mapping[str, str]:
        """Keys that nothing reads, given the section's other values -> why. Keys inside sections are paths."""
        return {}

    @field_validator("*")
    @classmethod
    def _can_be_worked_with(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse text that files and paths cannot hold, integers that arrays cannot index, and text that is empty.

        An empty path would be the current directory. Keys whose default is empty text may be empty.
        """
        may_be_empty = cls.model_fields[info.field_name or ""].default == ""
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, int) and abs(part) > _MOST:
                raise ValueError(f"got a number of {len(str(abs(part)))} digits; allowed: integers up to {_MOST:,}")
            if isinstance(part, str) and ("\0" in part or any("\ud800" <= sign <= "\udfff" for sign in part)):
                raise ValueError(f"got {part[:60]!r}, with a NUL or half of a surrogate pair in it; take it out")
            if isinstance(part, str) and not part.strip() and not may_be_empty:
                raise ValueError(
                    f"{part!r} is empty, such as an unset shell variable; write a value, or remove the key"
                )
        return value


def switch_text(value: object) -> object:
    """Return `on` for true and `off` for false, as which YAML reads them without quotes; other values unchanged."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


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


def is_inside(path: str, keys: Iterable[str]) -> bool:
    """Return whether a key is one of some keys or inside one of them; `training.lr` is not inside `training.l`."""
    return f"{path}.".startswith(tuple(f"{key}." for key in keys))


def unread_keys(recipe: Section) -> dict[str, str]:
    """Return the paths of all keys that nothing reads, whatever their value -> why.

    Each section answers for its own keys (`Section.unread_keys`), and the recipe for those that depend on several sections.
    """
    return {
        _join(path, key): reason for path, section in _sections(recipe) for key, reason in section.unread_keys.items()
    }


def settings_without_effect(recipe: Section, unread: Mapping[str, str]) -> list[str]:
    """Describe the keys that nothing reads and that have another value than their default."""
    found = []
    for path, reason in unread.items():
        *parents, key = path.split(".")
        section: Any = recipe
        for parent in parents:
            section = section[int(parent)] if isinstance(section, list) else _get(section, parent)
        if section is None:
            continue
        value = getattr(section, key)
        if value != type(section).model_fields[key].get_default(call_default_factory=True):
            found.append(f"{path} is set and has no effect: {reason}")
    return found


def _sections(value: Any, path: str = "") -> Iterator[tuple[str, Section]]:
    if isinstance(value, Section):
        yield path, value
        for key in type(value).model_fields:
            yield from _sections(getattr(value, key), _join(path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _sections(item, _join(path, str(number)))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _sections(item, _join(path, str(key)))


def _get(section: Any, key: str) -> Any:
    return section.get(key) if isinstance(section, dict) else getattr(section, key, None)


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
