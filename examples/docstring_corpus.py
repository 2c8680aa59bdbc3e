"""Text to learn search from, and a set to measure it on: docstrings of installed packages, parsed without importing them.

    python examples/docstring_corpus.py PACKAGE ... --out FOLDER

FOLDER/queries.txt has the summaries and FOLDER/documents.txt the descriptions, in hash order, so that their first lines sample
all packages: train with `search corpus.sources.0.path=FOLDER/queries.txt corpus.sources.1.path=FOLDER/documents.txt`. One in ten
documented objects is held out, by a hash of its name; up to 1,000 of them are a retrieval set: `evaluation.data=FOLDER`.
`distcse/text/samples` has the first 5,000 queries and all documents of `numpy scipy pandas huggingface_hub`.
"""

from __future__ import annotations

import argparse
import ast
import gc
import hashlib
import json
import logging
import re
import sys
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

_SEARCH_SIZE = 1000
_HELD_OUT_ONE_IN = 10
_SKIPPED_FOLDERS = {"tests", "test", "testing", "_vendor", "vendor", "thirdparty_files", "generated", "__pycache__"}
_SKIPPED_FILES = re.compile(r"test_.*|.*_test\.py|conftest\.py")
_LOG = logging.getLogger(__name__)

_SHORTEST_SUMMARY, _SHORTEST_DESCRIPTION = 4, 10
"""Fewest words of a query and of a document."""

# The first section of numpydoc, Google or reStructuredText style ends the prose.
_SECTION = re.compile(
    r"^\s*(Parameters|Params|Args|Arguments|Kwargs|Returns?|Yields?|Raises?|Examples?|Notes?|References|See Also|"
    r"Attributes|Methods|Warnings?|Warns|Keyword Args|Keyword Arguments|Shape|Inputs?|Outputs?|Usage|Other Parameters|"
    r"Receives|Todo)\s*(:{1,2}.*)?$",
    re.IGNORECASE,
)
_STOP = re.compile(
    r"^\s*(>>>|\.\. |:(?:param|arg|return|returns|raises|rtype|type|ivar|var|meta|keyword)\b|```|@|[-=~^*#]{3,}|\||"
    r"\w+ : |\w+ \([^)]*\)\s*:|[\w*]+\s+--?\s)"
)
_BULLET = re.compile(r"^\s*([-*+•]|\d+[.)])\s")
_SIGNATURE = re.compile(r"^[\w.]+\(.*\)(\s*->.*)?$")

