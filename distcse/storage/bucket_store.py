"""An `ArtifactStore` in object storage, `s3://BUCKET/PREFIX` or `gs://BUCKET/PREFIX`, with a mirror on each machine.

A file is one object. A folder is stored as a unit: all of its files, or none.

    <folder>/record.json           names, sizes and checksums of the files, and the name of the content; with a checksum
             <content>/<file>      the files, in a folder named by their joint checksum

Only the upload of one object is atomic. Files are therefore never overwritten, because other content has another name. The
record is uploaded after all files; old content is deleted after that. If only some files of a folder are kept, a new record
without the others replaces the old one before these are deleted. A download finds a record, and either exactly its files or
none of them. A folder exists if its record exists. Listings, which may be outdated, serve only for cleaning up and recovery.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

from distcse.errors import ObjectStorageError, RunRecordError
from distcse.storage.artifact_store import ArtifactStore, Guard
from distcse.storage.atomic_files import atomic_write, storage_errors
from distcse.storage.checksums import Digest, checksum, dump_checked_json, load_checked_json_bytes, text_checksum
from distcse.storage.locations import find_endpoint, mirror_root, resolve_path, split_uri, to_uri

_MAX_ATTEMPTS = 6
"""Attempts per request if AWS_MAX_ATTEMPTS is not set; with exponential backoff they take 0.5 to 2 minutes."""
_GCS_RETRY_S = 60
_CHUNK_BYTES = 16 * 2**20
_AWS_CODE = re.compile(r"AWS Error (\w+) during")
_REFUSALS = (
    "ACCESS_DENIED",
    "INVALID_ACCESS_KEY_ID",
    "SIGNATURE_DOES_NOT_MATCH",
    "INVALID_CLIENT_TOKEN_ID",
    "EXPIRED_TOKEN",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
)
"""Answers of AWS and Google to missing or wrong credentials, or to credentials without a permission."""


def _read_object(uri: str) -> bytes | None:
    """Read an object; None if it does not exist."""
    system, key = _open_filesystem(uri)
    with _storage_errors(uri, "read"):
        try:
            with system.open_input_stream(key) as content:
                found: bytes = content.read()
        except FileNotFoundError:
            return None
    return found


def _read_chunks(uri: str) -> Iterator[bytes]:
    """Yield an object's content in chunks."""
    system, key = _open_filesystem(uri)
    try:
        with _storage_errors(uri, "read"), system.open_input_file(key) as content:
            while part := content.read(_CHUNK_BYTES):
                yield part
    except FileNotFoundError:  # not an error of the disk, which `atomic_write` would report
        raise _ObjectGoneError from None


def _write_object(uri: str, content: bytes | Path) -> None:
    """Write an object atomically: its content is the old or the new one."""
    import pyarrow

    if isinstance(content, Path) and content.stat().st_size:
        with pyarrow.memory_map(str(content)) as file:
            data = file.read_buffer()
    else:
        data = content.read_bytes() if isinstance(content, Path) else content
    system, key = _open_filesystem(uri)
    # In one call: an error between two writes would close the stream, which stores the part as an object.
    with _storage_errors(uri, "written"), system.open_output_stream(key) as out:
        out.write(data)


def _copy_object(source: str, target: str) -> bool:
    """Copy an object within the storage; return False if it does not exist."""
    system, key = _open_filesystem(source)
    with _storage_errors(target, "written"):
        try:
            system.copy_file(key, _open_filesystem(target)[1])
        except OSError as error:
            if isinstance(error, FileNotFoundError) or "NO_SUCH_KEY" in str(error):
                return False
            raise
    return True


def _delete_object(uri: str) -> None:
    """Delete an object, if it exists."""
    system, key = _open_filesystem(uri)
    with _storage_errors(uri, "deleted"):
        try:
            system.delete_file(key)
        except FileNotFoundError:
            return


def list_objects(uri: str) -> list[str]:
    """List the addresses of all objects below an address; the listing may be outdated."""
    from pyarrow.fs import FileSelector, FileType

    system, key = _open_filesystem(uri)
    scheme = split_uri(uri)[0]
    with _storage_errors(uri, "read"):
        found = system.get_file_info(FileSelector(key, allow_not_found=True, recursive=True))
    return [f"{scheme}://{entry.path}" for entry in found if entry.type == FileType.File]


def _open_filesystem(uri: str) -> tuple[Any, str]:
    """Return the file system of an address, and the object's path in it."""
    scheme, bucket, key = split_uri(uri)
    with _storage_errors(uri, "reached"):
        system = _connect(scheme, bucket, find_endpoint(scheme), os.environ.get("AWS_MAX_ATTEMPTS"))
    return system, f"{bucket}/{key}"


