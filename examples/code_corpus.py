"""Text to learn code search from, and a set to measure it on: functions of Python files, and the summaries of their docstrings.

    python examples/code_corpus.py FOLDER ... --out OUT

OUT/queries.txt has the summaries and OUT/documents.txt the functions, each on one line: train with `search-code
corpus.sources.0.path=OUT/queries.txt corpus.sources.1.path=OUT/documents.txt`. One file in ten is held out, by a hash of its
text; up to 1,000 of its functions, without their docstrings, are a retrieval set: `evaluation.data=OUT`.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import sys
import tokenize
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

_WORDS = range(4, 400)
_HELD_OUT_ONE_IN = 10
_SEARCH_SIZE = 1000


@dataclass(frozen=True)
class Function:
    """A function with a docstring.

    Attributes:
        summary: The docstring's first paragraph.
        source: The function, with its docstring.
        code: The function without it; empty where nothing else is in its lines.
        is_held_out: Whether its file is in the retrieval set.
    """

    summary: str
    source: str
    code: str
    is_held_out: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help="with files *.py, also in its subfolders"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--limit", type=int, default=40_000, help="functions at most (default: 40,000)")
    options = parser.parse_args()
    found = list(islice(functions(options.folders), options.limit))
    learned = [each for each in found if not each.is_held_out]
    if not learned:
        sys.exit(f"no documented function in {', '.join(map(str, options.folders))}; name folders with files *.py")
    options.out.mkdir(parents=True, exist_ok=True)
    queries, documents = lines_of(each.summary for each in learned), lines_of(each.source for each in learned)
    write_lines(options.out / "queries.txt", queries)
    write_lines(options.out / "documents.txt", documents)
    known = {*queries, *lines_of(each.code for each in learned)}
    pairs = {" ".join(each.code.split()): " ".join(each.summary.split()) for each in found if each.is_held_out}
    pairs = {summary: code for code, summary in pairs.items() if code and known.isdisjoint((summary, code))}
    if not pairs:
        print(f"{len(queries):,} queries and {len(documents):,} documents in {options.out}; too few files for a set")
        return
    held_out = list(islice(pairs.items(), _SEARCH_SIZE))
    search = options.out / "retrieval" / "code"
    (search / "qrels").mkdir(parents=True, exist_ok=True)
    for name, place in (("queries", 0), ("corpus", 1)):
        rows = [json.dumps({"_id": f"{name[0]}{number}", "text": pair[place]}) for number, pair in enumerate(held_out)]
        write_lines(search / f"{name}.jsonl", rows)
    judgments = [f"q{number}\tc{number}\t1" for number in range(len(held_out))]
    write_lines(search / "qrels" / "test.tsv", ["query-id\tcorpus-id\tscore", *judgments])
    print(f"{len(queries):,} queries, {len(documents):,} documents, and a set of {len(held_out):,} in {options.out}")


def functions(folders: Sequence[Path]) -> Iterator[Function]:
    """Yield the functions of 4 to 399 words, with summaries of as many, of the Python files in folders, in a random order.

    Folders whose names begin with a dot are left out.
    """
    files = sorted(
        file for folder in folders for file in folder.rglob("*.py") if not _is_hidden(file.relative_to(folder))
    )
    random.Random(0).shuffle(files)
    for file in files:
        try:
            with tokenize.open(file) as opened:  # in the encoding that the file names
                source = opened.read()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # invalid escapes in the source
                tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError):  # a template, or of another version of Python
            continue
        is_held_out = hashlib.blake2b(source.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0
        lines = source.split("\n")  # as Python counts them: a form feed ends none
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
                summary, whole = text.partition("\n\n")[0], "\n".join(lines[node.lineno - 1 : node.end_lineno])
                if len(summary.split()) in _WORDS and len(whole.split()) in _WORDS:
                    yield Function(summary, whole, _without_docstring(node, lines), is_held_out)


def _without_docstring(node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> str:
    docstring, *body = node.body
    before = lines[node.lineno - 1 : docstring.lineno - 1]
    if not body or body[0].lineno == docstring.end_lineno or not before or not before[-1].rstrip().endswith(":"):
        return ""
    return "\n".join([*before, *lines[docstring.end_lineno : node.end_lineno]])


def _is_hidden(file: Path) -> bool:
    return any(part.startswith(".") for part in file.parts)


def lines_of(texts: Iterator[str]) -> list[str]:
    """Return each text as one line, once, in a random order."""
    lines = list(dict.fromkeys(" ".join(text.split()) for text in texts))
    random.Random(0).shuffle(lines)
    return lines


def write_lines(file: Path, lines: Sequence[str]) -> None:
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
