"""What a value names: a path, a model or data set on the hub, or a custom class."""

from __future__ import annotations

import importlib
import os
import re
from functools import partial
from typing import Annotated, overload

from pydantic import AfterValidator

from distcse.devices.host import PACKAGE
from distcse.errors import CustomClassError, described
from distcse.storage import is_uri


@overload
def absolute(path: str) -> str: ...
@overload
def absolute(path: str | None) -> str | None: ...
def absolute(path: str | None) -> str | None:
    """Make a path absolute; null, and a path in a package, stay as they are."""
    return path if path is None or path.startswith(PACKAGE) else os.path.abspath(os.path.expanduser(path))


def absolute_paths(path: str | list[str] | None) -> str | list[str] | None:
    """Make a path, or each path of a list, absolute; files in packages, and addresses (refused later), stay as they are."""
    if isinstance(path, list):
        return [absolute_location(one) for one in path]
    return None if path is None else absolute_location(path)


def is_path(name: str) -> bool:
    """Whether a value that is a known name or a path is a path: one with a folder or an extension."""
    return os.sep in name or "." in name


def absolute_path(name: str) -> str:
    """Make a path absolute; a known name (see `is_path`) stays as it is."""
    return absolute(name) if is_path(name) else name


@overload
def absolute_folder(name: str) -> str: ...
@overload
def absolute_folder(name: str | None) -> str | None: ...
def absolute_folder(name: str | None) -> str | None:
    """Make the name of an existing folder absolute; anything else (a hub id) stays as it is."""
    return absolute(name) if name is not None and os.path.isdir(os.path.expanduser(name)) else name


def absolute_location(name: str) -> str:
    """Make a folder absolute; an address of object storage stays as it is."""
    return name.rstrip("/") if is_uri(name) else absolute(name)


_NO_ACCOUNTS = (
    "api|blog|brand|chat|collections|datasets|docs|enterprise|join|learn|login|models|new|"
    "notifications|organizations|papers|posts|pricing|search|settings|spaces|tasks"
)
"""First parts of the hub's addresses that are no account, as alternatives of a pattern."""
_PAGE = re.compile(
    r"(?:hf://|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(?P<sets>datasets/)?"
    rf"(?!(?:{_NO_ACCOUNTS})(?:[/?#]|$))"
    r"(?P<id>[^/?#@]+?(?:/(?!(?:tree|blob|raw|resolve|commits?|edit|upload|discussions)(?:/|$))[^/?#@]+?)?)"
    r"(?:\.git)?(?P<rest>(?:[/?#@].*)?)",
    re.IGNORECASE,
)
_DEFAULT_PAGES = ("", "/", "/tree/main", "/tree/main/", "@main")
_WEB = ("https://", "http://")


def hub_id(name: str, is_data_set: bool = False) -> str:
    """Return the id in a page's address on the hub; other names unchanged. Raises `ValueError` for other pages of the web."""
    wanted, other = ("data set", "model") if is_data_set else ("model", "data set")
    page = _PAGE.fullmatch(name.strip())
    if page is None:
        if (
            name.strip().lower().startswith(_WEB)
        ):  # the message doesn't repeat the address, which may contain credentials
            raise ValueError(
                "the address is not the page of a model or data set on huggingface.co; write USER/NAME, or a local folder"
            )
        return name
    if bool(page["sets"]) != is_data_set:
        raise ValueError(f"{name} is the page of a {other}; write the address or USER/NAME of a {wanted}")
    rest = page["rest"].partition("?")[0].partition("#")[0]
    if rest not in _DEFAULT_PAGES:
        raise ValueError(
            f"{name} is a file or revision on the hub, which cannot be chosen; write {page['id']}, or a local folder"
        )
    return page["id"]


HubName = Annotated[str, AfterValidator(hub_id)]
HubDataSetName = Annotated[str, AfterValidator(partial(hub_id, is_data_set=True))]


def _is_module_and_class(text: str) -> str:
    module, colon, name = text.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"{text!r} names no class; write module:Class, such as my_terms:Margin")
    return text


ClassPath = Annotated[str, AfterValidator(_is_module_and_class)]
CustomKwarg = bool | int | float | str | None | list[int] | list[float] | list[str]


def load_class(code: str, key: str) -> type:
    """Import the class that `code` names. Importing runs the module, so name only code that you have read."""
    module, _, name = code.partition(":")
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as lacking:
        raise CustomClassError(
            f"{key} is {code}, but there is no module {lacking.name!r} to import; install it, or put its folder on PYTHONPATH "
            "(`distcse submit` sends a module of the current folder)"
        ) from None
    except Exception as error:
        raise CustomClassError(
            f"{key} is {code}, whose module cannot be imported: {described(error, __file__)}"
        ) from error
    if not isinstance(found, type):
        raise CustomClassError(f"{key} is {code}, but module {module} has no class {name}")
    return found
