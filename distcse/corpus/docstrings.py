"""A corpus that is on every machine: the documentation strings of installed packages, read from source, never imported."""

from __future__ import annotations

import ast
import hashlib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from distcse.errors import CorpusError

EXTRACTOR = 1
_HELD_OUT_ONE_IN = 10
_SKIPPED_FOLDERS = {"tests", "test", "testing", "_vendor", "vendor", "thirdparty_files", "generated", "__pycache__"}

# A section of numpydoc, Google or reStructuredText style ends the prose.
_SECTION = re.compile(
    r"^\s*(Parameters|Args|Arguments|Returns?|Yields?|Raises|Examples?|Notes?|References|See Also|Attributes|Methods|"
    r"Warnings?|Warns|Keyword Args|Keyword Arguments|Shape|Inputs?|Outputs?|Usage|Other Parameters|Receives|Todo)"
    r"\s*(:{1,2}.*)?$",
    re.IGNORECASE,
)
_STOP = re.compile(
    r"^\s*(>>>|\.\. |:param|:return|:rtype|:type|:raises|```|@|[-=~^*#]{3,}|\||\w+ \([^)]*\)\s*:|[\w*]+\s+--?\s)"
)
_BULLET = re.compile(r"^\s*([-*+•]|\d+[.)])\s")
_ROLE = re.compile(r":[a-z:]+:`~?\.?([^`<]+?)(?:\s*<[^`>]+>)?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{0,2}|\[([^\]]+)\]\([^)]+\)")
_QUOTES = re.compile(r"``([^`]+)``|`([^`]+)`_{0,2}|\*\*([^*]+)\*\*|(?<!\w)\*([^*\s][^*]*)\*(?!\w)")
_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
_ABBREVIATION = re.compile(r"(?:\b(?:e\.g|i\.e|etc|cf|vs|al|Fig|Eq|Sec|resp|approx|No|Dr|St)\.|\b[A-Z]\.)$")


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
    """Sentences to learn from, in the order of packages and files, each once.

    One documented object in ten is held out whole (by a hash of its name): a sentence that occurs in its text is not in
    this list, wherever else it stands.
    """
    everything = _documented(tuple(packages))
    seen = {_same(sentence) for entry in everything if _is_held_out(entry) for sentence in _sentences_of(entry)}
    found: list[str] = []
    for entry in everything:
        if _is_held_out(entry):
            continue
        for sentence in _sentences_of(entry):
            if _is_good(sentence) and (key := _same(sentence)) not in seen:
                seen.add(key)
                found.append(sentence)
    return found


def held_out_documentation(packages: Sequence[str]) -> list[Documented]:
    """Held-out objects fit for retrieval of a description from its summary: unique, and neither inside the other."""
    summaries: set[str] = set()
    descriptions: set[str] = set()
    found: list[Documented] = []
    for entry in _documented(tuple(packages)):
        summary, description = _same(entry.summary), _same(entry.description)
        fits = (
            _is_held_out(entry)
            and len(entry.summary.split()) >= 4
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
    """All documented objects. Parsing torch alone takes ten seconds, and a run asks twice: corpus first, retrieval last."""
    return [entry for package in packages for entry in _documented_in_package(package)]


def _documented_in_package(package: str) -> Iterator[Documented]:
    root = _root(package)
    for file in sorted(root.rglob("*.py")):
        inside = file.relative_to(root)
        if _SKIPPED_FOLDERS.isdisjoint(inside.parts[:-1]) and not file.name.startswith("test_"):
            module = ".".join([package, *inside.with_suffix("").parts])
            yield from _documented_in(file, module)


def _documented_in(file: Path, module: str) -> Iterator[Documented]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's invalid escapes
            tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # a template or a file for another Python: not prose we can read
        return
    open_: list[tuple[str, ast.AST]] = [(module, tree)]
    while open_:
        name, node = open_.pop(0)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                qualified = f"{name}.{child.name}"
                open_.append((qualified, child))
                entry = _parse(qualified, ast.get_docstring(child))
                if entry is not None:
                    yield entry


def _parse(name: str, docstring: str | None) -> Documented | None:
    paragraphs = list(_paragraphs(docstring or ""))
    if not paragraphs:
        return None
    first, *rest = split_sentences(paragraphs[0])
    if len(first.split()) < 3:
        return None
    return Documented(name, first, " ".join([*rest, *paragraphs[1:]]))


def _paragraphs(docstring: str) -> Iterator[str]:
    """Paragraphs of prose up to the first section, code or list, markup removed."""
    for block in re.split(r"\n\s*\n", docstring.strip()):
        lines = block.splitlines()
        if any(_SECTION.match(line) or _STOP.match(line) or _BULLET.match(line) for line in lines):
            return
        if not lines or lines[0][:1].isspace():
            continue
        text = _without_markup(" ".join(line.strip() for line in lines))
        if text.endswith(":"):
            return
        yield text


def _without_markup(text: str) -> str:
    text = _LINK.sub(lambda m: m[1] or m[2], _ROLE.sub(r"\1", text))
    text = _QUOTES.sub(lambda m: next(group for group in m.groups() if group), text)
    return " ".join(text.replace("::", ":").split())


def split_sentences(text: str) -> list[str]:
    """Sentences of a paragraph; a full stop after an abbreviation or an initial ends none."""
    parts = _END.split(text)
    sentences = [parts[0]]
    for part in parts[1:]:
        if _ABBREVIATION.search(sentences[-1]):
            sentences[-1] += f" {part}"
        else:
            sentences.append(part)
    return sentences


def _sentences_of(entry: Documented) -> list[str]:
    return [entry.summary, *(split_sentences(entry.description) if entry.description else [])]


def _is_good(sentence: str) -> bool:
    words = len(sentence.split())
    letters = sum(character.isalpha() or character == " " for character in sentence)
    return 5 <= words <= 60 and letters >= 0.8 * len(sentence) and sentence[0].isupper() and sentence[-1] in ".!?"


def _same(text: str) -> str:
    return re.sub(r"\W+", " ", text.lower()).strip()


def _is_held_out(entry: Documented) -> bool:
    return int(_hash(entry.name)[:8], 16) % _HELD_OUT_ONE_IN == 0


def _hash(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


def _root(package: str) -> Path:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # a name that is no package's
        spec = None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        raise CorpusError(
            f"corpus.docstrings: package {package!r} is not installed; pip install {package}, or leave it out"
        )
    return Path(spec.origin).parent


def _version(package: str) -> str:
    _root(package)
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
