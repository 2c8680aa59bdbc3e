"""Folders as one thing: all of their files, or none.

    <folder>/record.json           names, sizes and checksums of the files, and which content is meant; sealed
             <content>/<file>      the files, in a folder named by their common checksum

Other content has other names, so files are never written over. The record is put when all of them are there; content that no
record names any more is deleted after it. Who fetches meets a record, and files of just that record or none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from distcse.errors import RunRecordError
from distcse.files import checksum, dump_checked_json, fsync, load_checked_json_bytes, storage_errors, text_checksum
from distcse.storage import objects
from distcse.storage.places import RemotePath, mirrors, to_uri

_RECORD = "record.json"
_AT_A_TIME = 8
_MOST_COPIED = 5 * 2**30
"""Bytes: the storage itself copies no larger object in one request."""


@dataclass(frozen=True)
class _Record:
    """What a stored folder holds."""

    content: str
    files: dict[str, tuple[int, str]]
    """Size and checksum by name."""

    @classmethod
    def of(cls, files: Mapping[str, Path]) -> _Record:
        told = {name: (file.stat().st_size, checksum(file)) for name, file in files.items()}
        return cls(text_checksum(json.dumps(sorted(told.items())))[:12], told)

    @classmethod
    def stored(cls, folder: RemotePath) -> _Record | None:
        """That of a folder; None where there is none."""
        content = objects.read(f"{to_uri(folder)}/{_RECORD}")
        if content is None:
            return None
        try:
            told = load_checked_json_bytes(content)
            return cls(told["content"], {name: (size, mark) for name, (size, mark) in told["files"].items()})
        except (ValueError, KeyError, TypeError) as broken:
            raise RunRecordError(
                f"{to_uri(folder)}/{_RECORD} is not what was written ({broken}); remove {to_uri(folder)}"
            ) from None

    def at(self, folder: RemotePath, name: str) -> str:
        """The address of a file."""
        return f"{to_uri(folder)}/{self.content}/{name}"


def upload_dir(folder: Path, files: Mapping[str, Path] | None = None) -> None:
    """Store a folder as it is now; in a folder that all machines share it is stored already.

    Args:
        folder: What is stored.
        files: Its files by name, where they lie elsewhere; None is all that is in it.

    Raises:
        StorageError: The storage refuses. What was stored before still is.
    """
    if not isinstance(folder, RemotePath):
        return
    ours = files or {file.relative_to(folder).as_posix(): file for file in _files(folder)}
    now, before = _Record.of(ours), _Record.stored(folder)
    if now != before:
        _each(ours, lambda name: _store(folder, name, ours[name], now, before))
        objects.write(f"{to_uri(folder)}/{_RECORD}", dump_checked_json(asdict(now)).encode())
        if before is not None and before.content != now.content:
            _delete(folder, before)
    _note(folder, now)


def is_stored(folder: Path) -> bool:
    """Whether a folder is there, without fetching it."""
    return _Record.stored(folder) is not None if isinstance(folder, RemotePath) else folder.is_dir()


def fetch_folder(folder: Path, into: Path | None = None) -> bool:
    """Make a mirror what is stored; whether there is something. Processes of one machine fetch one after the other.

    Args:
        folder: What is wanted.
        into: Where its files go; None is the folder itself, in which no other file then is.

    Raises:
        StorageError: The storage refuses.
        RunError: What is stored is damaged.
    """
    if not isinstance(folder, RemotePath):
        return folder.is_dir()
    wanted = _Record.stored(folder)
    while wanted is not None:
        with _alone(folder):
            if _is_here(folder, into or folder, wanted):
                return True
            try:
                _bring(folder, into or folder, wanted)
            except FileNotFoundError:
                now = _Record.stored(folder)
                if now == wanted:
                    raise RunRecordError(f"{to_uri(folder)} lacks files that its {_RECORD} names; remove it") from None
                wanted = now  # replaced, or removed, in the meantime
                continue
            if into is None:
                for file in _files(folder):
                    if file.relative_to(folder).as_posix() not in wanted.files:
                        file.unlink()
            _note(folder, wanted)
            return True
    return False


def delete_dir(folder: Path) -> None:
    """Remove a stored folder and its mirror."""
    if isinstance(folder, RemotePath) and (record := _Record.stored(folder)) is not None:
        objects.delete(f"{to_uri(folder)}/{_RECORD}")
        _delete(folder, record)
    shutil.rmtree(folder, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove all that is below a folder, what others are reached by before the others."""
    if isinstance(folder, RemotePath):
        for stored in sorted(objects.listed(to_uri(folder)), key=lambda name: (name.count("/"), name)):
            objects.delete(stored)
    shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """All of a folder, those apart that are being written."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))


def _store(folder: RemotePath, name: str, file: Path, now: _Record, before: _Record | None) -> None:
    same = before is not None and before.files.get(name) == now.files[name] and now.files[name][0] <= _MOST_COPIED
    if not (before and same and objects.copy(before.at(folder, name), now.at(folder, name))):
        objects.write(now.at(folder, name), file)


def _delete(folder: RemotePath, record: _Record) -> None:
    _each(record.files, lambda name: objects.delete(record.at(folder, name)))


def _bring(folder: RemotePath, into: Path, record: _Record) -> None:
    with storage_errors(into):
        for name in record.files:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
    for name, (size, mark) in record.files.items():
        file = into / name
        if not (file.is_file() and file.stat().st_size == size and checksum(file) == mark):
            _download(record.at(folder, name), file, mark)


def _download(stored: str, file: Path, mark: str) -> None:
    beside = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(2)}")
    digest = hashlib.blake2b(digest_size=16)
    try:
        with storage_errors(file):
            out = open(beside, "wb")  # noqa: SIM115 - closed below
        with out:
            for part in objects.chunks(stored):
                digest.update(part)
                with storage_errors(file):
                    out.write(part)
        if digest.hexdigest() != mark:
            raise RunRecordError(
                f"{stored} is not what was stored: its checksum differs; remove the folder that it is in"
            )
        with storage_errors(file):
            fsync(beside)
            os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def _each(names: Mapping[str, object], work: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(max_workers=_AT_A_TIME) as pool:
        list(pool.map(work, names))


def _is_here(folder: RemotePath, into: Path, record: _Record) -> bool:
    """Whether a mirror holds what a record says, as far as a look at the sizes tells."""
    try:
        noted = _notes(folder).read_text(encoding="utf-8") == record.content
        return noted and all((into / name).stat().st_size == size for name, (size, _) in record.files.items())
    except OSError:
        return False


def _note(folder: RemotePath, record: _Record) -> None:
    """A mirror was compared with a record, checksum by checksum."""
    notes = _notes(folder)
    with storage_errors(notes):
        notes.parent.mkdir(parents=True, exist_ok=True)
        notes.write_text(record.content, encoding="utf-8")


def _notes(folder: RemotePath) -> Path:
    return mirrors() / ".known" / text_checksum(str(folder))


@contextmanager
def _alone(folder: RemotePath) -> Iterator[None]:
    lock = mirrors() / ".locks" / text_checksum(str(folder))
    with storage_errors(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        held = open(lock, "w")  # noqa: SIM115 - closed below, and its lock with it
    with held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
