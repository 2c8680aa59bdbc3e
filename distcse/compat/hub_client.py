"""Errors of the hub's client, which raises many types: what to do about each cause."""

from __future__ import annotations

import errno
from collections.abc import Iterator

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_NO_ACCESS = (errno.EACCES, errno.EPERM, errno.EROFS)
_NETWORK = {"ConnectionError", "TimeoutError", "Timeout", "TransportError"}
"""Classes of the standard library, of requests and of httpx, one of which every error of the network has as a base."""


def fix_of_hub_error(error: BaseException, without_network: str, access: str = "a private model") -> str:
    """Return the imperative fix of an error of the hub's client; empty if the cause is none of those below.

    Args:
        error: The error.
        without_network: What to do without a network, such as `write a local folder`.
        access: What a token is needed for.
    """
    chain = list(causes(error))
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    statuses = [getattr(getattr(each, "response", None), "status_code", None) for each in chain]
    status = next((status for status in statuses if isinstance(status, int)), 0)
    codes = {each.errno for each in chain if isinstance(each, OSError)}
    if "OfflineModeIsEnabled" in kinds:
        return f"unset HF_HUB_OFFLINE, or {without_network}"
    if any("CERTIFICATE_VERIFY_FAILED" in str(each) for each in chain):
        return "set SSL_CERT_FILE to a file with your company's certificates"
    if codes & {*_NO_ROOM}:
        return "free disk space, or set HF_HOME to a folder with more"
    if codes & {*_NO_ACCESS}:
        return "set HF_HOME to a folder in which you may write, or correct the permissions"
    if status in (401, 403, 404) or kinds & {"RepositoryNotFoundError", "LocalTokenNotFoundError"}:
        return f"check the name, and set HF_TOKEN for {access}, or run hf auth login"
    if status == 429 or status >= 500:
        return "try again later"
    if kinds & _NETWORK:
        return f"check the network and HTTPS_PROXY, or {without_network}"
    return ""


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what caused it, the first cause last; also what `raise … from None` hides, as `datasets` has it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
