"""Names of models and data sets on the Hugging Face hub."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated

from pydantic import AfterValidator

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
    """Return the id in a page's address on the hub; other names unchanged.

    Args:
        name: What the user wrote.
        is_data_set: Whether it names a data set, or else a model. Default: False.

    Raises:
        ValueError: The address is that of a file, of a revision other than `main`, of a page of the other kind, or of another
            page of the web.
    """
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