@lru_cache(maxsize=8)
def _connect(scheme: str, bucket: str, endpoint: str | None, attempts: str | None) -> Any:
    """Create a file system; credentials, endpoint and region are taken from the environment."""
    from pyarrow import fs

    protocol, _, host = (endpoint or "").rpartition("://")
    server = {"scheme": protocol or "https", "endpoint_override": host or None}
    if scheme == "gs":
        # An emulator has no accounts.
        retry_limit = timedelta(seconds=_GCS_RETRY_S)
        return fs.GcsFileSystem(anonymous=endpoint is not None, retry_time_limit=retry_limit, **server)
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if region is None and endpoint is None:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(
        region=region,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=int(attempts or _MAX_ATTEMPTS)),
        connect_timeout=5,
        request_timeout=30,
        allow_delayed_open=True,
        **server,
    )


@contextmanager
def _storage_errors(uri: str, action: str) -> Iterator[None]:
    """Convert refused requests into `ObjectStorageError`; a missing object is one only when writing (its bucket is missing)."""
    import pyarrow

    try:
        yield
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        if isinstance(error, FileNotFoundError) and action != "written":
            raise
        raise ObjectStorageError(
            f"{uri} cannot be {action}: {_reason(uri, ' '.join(str(error).split()))}. Stored objects are intact, and this "
            "machine's files are kept; continue with --resume"
        ) from None


def _reason(uri: str, message: str) -> str:
    """Explain a refusal and how to fix it, without the server's text about credentials."""
    scheme, bucket, _ = split_uri(uri)
    server = find_endpoint(scheme) or {"s3": "AWS", "gs": "Google Cloud"}[scheme]
    server = re.sub(r"//[^/@]*@", "//", server)
    if (refusal := next((answer for answer in _REFUSALS if answer in message), None)) is not None:
        return (
            f"{server} answers {refusal}; set credentials that may get, put, delete and list in {bucket} on every node "
            "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or GOOGLE_APPLICATION_CREDENTIALS)"
        )
    found = _AWS_CODE.search(message)
    code = found[1] if found else ""
    if code == "NO_SUCH_BUCKET" or "NOT_FOUND" in message:
        return f"{server} has no bucket {bucket}; create it, or correct the address"
    if code == "NETWORK_CONNECTION" or "curlCode" in message or "UNAVAILABLE" in message:
        return f"{server} was not reached in several attempts; check the network, or the endpoint in the environment"
    return f"{server} answers {code}" if code else message[:300]


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


class _ObjectGoneError(Exception):
    """An object that a record names does not exist."""


