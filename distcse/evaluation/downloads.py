"""Download the published files of labeled sets: resumed where they broke off, checked, and unpacked safely."""

from __future__ import annotations

import re
import shutil
import tarfile
import tempfile
import zipfile  # noqa: TID251  `_unpack` checks the names
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO

import requests

from distcse.compat import causes
from distcse.errors import DownloadError, EvaluationOptionError, nearest
from distcse.evaluation.conversion import Conversion, convert
from distcse.events import Reporter
from distcse.storage import bytes_checksum, move_atomic, published_checksum, storage_errors, write_text_atomic

_SIMCSE = "https://huggingface.co/datasets/princeton-nlp/datasets-for-simcse/resolve/main"
_META = "https://dl.fbaipublicfiles.com"
_BEIR = "https://public.ukp.informatik.tu-darmstadt.de/thakur/BEIR/datasets"
_BEIR_MD5 = {
    "arguana": "8ad3e3c2a5867cdced806d6503f29b99",
    "climate-fever": "8b66f0a9126c521bae2bde127b4dc99d",
    "cqadupstack": "4e41456d7df8ee7760a7f866133bda78",
    "dbpedia-entity": "c2a39eb420a3164af735795df012ac2c",
    "fever": "5a818580227bfb4b35bb6fa46d9b6c03",
    "fiqa": "17918ed23cd04fb15047f73e6c3bd9d9",
    "hotpotqa": "f412724f78b0d91183a0e86805e16114",
    "msmarco": "444067daf65d982533ea17ebd59501e4",
    "nfcorpus": "a89dba18a62ef92f7d323ec890a0d38d",
    "nq": "d4d3d2e48787a744b6f6e691ff534307",
    "quora": "18fb154900ba42a600f84b839c173167",
    "scidocs": "38121350fc3a4d2f48850f6aff52e4a9",
    "scifact": "5f7d1de60b170fc8027bb7898e2efca1",
    "trec-covid": "ce62140cb23feb9becf6270d0d1fe6d1",
    "webis-touche2020": "46f650ba5a527fc69e0a6521c5a23563",
}
SOURCES = {
    "sts": (f"{_SIMCSE}/senteval.tar",),
    "transfer": (f"{_SIMCSE}/senteval.tar",),
    "pairs": (
        "https://sbert.net/datasets/quora-IR-dataset.zip",
        f"{_META}/glue/data/QNLIv2.zip",
        f"{_META}/glue/data/mrpc_dev_ids.tsv",
        f"{_META}/senteval/senteval_data/msr_paraphrase_train.txt",
        f"{_META}/senteval/senteval_data/msr_paraphrase_test.txt",
    ),
    **{f"beir:{name}": (f"{_BEIR}/{name}.zip",) for name in _BEIR_MD5},
}
"""Set -> addresses of its files."""
MD5 = {f"{name}.zip": digest for name, digest in _BEIR_MD5.items()} | {
    "QNLIv2.zip": "b4efd6554440de1712e9b54e14760e82",
    "msr_paraphrase_train.txt": "793daf7b6224281e75fe61c1f80afe35",
    "msr_paraphrase_test.txt": "e437fdddb92535b820fe8852e2df8a49",
}
"""File -> its checksum: BEIR's own list, and torchtext's."""
_CHUNK = 2**20
_TIMEOUT_S = (10, 60)
_HEADERS = {"Accept-Encoding": "identity"}


def get(sets: Sequence[str], data: Path, mirror: str | None, reporter: Reporter) -> Conversion:
    """Download sets to `downloads` in a data folder, and convert them.

    Args:
        sets: Names in `SOURCES`.
        data: The data folder.
        mirror: Address of a folder that has the files, instead of their publishers'.
        reporter: Receives the progress, and is asked whether to stop.

    Raises:
        EvaluationOptionError: There is no such set.
        DownloadError: A file cannot be had, or is another than the published one.
    """
    for name in sets:
        if name not in SOURCES:
            raise EvaluationOptionError(f"no set {name!r}{nearest(name, SOURCES)}; choose from {', '.join(SOURCES)}")
    downloads = data / "downloads"
    with storage_errors(downloads):
        downloads.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=downloads, prefix=".unpacked-") as unpacked:
            for url in dict.fromkeys(url for name in sets for url in SOURCES[name]):
                file = _download(
                    url if mirror is None else f"{mirror.rstrip('/')}/{Path(url).name}", downloads, reporter
                )
                _unpack(file, Path(unpacked))
            return convert(Path(unpacked), data, reporter)


