"""Checksums of files, texts and small records: 32 hexadecimal digits of BLAKE2b."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

_KEY = "blake2b"
_LINE = re.compile(r"# blake2b ([0-9a-f]{32}) of the lines above\n\Z")


class Digest:
    """A checksum that is computed while the content is streamed."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=16)

    def update(self, content: bytes | memoryview) -> None:
        """Add content."""
        self._digest.update(content)

    def hexdigest(self) -> str:
        """Return the checksum of the content so far."""
        return self._digest.hexdigest()


def checksum(file: Path) -> str:
    """Compute the checksum of a file's content."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def published_checksum(file: Path, algorithm: str) -> str:
    """Compute the checksum that a publisher states of a file: `md5` or `sha256`."""
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, algorithm).hexdigest()


def bytes_checksum(content: bytes, size_bytes: int = 16) -> str:
    """Compute the checksum of bytes."""
    return hashlib.blake2b(content, digest_size=size_bytes).hexdigest()


def sha256(parts: Iterable[bytes | memoryview]) -> str:
    """Compute the SHA-256 of concatenated bytes: 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def text_checksum(text: str) -> str:
    """Compute the checksum of a text, equal to that of a file with this text."""
    return bytes_checksum(text.encode())


def content_key(content: Any) -> str:
    """Compute the checksum of a value, the key of whatever depends on it: no other value of these types has the same encoding.

    A dataclass counts by its `content_name`, a class variable, and by the fields that take part in comparisons. So
    `field(compare=False)` also means: whatever depends on the content doesn't depend on this. Classes and fields can be renamed,
    and what users have stored is still found; another `content_name`, or other fields or their order, make other keys.
    """
    digest = Digest()
    _encode(content, digest)
    return digest.hexdigest()


def _encode(value: Any, digest: Digest) -> None:
    if value is None or isinstance(value, bool | int | float | str):
        text = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else json.dumps(value).encode()
        digest.update(f"{type(value).__name__} {len(text)} ".encode() + text)
        return
    if hasattr(value, "tobytes"):  # a numpy array or number
        digest.update(f"array {value.dtype.str} {value.shape} ".encode() + value.tobytes())
        return
    if is_dataclass(value) and isinstance(kind := getattr(value, "content_name", None), str):
        parts = [getattr(value, field.name) for field in fields(value) if field.compare]
    elif isinstance(value, Mapping):
        kind, parts = "mapping", [part for key in sorted(value) for part in (key, value[key])]
    elif isinstance(value, set | frozenset):
        kind, parts = "set", sorted(value)
    elif isinstance(value, list | tuple):
        kind, parts = "sequence", list(value)
    else:
        raise TypeError(f"a {type(value).__name__} has no key of its content")
    digest.update(f"{kind} {len(parts)} ".encode())
    for part in parts:
        _encode(part, digest)


def text_hashes(texts: Iterable[str]) -> bytes:
    """Return the concatenated hashes of texts, 16 bytes each: the checksums of `text_checksum` as bytes."""
    return b"".join(hashlib.blake2b(text.encode(), digest_size=16).digest() for text in texts)


def add_checksum_line(text: str) -> str:
    """Append a line, a comment in YAML, with the checksum of the text."""
    return f"{text}# blake2b {text_checksum(text)} of the lines above\n"


def without_checksum_line(text: str) -> str | None:
    """Remove the checksum line; None if there is none, or the text was changed."""
    found = _LINE.search(text)
    if found is None or text_checksum(text[: found.start()]) != found[1]:
        return None
    return text[: found.start()]


def dump_checked_json(content: Mapping[str, Any]) -> str:
    """Serialize an object to JSON with its own checksum, so that `load_checked_json` detects changed values."""
    parsed = json.loads(json.dumps(content))
    return json.dumps({**parsed, _KEY: _json_checksum(parsed)}, indent=1)


def load_checked_json(file: Path) -> dict[str, Any]:
    """Read a file that `dump_checked_json` produced."""
    return load_checked_json_bytes(file.read_bytes())


def load_checked_json_bytes(stored: bytes) -> dict[str, Any]:
    """Parse the output of `dump_checked_json`."""
    content = json.loads(stored)
    if not isinstance(content, dict) or content.pop(_KEY, None) != _json_checksum(content):
        raise ValueError("its checksum differs")
    return content


def load_checked_label(label: Path, file: Path) -> dict[str, Any] | None:
    """Read a label, JSON with a file's checksum; None if one of both is missing or incomplete, or the checksum differs."""
    try:
        content = json.loads(label.read_bytes())
        return dict(content) if content[_KEY] == checksum(file) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def dump_label(file: Path, **fields: Any) -> str:
    """Return the label of a file: JSON of some fields and of the file's checksum, for `load_checked_label`."""
    return json.dumps({**fields, _KEY: checksum(file)})


def _json_checksum(content: Mapping[str, Any]) -> str:
    return text_checksum(json.dumps(content, sort_keys=True))
