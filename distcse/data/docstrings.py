"""A corpus available on every machine: the docstrings of installed packages, parsed from source without importing it."""

from __future__ import annotations

import ast
import gc
import logging
import re
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path

from distcse.data.prose import is_sentence, paragraphs, split_sentences
from distcse.errors import CorpusNotFoundError
from distcse.storage import bytes_checksum

EXTRACTOR = 2
_HELD_OUT_ONE_IN = 10
_SKIPPED_FOLDERS = {"tests", "test", "testing", "_vendor", "vendor", "thirdparty_files", "generated", "__pycache__"}
_SKIPPED_FILES = re.compile(r"test_.*|.*_test\.py|conftest\.py")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class DocumentedObject:
    """A function or class with prose in its docstring.

    Attributes:
        name: Package, file and nesting, such as `numpy.linalg._linalg.norm`.
        summary: First sentence, on one line.
        description: The prose after the summary, without sections, code and markup.
    """

    name: str
    summary: str
    description: str


def docstring_sentences(packages: Sequence[str]) -> list[str]:
    """Return the distinct training sentences of packages, in hash order, so that any prefix samples all packages.

    One documented object in ten is held out, by a hash of its name. Its sentences are left out, wherever they occur.

    Args:
        packages: Importable names, such as `sklearn`.

    Raises:
        CorpusNotFoundError: A package is not installed.
    """
    everything = documented(tuple(packages))
    held_out = {_normalize(sentence) for entry in everything if is_held_out(entry) for sentence in _sentences_of(entry)}
    found: dict[str, str] = {}
    for entry in everything:
        if not is_held_out(entry):
            for sentence in filter(is_sentence, _sentences_of(entry)):
                found.setdefault(_normalize(sentence), sentence)
    return [found[key] for key in sorted(found.keys() - held_out, key=_hash)]


def held_out_documentation(packages: Sequence[str]) -> list[DocumentedObject]:
    """Return the held-out objects for retrieving a description by its summary.

    Both texts are unique and long enough, and the description does not contain the summary.

    Raises:
        CorpusNotFoundError: A package is not installed.
    """
    summaries: set[str] = set()
    descriptions: set[str] = set()
    found: list[DocumentedObject] = []
    for entry in filter(is_held_out, documented(tuple(packages))):
        summary, description = _normalize(entry.summary), _normalize(entry.description)
        is_suitable = (
            len(entry.summary.split()) >= 4
            and len(entry.description.split()) >= 10
            and summary not in summaries
            and description not in descriptions
            and summary not in description
        )
        if is_suitable:
            summaries.add(summary)
            descriptions.add(description)
            found.append(entry)
    # In hash order, so that any prefix samples all packages.
    return sorted(found, key=lambda entry: _hash(entry.name))


def packages_fingerprint(packages: Sequence[str]) -> list[str]:
    """Return names and versions of the packages, and the version of this extractor."""
    return [f"{package}=={_version(package)}" for package in packages] + [f"extractor {EXTRACTOR}"]


@lru_cache(maxsize=1)
def documented(packages: tuple[str, ...]) -> list[DocumentedObject]:
    """Return all documented objects; cached, because parsing takes seconds and a run needs it for corpus and retrieval."""
    with _without_gc():
        return [entry for package in packages for entry in documented_in_package(package)]


@contextmanager
def _without_gc() -> Iterator[None]:
    """Pause garbage collection: syntax trees have no cycles, but their nodes trigger it, for half the parsing time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def documented_in_package(package: str) -> Iterator[DocumentedObject]:
    """Yield a package's documented objects, read from its source files; nothing is imported."""
    root = package_root(package)
    unreadable = 0
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if not _SKIPPED_FOLDERS.isdisjoint(relative.parts[:-1]) or _SKIPPED_FILES.fullmatch(file.name):
            continue
        tree = _parse(file)
        if tree is None:
            unreadable += 1
        else:
            yield from _documented_in(tree, ".".join([package, *relative.with_suffix("").parts]))
    if unreadable:
        _LOG.info("%s: skipped %d files that this version of Python cannot parse", package, unreadable)


def _parse(file: Path) -> ast.Module | None:
    """Return the file's syntax tree; None for a template, or for a file of another Python version."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the packages' source
            return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return None


def _documented_in(tree: ast.Module, module: str) -> Iterator[DocumentedObject]:
    queue: deque[tuple[str, ast.AST]] = deque([(module, tree)])
    while queue:
        name, node = queue.popleft()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                qualified = f"{name}.{child.name}"
                queue.append((qualified, child))
                entry = _describe(qualified, ast.get_docstring(child))
                if entry is not None:
                    yield entry


def _describe(name: str, docstring: str | None) -> DocumentedObject | None:
    prose = list(paragraphs(docstring or ""))
    if not prose:
        return None
    first, *rest = split_sentences(prose[0])
    if len(first.split()) < 3:
        return None
    return DocumentedObject(name, first, " ".join([*rest, *prose[1:]]))


def _sentences_of(entry: DocumentedObject) -> list[str]:
    return [entry.summary, *(split_sentences(entry.description) if entry.description else [])]


def _normalize(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()


def is_held_out(entry: DocumentedObject) -> bool:
    """Return whether an object is held out of the corpus, by a hash of its name."""
    return int(_hash(entry.name)[:8], 16) % _HELD_OUT_ONE_IN == 0


def _hash(name: str) -> str:
    return bytes_checksum(name.encode("utf-8", "replace"), size_bytes=8)


def package_root(package: str) -> Path:
    """Return the folder of an installed package, which is not imported. Raises `CorpusNotFoundError` if there is none."""
    # For a dotted name, find_spec would import the parent.
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        raise CorpusNotFoundError(
            f"corpus.docstrings: package {package!r} is not installed; pip install {package}, or remove it "
            "(write the name that Python imports: sklearn, not scikit-learn)"
        )
    return Path(spec.origin).parent


def _version(package: str) -> str:
    root = package_root(package)
    for name in _distributions(package):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return f"files of {_state_of_files(root)}"


def _distributions(package: str) -> Iterator[str]:
    """Yield names of distributions that may contain the package; its own first, because the others need a slow search."""
    yield package
    yield from packages_distributions().get(package, ())  # scikit-learn contains sklearn


def _state_of_files(root: Path) -> str:
    """Return a hash of a source tree without a version; it changes when a file is added, removed or edited."""
    states = [(str(file.relative_to(root)), file.stat().st_mtime_ns) for file in sorted(root.rglob("*.py"))]
    return _hash(repr(states))
