"""A corpus that is on every machine: documentation strings of installed packages, read from source, never imported."""

from __future__ import annotations

import ast
import gc
import hashlib
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

EXTRACTOR = 2
_HELD_OUT_ONE_IN = 10
_SKIPPED_FOLDERS = {"tests", "test", "testing", "_vendor", "vendor", "thirdparty_files", "generated", "__pycache__"}
_SKIPPED_FILES = re.compile(r"test_.*|.*_test\.py|conftest\.py")
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Documented:
    """A function or class with prose in its documentation string."""

    name: str
    """Package, file and nesting, such as `numpy.linalg._linalg.norm`."""
    summary: str
    """Its first sentence, on one line."""
    description: str
    """The prose after it, without sections, code and markup."""


def docstring_sentences(packages: Sequence[str]) -> list[str]:
    """Sentences to learn from, each once, in the order of their hash: the first thousand sample all packages fairly.

    One documented object in ten is held out whole (by a hash of its name): a sentence that occurs in its text is not in
    this list, wherever else it stands. Raises `CorpusError` for a package that is not installed.
    """
    everything = _documented(tuple(packages))
    held_out = {_same(sentence) for entry in everything if _is_held_out(entry) for sentence in _sentences_of(entry)}
    found: dict[str, str] = {}
    for entry in everything:
        if not _is_held_out(entry):
            for sentence in filter(is_sentence, _sentences_of(entry)):
                found.setdefault(_same(sentence), sentence)
    return [found[key] for key in sorted(found.keys() - held_out, key=_hash)]


def held_out_documentation(packages: Sequence[str]) -> list[Documented]:
    """Held-out objects fit for retrieval of a description from its summary: unique, and neither inside the other."""
    summaries: set[str] = set()
    descriptions: set[str] = set()
    found: list[Documented] = []
    for entry in filter(_is_held_out, _documented(tuple(packages))):
        summary, description = _same(entry.summary), _same(entry.description)
        fits = (
            len(entry.summary.split()) >= 4
            and len(entry.description.split()) >= 10
            and summary not in summaries
            and description not in descriptions
            and summary not in description
        )
        if fits:
            summaries.add(summary)
            descriptions.add(description)
            found.append(entry)
    # In the order of their hash: the first thousand are then a fair sample of all packages.
    return sorted(found, key=lambda entry: _hash(entry.name))


def packages_fingerprint(packages: Sequence[str]) -> list[str]:
    """Names and versions, and this extractor's own version."""
    return [f"{package}=={_version(package)}" for package in packages] + [f"extractor {EXTRACTOR}"]


@lru_cache(maxsize=1)
def _documented(packages: tuple[str, ...]) -> list[Documented]:
    """All documented objects. Parsing torch takes seconds, and a run asks twice: corpus first, retrieval last."""
    with _without_cycle_search():
        return [entry for package in packages for entry in _documented_in_package(package)]


@contextmanager
def _without_cycle_search() -> Iterator[None]:
    """A syntax tree has no cycles, but its nodes set off searches for them in all of memory: half the parsing time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _documented_in_package(package: str) -> Iterator[Documented]:
    root = _root(package)
    unreadable = 0
    for file in sorted(root.rglob("*.py")):
        inside = file.relative_to(root)
        if not _SKIPPED_FOLDERS.isdisjoint(inside.parts[:-1]) or _SKIPPED_FILES.fullmatch(file.name):
            continue
        tree = _parsed(file)
        if tree is None:
            unreadable += 1
        else:
            yield from _documented_in(tree, ".".join([package, *inside.with_suffix("").parts]))
    if unreadable:
        _LOG.info("%s: skipped %d files that are not Python of this version", package, unreadable)


def _parsed(file: Path) -> ast.Module | None:
    """The file's syntax tree; None for a template, or a file for another Python: no prose that we can read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return None


def _documented_in(tree: ast.Module, module: str) -> Iterator[Documented]:
    open_: deque[tuple[str, ast.AST]] = deque([(module, tree)])
    while open_:
        name, node = open_.popleft()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                qualified = f"{name}.{child.name}"
                open_.append((qualified, child))
                entry = _describe(qualified, ast.get_docstring(child))
                if entry is not None:
                    yield entry


def _describe(name: str, docstring: str | None) -> Documented | None:
    prose = list(paragraphs(docstring or ""))
    if not prose:
        return None
    first, *rest = split_sentences(prose[0])
    if len(first.split()) < 3:
        return None
    return Documented(name, first, " ".join([*rest, *prose[1:]]))


def _sentences_of(entry: Documented) -> list[str]:
    return [entry.summary, *(split_sentences(entry.description) if entry.description else [])]


def _same(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()


def _is_held_out(entry: Documented) -> bool:
    return int(_hash(entry.name)[:8], 16) % _HELD_OUT_ONE_IN == 0


def _hash(name: str) -> str:
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).hexdigest()


def _root(package: str) -> Path:
    # Of a dotted name, find_spec would import the parent.
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        raise CorpusNotFoundError(
            f"corpus.docstrings: package {package!r} is not installed; pip install {package}, or leave it out "
            "(it is named as Python imports it: sklearn, not scikit-learn)"
        )
    return Path(spec.origin).parent


def _version(package: str) -> str:
    root = _root(package)
    for name in _distributions(package):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return f"files of {_state_of_files(root)}"


def _distributions(package: str) -> Iterator[str]:
    """Names under which the package may have been installed: its own first, for the others cost a search of all."""
    yield package
    yield from packages_distributions().get(package, ())  # sklearn comes with scikit-learn


def _state_of_files(root: Path) -> str:
    """A mark of a source tree that nothing installed: it changes when a file is added, removed or edited."""
    states = [(str(file.relative_to(root)), file.stat().st_mtime_ns) for file in sorted(root.rglob("*.py"))]
    return _hash(repr(states))