class BucketStore(ArtifactStore):
    """A prefix in a bucket. `path` is its mirror on this machine; pickled as its address, as each machine has its own mirror."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _at, (self.uri, self.guard)

    @property
    def uri(self) -> str:
        return to_uri(self.path)

    @property
    def is_remote(self) -> bool:
        return True

    def upload(self, name: str) -> None:
        self._check()
        _write_object(f"{self.uri}/{name}", self.path / name)

    def fetch(self, name: str) -> bool:
        content = self.read(name)
        if content is None:
            return False
        self._create_parents(name)
        with atomic_write(self.path / name) as temporary:
            temporary.write_bytes(content)
        return True

    def read(self, name: str) -> bytes | None:
        return _read_object(f"{self.uri}/{name}")

    def publish(self, files: Mapping[str, Path] | None = None, is_new: bool = False) -> None:
        sources = files or {file.relative_to(self.path).as_posix(): file for file in self._local_files()}
        new, old = _Record.of(sources), None if is_new else self._stored_record()
        if new != old:
            self._check()
            _run_parallel(sources, lambda name: self._store(name, sources[name], new, old))
            self._check()  # an upload of minutes may outlast a lease
            _write_object(f"{self.uri}/{_RECORD}", dump_checked_json(asdict(new)).encode())
            if old is not None and old.content != new.content:
                _delete_all(self._file_uri(old, name) for name in old.files)
        self._write_note(new)

    def fetch_folder(self, into: Path | None = None) -> bool:
        record = self._stored_record()
        while record is not None:
            with self._locked():
                if self._is_current(into or self.path, record):
                    return True
                try:
                    self._download_missing(into or self.path, record)
                except _ObjectGoneError:
                    new = self._stored_record()
                    if new == record:
                        raise RunRecordError(f"{self} lacks files that its {_RECORD} names; delete it") from None
                    record = new  # another process replaced or deleted the folder in the meantime
                    continue
                if into is None:
                    for file in self._local_files():
                        if file.relative_to(self.path).as_posix() not in record.files:
                            file.unlink()
                self._write_note(record)
                return True
        return False

    def has_folder(self) -> bool:
        return self._stored_record() is not None

    def keep_only(self, names: Collection[str]) -> None:
        self._check()
        record = self._stored_record()
        dropped = {} if record is None else {name: entry for name, entry in record.files.items() if name not in names}
        if record is not None and dropped:
            kept = replace(record, files={name: entry for name, entry in record.files.items() if name in names})
            _write_object(f"{self.uri}/{_RECORD}", dump_checked_json(asdict(kept)).encode())
        if record is not None:
            content = f"{self.uri}/{record.content}"
            kept_uris = {self._file_uri(record, name) for name in record.files if name in names}
            listed = set(list_objects(content)) - kept_uris  # also of an earlier call that was killed
            _delete_all({*listed, *(self._file_uri(record, name) for name in dropped)})
        for file in self._local_files():
            if file.relative_to(self.path).as_posix() not in names:
                file.unlink(missing_ok=True)

    def delete_folder(self) -> None:
        self._check()
        if (record := self._stored_record()) is not None:
            _delete_object(f"{self.uri}/{_RECORD}")
        known = [] if record is None else [self._file_uri(record, name) for name in record.files]
        _delete_all({*known, *list_objects(self.uri)})  # also what a killed process left
        shutil.rmtree(self.path, ignore_errors=True)

    def delete_all(self) -> None:
        self._check()
        for stored in sorted(list_objects(self.uri), key=lambda name: (name.count("/"), name)):
            _delete_object(stored)
        shutil.rmtree(self.path, ignore_errors=True)

    def list_names(self) -> set[str]:
        prefix = f"{self.uri}/"
        return {name.removeprefix(prefix).partition("/")[0] for name in list_objects(self.uri)}

    def probe(self) -> None:
        probe_uri = f"{self.uri}/.distcse-probe-{secrets.token_hex(6)}"
        _write_object(probe_uri, b"distcse")
        stored = _read_object(probe_uri)
        _delete_object(probe_uri)
        if stored != b"distcse":
            raise ObjectStorageError(f"{self}: the storage returned other content than was written; use other storage")

    def _create_parents(self, name: str) -> None:
        with storage_errors(self.path / name):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)

    def _stored_record(self) -> _Record | None:
        """Read the folder's record; None if the folder is not stored."""
        content = self.read(_RECORD)
        if content is None:
            return None
        try:
            fields = load_checked_json_bytes(content)
            files = {name: (size, digest_hex) for name, (size, digest_hex) in fields["files"].items()}
            return _Record(fields["content"], files)
        except (ValueError, KeyError, TypeError) as error:
            raise RunRecordError(f"{self}/{_RECORD} is damaged ({error}); delete {self}") from None

    def _local_files(self) -> list[Path]:
        """List all files of the mirror, without temporary ones."""
        return sorted(file for file in self.path.rglob("*") if file.is_file() and not file.name.startswith("."))

    def _file_uri(self, record: _Record, name: str) -> str:
        return f"{self.uri}/{record.content}/{name}"

    def _store(self, name: str, file: Path, new: _Record, old: _Record | None) -> None:
        same = old is not None and old.files.get(name) == new.files[name]
        if old and same and old.content == new.content:  # a part of this content, left by `keep_only`
            return
        can_copy = same and new.files[name][0] <= _MAX_COPY_BYTES
        if not (old and can_copy and _copy_object(self._file_uri(old, name), self._file_uri(new, name))):
            _write_object(self._file_uri(new, name), file)

    def _download_missing(self, into: Path, record: _Record) -> None:
        with storage_errors(into):
            for name in record.files:
                (into / name).parent.mkdir(parents=True, exist_ok=True)
        for name, (size, digest_hex) in record.files.items():
            file = into / name
            if not (file.is_file() and file.stat().st_size == size and checksum(file) == digest_hex):
                _download(self._file_uri(record, name), file, digest_hex)

    def _is_current(self, into: Path, record: _Record) -> bool:
        """Whether a mirror has a record's files, by the mirror's note and the file sizes."""
        try:
            noted = self._note_path().read_text(encoding="utf-8") == record.content
            return noted and all((into / name).stat().st_size == size for name, (size, _) in record.files.items())
        except OSError:
            return False

    def _write_note(self, record: _Record) -> None:
        """Note that the mirror's files have the checksums of a record."""
        notes = self._note_path()
        with storage_errors(notes):
            notes.parent.mkdir(parents=True, exist_ok=True)
            notes.write_text(record.content, encoding="utf-8")

    def _note_path(self) -> Path:
        return mirror_root() / ".known" / text_checksum(str(self.path))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = mirror_root() / ".locks" / text_checksum(str(self.path))
        with storage_errors(lock):
            lock.parent.mkdir(parents=True, exist_ok=True)
            lock_file = open(lock, "w")  # noqa: SIM115 - closed below, and its lock with it
        with lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX)
            yield


def _at(uri: str, guard: Guard | None) -> BucketStore:
    return BucketStore(resolve_path(uri), guard)


def _download(stored: str, file: Path, digest_hex: str) -> None:
    digest = Digest()
    with atomic_write(file) as temporary, open(temporary, "wb") as out:
        for chunk in _read_chunks(stored):
            digest.update(chunk)
            out.write(chunk)
        if digest.hexdigest() != digest_hex:
            raise RunRecordError(
                f"{stored} is damaged: its checksum differs from the record's; delete the folder that contains it"
            )


def _delete_all(uris: Iterable[str]) -> None:
    _run_parallel(uris, _delete_object)


def _run_parallel(names: Iterable[str], work: Callable[[str], None]) -> None:
    with ThreadPoolExecutor(max_workers=_MAX_PARALLEL) as pool:
        list(pool.map(work, names))
