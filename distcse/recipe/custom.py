"""Custom classes, named in a recipe as `module:Class`."""

from __future__ import annotations

import importlib
from typing import Annotated

from pydantic import AfterValidator

from distcse.errors import CustomClassError


def _is_module_and_class(text: str) -> str:
    module, colon, name = text.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"{text!r} names no class; write module:Class, such as my_terms:Margin")
    return text


ClassPath = Annotated[str, AfterValidator(_is_module_and_class)]
CustomKwarg = bool | int | float | str | None | list[int] | list[float] | list[str]


def load_class(code: str, key: str) -> type:
    """Import the class that `code` names. Importing runs the module, so name only code that you have read.

    Args:
        code: `module:Class`.
        key: The recipe's key, for errors.

    Raises:
        CustomClassError: There is no such module or class.
    """
    module, _, name = code.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as lacking:
        raise CustomClassError(
            f"{key} is {code}, but there is no module {lacking.name!r} to import; install it, or put its folder on PYTHONPATH "
            "(for a Ray job: --working-dir)"
        ) from None
    if not isinstance(found, type):
        raise CustomClassError(f"{key} is {code}, but module {module} has no class {name}")
    return found
