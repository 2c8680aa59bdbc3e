"""Names of models and data sets on the Hugging Face hub."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_PAGE = re.compile(
    r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?:datasets/)?(?P<id>[^/?#]+(?:/[^/?#]+)?)(?P<rest>.*)"
)
_DEFAULT_PAGES = ("", "/", "/tree/main", "/tree/main/")


def hub_id(name: str) -> str:
    """Return the id in a page's address on the hub; other names unchanged.

    Raises:
        ValueError: The address is that of a file, or of a revision other than `main`.
    """
    page = _PAGE.fullmatch(name.strip())
    if page is None:
        return name
    rest = page["rest"].partition("?")[0].partition("#")[0]
    if rest not in _DEFAULT_PAGES:
        raise ValueError(
            f"{name} is a file or revision on the hub, which cannot be chosen; write {page['id']}, or a local folder"
        )
    return page["id"]


HubName = Annotated[str, AfterValidator(hub_id)]
