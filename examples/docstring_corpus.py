"""Text and a search set from the docstrings of installed packages, parsed from source without importing them.

    python examples/docstring_corpus.py PACKAGE ... --out FOLDER

FOLDER/sentences.txt has the sentences, in hash order, so that its first lines sample all packages: train with
`corpus.path=FOLDER/sentences.txt`. One documented object in ten is held out, by a hash of its name. FOLDER/search has up to 1,000
of them as a retrieval set, summaries as queries and descriptions as documents: measure it with
`python -m distcse evaluate MODEL --add retrieval:docstrings=FOLDER/search`. The quickstart's text (`distcse/text/samples`) was
made by `numpy scipy pandas huggingface_hub`.
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

_ALLOWED_WORDS = range(5, 61)
_MIN_LETTERS = 0.8
_MAX_CODE_WORDS = 0.2

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

# Never in an English word: a dot or bracket inside, an underscore, an operator, a capital after a lowercase letter.
_CODE_WORD = re.compile(r"\w[.(\[]\w|_|[=<>{}|@/]|[a-z][A-Z]|\(\)|--")
# "As shown in [1]_." without its citation.
_MISSING_CITATION = re.compile(r"\b(?:of|in|from|by|and|the|see|a)\.$", re.IGNORECASE)
_CODE = re.compile(r"\\|https?:|www\.| = |==|->|=>|\{|\}|`|::|<\||\*\*|~")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", metavar="PACKAGE", help="the name that Python imports: sklearn")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    options = parser.parse_args()
    try:
        sentences, found = (
            docstring_sentences(options.packages),
            held_out_documentation(options.packages)[:_SEARCH_SIZE],
        )
    except LookupError as error:
        sys.exit(str(error))
    (options.out / "search").mkdir(parents=True, exist_ok=True)
    (options.out / "sentences.txt").write_text("".join(f"{sentence}\n" for sentence in sentences), encoding="utf-8")
    rows = {
        "queries": [{"id": f"q{number}", "text": entry.summary} for number, entry in enumerate(found)],
        "corpus": [{"id": f"d{number}", "text": entry.description} for number, entry in enumerate(found)],
        "relevant": [{"query_id": f"q{number}", "corpus_id": f"d{number}"} for number in range(len(found))],
    }
    for name, lines in rows.items():
        content = "".join(f"{json.dumps(line)}\n" for line in lines)
        (options.out / "search" / f"{name}.jsonl").write_text(content, encoding="utf-8")
    print(f"{len(sentences):,} sentences and {len(found):,} queries in {options.out}")


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
        LookupError: A package is not installed.
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
        LookupError: A package is not installed.
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


def is_sentence(text: str) -> bool:
    """Return whether a text reads as one English sentence, by its length, ends, brackets and share of code."""
    words = text.split()
    if len(words) not in _ALLOWED_WORDS or not text[0].isupper() or text[-1] not in ".!?" or not text.isprintable():
        return False
    letters = sum(character.isalpha() or character == " " for character in text)
    code = sum(_CODE_WORD.search(word.strip(".,;:!?()'\"")) is not None for word in words)
    return (
        letters >= _MIN_LETTERS * len(text)
        and code <= _MAX_CODE_WORDS * len(words)
        and _CODE.search(text) is None
        and _MISSING_CITATION.search(text) is None
        and all(text.count(opening) == text.count(closing) for opening, closing in ("()", "[]"))
        and text.count('"') % 2 == 0
    )


def _ends_prose(line: str) -> bool:
    # A line that ends in a colon introduces a list or code.
    return line.rstrip().endswith(":") or any(pattern.match(line) for pattern in (_SECTION, _STOP, _BULLET))


def _matched_group(match: re.Match[str]) -> str:
    """Return the group that matched, one of several alternatives."""
    return next(group for group in match.groups() if group)


if __name__ == "__main__":
    main()