_ROLE = re.compile(r":[a-z:]+:`[~!]?\.?([^`<]+?)(?:\s*<[^`>]+>)?`")
_CITATION = re.compile(r"\s*\[[\w.]+\]_")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`>]+>`_{0,2}|\[`{0,2}~?([^\[\]`]+)`{0,2}\]\([^)]+\)|\[`~?([^`\]]+)`\]")
_QUOTES = re.compile(r"``([^`]+)``|`~?([^`]+)`_{0,2}|\*\*([^*]+)\*\*|(?<![\w*])\*([^*\s][^*]*)\*(?![\w*])")

_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][)\"']))\s+(?=[A-Z\"'(])")
_ABBREVIATION = re.compile(
    r"(?:\b(?:[Ee]\.g|[Ii]\.e|etc|[Cc]f|vs|al|Figs?|Eqs?|Sec|Refs?|Vol|resp|approx|incl|No|Dr|Mr|St)\.|\b[A-Z]\.)$"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", metavar="PACKAGE", help="the name that Python imports: sklearn")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    try:
        queries, documents = training_texts(options.packages)
        found = held_out_documentation(options.packages)[:_SEARCH_SIZE]
    except LookupError as error:
        sys.exit(str(error))
    search = options.out / "retrieval" / "docstrings"
    (search / "qrels").mkdir(parents=True, exist_ok=True)
    write_lines(options.out / "queries.txt", queries)
    write_lines(options.out / "documents.txt", documents)
    numbered = list(enumerate(found))
    write_lines(
        search / "queries.jsonl", [json.dumps({"_id": f"q{n}", "text": entry.summary}) for n, entry in numbered]
    )
    write_lines(
        search / "corpus.jsonl", [json.dumps({"_id": f"d{n}", "text": entry.description}) for n, entry in numbered]
    )
    judgments = [f"q{number}\td{number}\t1" for number, _ in numbered]
    write_lines(search / "qrels" / "test.tsv", ["query-id\tcorpus-id\tscore", *judgments])
    print(f"{len(queries):,} queries, {len(documents):,} documents, and a set of {len(found):,} in {options.out}")


def write_lines(file: Path, lines: Sequence[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


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


def training_texts(packages: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the distinct summaries and descriptions of packages, in hash order, so that any prefix samples all packages.

    One documented object in ten is held out, by a hash of its name. Texts with one of its sentences are left out.

    Args:
        packages: Importable names, such as `sklearn`.

    Raises:
        LookupError: A package is not installed.
    """
    everything = documented(tuple(packages))
    held_out = {_normalize(sentence) for entry in everything if is_held_out(entry) for sentence in _sentences_of(entry)}
    queries: dict[str, str] = {}
    documents: dict[str, str] = {}
    for entry in everything:
        if is_held_out(entry) or not held_out.isdisjoint(map(_normalize, _sentences_of(entry))):
            continue
        for text, shortest, found in (
            (entry.summary, _SHORTEST_SUMMARY, queries),
            (entry.description, _SHORTEST_DESCRIPTION, documents),
        ):
            if len(text.split()) >= shortest:
                found.setdefault(_normalize(text), text)
    by_hash = [[found[key] for key in sorted(found, key=_hash)] for found in (queries, documents)]
    return by_hash[0], by_hash[1]


def held_out_documentation(packages: Sequence[str]) -> list[DocumentedObject]:
    """Return the held-out objects for retrieving a description by its summary.

    Both texts are unique and long enough, and the description does not contain the summary.

    Raises:
        LookupError: A package is not installed.
    """
    summaries: set[str] = set()
    descriptions: set[str] = set()
    found: list[DocumentedObject] = []
    for entry in filter(is_held_out, documented(tuple(packages))):
        summary, description = _normalize(entry.summary), _normalize(entry.description)
        is_suitable = (
            len(entry.summary.split()) >= _SHORTEST_SUMMARY
            and len(entry.description.split()) >= _SHORTEST_DESCRIPTION
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
    return hashlib.blake2b(name.encode("utf-8", "replace"), digest_size=8).hexdigest()


def package_root(package: str) -> Path:
    """Return the folder of an installed package, which is not imported. Raises `LookupError` if there is none."""
    # For a dotted name, find_spec would import the parent.
    spec = find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None or not spec.submodule_search_locations:
        raise LookupError(
            f"package {package!r} is not installed; pip install {package}, or remove it "
            "(write the name that Python imports: sklearn, not scikit-learn)"
        )
    return Path(spec.origin).parent


def paragraphs(docstring: str) -> Iterator[str]:
    """Yield paragraphs of prose up to the first section, code or list, without markup; a leading signature is skipped."""
    for block in re.split(r"\n\s*\n", docstring.strip()):
        lines = block.splitlines()
        if not lines or lines[0][:1].isspace() or _SIGNATURE.match(" ".join(lines)):
            continue
        if any(_ends_prose(line) for line in lines):
            return
        yield without_markup(" ".join(line.strip() for line in lines))


def without_markup(text: str) -> str:
    """Return the text as it reads on the rendered page: without roles, links, citations, quotes or emphasis."""
    text = _LINK.sub(_matched_group, _ROLE.sub(r"\1", _CITATION.sub("", text)))
    return " ".join(_QUOTES.sub(_matched_group, text).replace("::", ":").split())


def split_sentences(text: str) -> list[str]:
    """Split a paragraph into sentences, but not after an abbreviation or an initial."""
    parts = _END.split(text)
    sentences = [parts[0]]
    for part in parts[1:]:
        if _ABBREVIATION.search(sentences[-1]):
            sentences[-1] += f" {part}"
        else:
            sentences.append(part)
    return sentences


def _ends_prose(line: str) -> bool:
    # A line that ends in a colon introduces a list or code.
    return line.rstrip().endswith(":") or any(pattern.match(line) for pattern in (_SECTION, _STOP, _BULLET))


def _matched_group(match: re.Match[str]) -> str:
    """Return the group that matched, one of several alternatives."""
    return next(group for group in match.groups() if group)


if __name__ == "__main__":
    main()
