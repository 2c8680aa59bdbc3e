"""Names of models and data sets on the Hugging Face hub."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_PAGE = re.compile(
    r"(?:hf://|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(?:datasets/)?"
    r"(?!(?:blog|collections|datasets|docs|models|papers|spaces)(?:[/?#]|$))"
    r"(?P<id>[^/?#]+?(?:/[^/?#]+?)?)(?:\.git)?(?P<rest>(?:[/?#].*)?)"
)
_DEFAULT_PAGES = ("", "/", "/tree/main", "/tree/main/")
_WEB = ("https://", "http://")


def hub_id(name: str) -> str:
    """Return the id in a page's address on the hub; other names unchanged.

    Raises:
        ValueError: The address is that of a file, of a revision other than `main`, or of another page of the web.
    """
    page = _PAGE.fullmatch(name.strip())
    if page is None:
        if name.strip().startswith(_WEB):  # the message doesn't repeat the address, which may contain credentials
            raise ValueError(
                "the address is not the page of a model or data set on huggingface.co; write USER/NAME, or a local folder"
            )
        return name
    rest = page["rest"].partition("?")[0].partition("#")[0]
    if rest not in _DEFAULT_PAGES:
        raise ValueError(
            f"{name} is a file or revision on the hub, which cannot be chosen; write {page['id']}, or a local folder"
        )
    return page["id"]


HubName = Annotated[str, AfterValidator(hub_id)]