def _download(url: str, folder: Path, reporter: Reporter) -> Path:
    """Download a file, unless it exists, and compare its checksum with the published one, or with the first download's."""
    file = folder / PurePosixPath(url).name
    recorded = folder / f"{file.name}.sha256"
    expected = {"md5": MD5[file.name]} if file.name in MD5 else {}
    if recorded.exists():
        expected["sha256"] = recorded.read_text().partition(" ")[0]
    if file.exists():
        _verify(file, url, expected)
        return file
    fetched = partial(reporter.advance, file.name, unit="bytes")
    with _request(url) as response:
        for each in (*response.history, response):  # the hub's redirects state the SHA-256 of large files
            if found := re.fullmatch('"?([0-9a-f]{64})"?', each.headers.get("X-Linked-Etag", "")):
                expected.setdefault("sha256", found[1])
        version = response.headers.get("ETag") or response.headers.get("Last-Modified", "")
        part = folder / f".{file.name}.{bytes_checksum(version.encode(), 4)}.part"
        total = int(response.headers.get("Content-Length", 0))
        done = part.stat().st_size if version and part.exists() else 0
        if not 0 < done <= total:
            _save(response, part, 0, partial(fetched, total=total or None))
    if 0 < done < total:
        with _request(url, {"Range": f"bytes={done}-", "If-Range": version}) as response:
            start = done if response.status_code == requests.codes.partial else 0
            _save(response, part, start, partial(fetched, total=total))
    _verify(part, url, expected)
    move_atomic(part, file)
    if not recorded.exists():
        write_text_atomic(recorded, f"{published_checksum(file, 'sha256')}  {file.name}\n")
    return file


@contextmanager
def _request(url: str, headers: Mapping[str, str] = _HEADERS) -> Iterator[requests.Response]:
    fix = "check the network and HTTPS_PROXY, or name another place: --from URL"
    try:
        with requests.get(url, headers={**_HEADERS, **headers}, stream=True, timeout=_TIMEOUT_S) as response:
            if not response.ok:
                raise DownloadError(f"{url} cannot be downloaded: {response.status_code} {response.reason}; {fix}")
            yield response
    except requests.RequestException as error:
        *_, reason = causes(error)
        raise DownloadError(f"{url}: the download failed: {reason}; the same command continues it; or {fix}") from None


def _save(response: requests.Response, part: Path, done: int, progress: Callable[[int], None]) -> None:
    with open(part, "ab" if done else "wb") as opened:
        for chunk in response.iter_content(_CHUNK):
            opened.write(chunk)
            done += len(chunk)
            progress(done)


def _verify(file: Path, url: str, expected: dict[str, str]) -> None:
    for algorithm, digest in expected.items():
        if (found := published_checksum(file, algorithm)) != digest:
            file.unlink()
            raise DownloadError(
                f"{url}: {algorithm} {found}, but {digest} was published, or is that of the first download ({file.name}.sha256); "
                "the file was removed; download it again, or name another place: --from URL"
            )


def _unpack(file: Path, folder: Path) -> None:
    """Write the regular files of an archive below a folder; copy another file."""
    try:
        for name, content in _members(file):
            parts = PurePosixPath(name).parts
            if name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
                raise DownloadError(
                    f"{file} names a file outside its folder, {name!r}; remove it, and do not use this place"
                )
            target = folder.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            with content, open(target, "wb") as opened:
                shutil.copyfileobj(content, opened, _CHUNK)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise DownloadError(
            f"{file} is a damaged archive: {error}; remove it and {file.name}.sha256, and run the command again"
        ) from None


def _members(file: Path) -> Iterator[tuple[str, IO[bytes]]]:
    if file.suffix == ".zip":
        with zipfile.ZipFile(file) as archive:
            yield from ((each.filename, archive.open(each)) for each in archive.infolist() if not each.is_dir())
    elif file.suffix == ".tar":
        with tarfile.open(file) as archive:
            for member in archive:  # links and devices are left out
                if member.isfile() and (content := archive.extractfile(member)) is not None:
                    yield member.name, content
    else:
        with open(file, "rb") as content:
            yield file.name, content
