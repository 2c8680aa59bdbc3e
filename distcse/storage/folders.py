"""Upload and download folders as a unit: all of their files, or none.

    <folder>/record.json           names, sizes and checksums of the files, and the name of the content; with a checksum
             <content>/<file>      the files, in a folder named by their joint checksum

Files are never overwritten, because other content has another name. The record is uploaded after all files; old content is
deleted after that. A download finds a record, and either exactly its files or none of them.
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
from distcse.storage.places import RemotePath, mirror_root, to_uri

_RECORD = "record.json"
_MAX_PARALLEL = 8
_MAX_COPY_BYTES = 5 * 2**30
"""Largest object that the storage copies in one request."""


@dataclass(frozen=True)
class _Record:
    """The content of a stored folder."""

    content: str
    files: dict[str, tuple[int, str]]
    """Size and checksum by name."""

    @classmethod
    def of(cls, files: Mapping[str, Path]) -> _Record:
        entries = {name: (file.stat().st_size, checksum(file)) for name, file in files.items()}
        return cls(text_checksum(json.dumps(sorted(entries.items())))[:12], entries)

    @classmethod
    def stored(cls, folder: RemotePath) -> _Record | None:
        """Read a folder's record; None if the folder is not stored.

        Raises:
            RunRecordError: The record is damaged.
            ObjectStorageError: The storage refuses the request.
        """
        content = objects.read(f"{to_uri(folder)}/{_RECORD}")
        if content is None:
            return None
        try:
            fields = load_checked_json_bytes(content)
            return cls(
                fields["content"], {name: (size, digest_hex) for name, (size, digest_hex) in fields["files"].items()}
            )
        except (ValueError, KeyError, TypeError) as error:
            raise RunRecordError(f"{to_uri(folder)}/{_RECORD} is damaged ({error}); delete {to_uri(folder)}") from None

    def uri_of(self, folder: RemotePath, name: str) -> str:
        """Return the address of a file."""
        return f"{to_uri(folder)}/{self.content}/{name}"


def upload_dir(folder: Path, files: Mapping[str, Path] | None = None) -> None:
    """Upload a folder, and wait until it is stored; does nothing for a shared folder.

    Args:
        folder: The folder.
        files: Its files by name, if they are in other places. Default: all files in it.

    Raises:
        ObjectStorageError: The storage refuses the upload. What was stored before is intact.
    """
    if not isinstance(folder, RemotePath):
        return
    sources = files or {file.relative_to(folder).as_posix(): file for file in _files(folder)}
    new, old = _Record.of(sources), _Record.stored(folder)
    if new != old:
        _run_parallel(sources, lambda name: _store(folder, name, sources[name], new, old))
        objects.write(f"{to_uri(folder)}/{_RECORD}", dump_checked_json(asdict(new)).encode())
        if old is not None and old.content != new.content:
            _delete(folder, old)
    _write_note(folder, new)


def is_stored(folder: Path) -> bool:
    """Whether a folder is stored; downloads nothing."""
    return _Record.stored(folder) is not None if isinstance(folder, RemotePath) else folder.is_dir()


def fetch_folder(folder: Path, into: Path | None = None) -> bool:
    """Download a stored folder to its mirror; return whether it is stored. Processes of one machine download one after the other.

    Args:
        folder: The folder.
        into: Target folder. Default: the mirror, from which other files are removed.

    Raises:
        ObjectStorageError: The storage refuses the download.
        RunRecordError: The stored folder is damaged.
    """
    if not isinstance(folder, RemotePath):
        return folder.is_dir()
    record = _Record.stored(folder)
    while record is not None:
        with _locked(folder):
            if _is_current(folder, into or folder, record):
                return True
            try:
                _download_missing(folder, into or folder, record)
            except FileNotFoundError:
                new = _Record.stored(folder)
                if new == record:
                    raise RunRecordError(f"{to_uri(folder)} lacks files that its {_RECORD} names; delete it") from None
                record = new  # another process replaced or deleted the folder in the meantime
                continue
            if into is None:
                for file in _files(folder):
                    if file.relative_to(folder).as_posix() not in record.files:
                        file.unlink()
            _write_note(folder, record)
            return True
    return False


def delete_dir(folder: Path) -> None:
    """Delete a stored folder and its mirror."""
    if isinstance(folder, RemotePath) and (record := _Record.stored(folder)) is not None:
        objects.delete(f"{to_uri(folder)}/{_RECORD}")
        _delete(folder, record)
    shutil.rmtree(folder, ignore_errors=True)


def remove(folder: Path) -> None:
    """Delete everything below a folder, records before the files that they reference, and the mirror."""
    if isinstance(folder, RemotePath):
        for stored in sorted(objects.list_uris(to_uri(folder)), key=lambda name: (name.count("/"), name)):
            objects.delete(stored)
    shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """List all files of a folder, without temporary ones."""
    return sorted(file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))


def _store(folder: RemotePath, name: str, file: Path, new: _Record, old: _Record | None) -> None:
    same = old is not None and old.files.get(name) == new.files[name] and new.files[name][0] <= _MAX_COPY_BYTES
    if not (old and same and objects.copy(old.uri_of(folder, name), new.uri_of(folder, name))):
        objects.write(new.uri_of(folder, name), file)


def _delete(folder: RemotePath, record: _Record) -> None:
    _run_parallel(record.files, lambda name: objects.delete(record.uri_of(folder, name)))


def _download_missing(folder: RemotePath, into: Path, record: _Record) -> None:
    with storage_errors(into):
        for name in record.files:
            (into / name).parent.mkdir(parents=True, exist_ok=True)
    for name, (size, digest_hex) in record.files.items():
        file = into / name
        if not (file.is_file() and file.stat().st_size == size and checksum(file) == digest_hex):
            _download(record.uri_of(folder, name), file, digest_hex)


def _download(stored: str, file: Path, digest_hex: str) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{secrets.token_hex(2)}")
    digest = hashlib.blake2b(digest_size=16)
    try:
        with storage_errors(file):
            out = open(temporary, "wb")  # noqa: SIM115 - closed below
        with out:
            for chunk in objects.read_chunks(stored):
                digest.update(chunk)
                with storage_errors(file):
                    out.write(chunk)
        if digest.hexdigest() != digest_hex:
            raise RunRecordError(
                f"{stored} is damaged: its checksum differs from the record's; delete the folder that contains it"
            )
        with storage_errors(file):
            fsync(temporary)
            os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)


def _run_parallel(names: Mapping[str, object], work: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(max_workers=_MAX_PARALLEL) as pool:
        list(pool.map(work, names))


def _is_current(folder: RemotePath, into: Path, record: _Record) -> bool:
    """Whether a mirror has a record's files, by the mirror's note and the file sizes."""
    try:
        noted = _note_path(folder).read_text(encoding="utf-8") == record.content
        return noted and all((into / name).stat().st_size == size for name, (size, _) in record.files.items())
    except OSError:
        return False


def _write_note(folder: RemotePath, record: _Record) -> None:
    """Note that the mirror's files have the checksums of a record."""
    notes = _note_path(folder)
    with storage_errors(notes):
        notes.parent.mkdir(parents=True, exist_ok=True)
        notes.write_text(record.content, encoding="utf-8")


def _note_path(folder: RemotePath) -> Path:
    return mirror_root() / ".known" / text_checksum(str(folder))


@contextmanager
def _locked(folder: RemotePath) -> Iterator[None]:
    lock = mirror_root() / ".locks" / text_checksum(str(folder))
    with storage_errors(lock):
        lock.parent.mkdir(parents=True, exist_ok=True)
        lock_file = open(lock, "w")  # noqa: SIM115 - closed below, and its lock with it
    with lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        yield
