"""List words that nobody in the field uses, in docstrings, comments, messages and pages: `make prose`.

`.ci/prose.toml` holds the words, what to write instead, and the exceptions. Each checker masks what is not prose, so that
a phrase is also found across the lines of a paragraph, a comment or a message.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MASK = "\0"
# What separates two words of a phrase: white space, and between lines a comment's sign or the quotes of adjacent strings.
GAP = r"""[\s"'#]+"""
# Code in backticks, within a paragraph.
CODE = r"(`+)(?:(?!\n\s*\n).)+?\1"
FSTRING_START, FSTRING_END = (getattr(tokenize, f"FSTRING_{end}", -1) for end in ("START", "END"))  # Python 3.12


class Finding(NamedTuple):
    """A banned word at a line of a file."""

    file: str
    line: int
    word: str
    instead: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: '{self.word}': write {self.instead} instead"


@dataclass(frozen=True)
class Rules:
    """The banned words and their exceptions.

    Attributes:
        banned: Word or phrase -> what to write instead. One with a capital is a name, whose case counts.
        exceptions: (glob of files, word) of findings that are allowed.
    """

    banned: dict[str, str]
    exceptions: tuple[tuple[str, str], ...] = ()

    @classmethod
    def load(cls, path: Path) -> Rules:
        """Read a TOML file; a key of `[banned]` may hold several forms: `"knob|knobs"`."""
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        banned = {form: instead for forms, instead in content["banned"].items() for form in forms.split("|")}
        exceptions = content.get("exceptions", [])
        for exception in exceptions:
            if exception.keys() != {"file", "word", "reason"} or exception["word"] not in banned:
                raise SystemExit(f"{path}: {exception}: an exception has a file, a word of [banned], and a reason")
        return cls(banned, tuple((exception["file"], exception["word"]) for exception in exceptions))

    def pattern(self) -> re.Pattern[str]:
        """Matches the banned words; names and longer phrases first. Parts of paths, keys and flags don't match."""
        forms = sorted(self.banned, key=lambda form: (form == form.lower(), -len(form)))
        words = [(form, GAP.join(map(re.escape, form.split()))) for form in forms]
        any_of = "|".join(word if form != form.lower() else f"(?i:{word})" for form, word in words)
        return re.compile(rf"(?<![\w./])(?<!--)(?:{any_of})(?![\w/=]|[.-]\w)")


def find_words(prose: str, file: str, rules: Rules) -> Iterator[Finding]:
    """Yield the banned words of a masked text, with their lines."""
    for match in rules.pattern().finditer(prose):
        word = re.sub(GAP, " ", match[0])
        form = word if word in rules.banned else word.lower()
        yield Finding(file, prose.count("\n", 0, match.start()) + 1, form, rules.banned[form])


def mask(pattern: str, text: str) -> str:
    """Mask every match of a pattern, except line breaks."""
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", MASK, match[0]), text, flags=re.MULTILINE | re.DOTALL)


def mask_others(source: str, prose: dict[int, str]) -> str:
    """Mask all but white space and the pieces of prose, each given by its offset."""
    parts, done = [], 0
    for start, text in sorted(prose.items()):
        parts += [mask(r"\S", source[done:start]), text]
        done = start + len(text)
    return "".join([*parts, mask(r"\S", source[done:])])


def mask_fields(text: str) -> str:
    """Mask the replacement fields of an f-string, except messages in them: `{"is set" if x else "is not set"}`."""
    parts, depth, start, position = [], 0, 0, 0
    while position < len(text):
        if not depth and text.startswith(("{{", "}}"), position):
            position += 1
        elif text[position] == "{":
            if not depth:
                parts.append(text[start:position])
                start = position
            depth += 1
        elif depth and text[position] == "}":
            depth -= 1
            if not depth:
                parts.append(field_prose(text[start : position + 1]))
                start = position + 1
        position += 1
    return "".join([*parts, text[start:]])


def field_prose(field: str) -> str:
    """Mask all of a replacement field but string literals that contain a space; nested fields are masked too."""
    pieces = re.split(r"""('[^']*'|"[^"]*")""", field)
    return "".join(mask(r"\{.*?\}" if n % 2 and " " in piece else ".", piece) for n, piece in enumerate(pieces))


def string_prose(literal: str) -> str:
    """Mask what is not prose in a string literal; its prefix becomes quotes, escapes become spaces."""
    prefix = literal[: re.search("[\"']", literal).start()]  # type: ignore[union-attr]
    text = '"' * len(prefix) + re.sub(r"\\.", "  ", literal[len(prefix) :])
    return mask(CODE, mask_fields(text) if "f" in prefix.lower() else text)


def python_prose(source: str) -> str:
    """Mask all but comments, docstrings, and string literals that contain a space."""
    lines = [0, *(match.end() for match in re.finditer("\n", source)), len(source)]
    prose: dict[int, str] = {}
    strings: dict[int, str] = {}  # adjacent literals, which are one string
    depth, begin, in_statement, is_docstring = 0, 0, False, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start, end = (lines[line - 1] + column for line, column in (token.start, token.end))
        if token.type == FSTRING_START:
            begin, depth = (begin if depth else start), depth + 1
        elif token.type == FSTRING_END:
            start, depth = begin, depth - 1
        if depth:
            continue
        if token.type == tokenize.COMMENT:
            prose[start] = mask(CODE, source[start:end])
        elif token.type in (tokenize.STRING, FSTRING_END):
            is_docstring = is_docstring if strings else not in_statement
            strings[start] = string_prose(source[start:end])
            in_statement = True
        elif token.type != tokenize.NL:
            if is_docstring or any(" " in text for text in strings.values()):
                prose |= strings
            strings, is_docstring = {}, False
            in_statement = token.type not in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return mask_others(source, prose)


def yaml_prose(source: str) -> str:
    """Mask all but comments."""
    comments = re.finditer(r"(?<!\S)#.*", source)
    return mask_others(source, {match.start(): mask(CODE, match[0]) for match in comments})


def markdown_prose(source: str) -> str:
    """Mask fenced blocks, code in backticks, and the targets of links; of a changelog all but what is unreleased."""
    if source.startswith("# Changelog"):
        unreleased = re.finditer(r"^## \[?Unreleased\b.*?(?=^## |\Z)", source, re.MULTILINE | re.DOTALL)
        source = mask_others(source, {match.start(): match[0] for match in unreleased})
    for pattern in (r"^[ >*+-]*(```+|~~~+).*?^[ >]*\1", CODE, r"\]\([^)\s]*|https?://[^\s)>]+"):
        source = mask(pattern, source)
    return source


SCOPES: tuple[tuple[Callable[[str], str], tuple[str, ...]], ...] = (
    (python_prose, tuple(f"{folder}/**/*.py" for folder in ("distcse", "tests", "benchmarks", "examples"))),
    (yaml_prose, tuple(f"{folder}/**/*.y*ml" for folder in ("distcse/recipes", "tune_spaces", "cluster"))),
    (markdown_prose, ("*.md", "benchmarks/*.md", "cluster/README.md", "docs/**/*.md")),
)


def find_all(root: Path, rules: Rules, only: Sequence[str] = ()) -> Iterator[Finding]:
    """Yield the findings in the files of a repository, or in those of some of its files and folders."""
    for read, globs in SCOPES:
        for path in sorted({path for glob in globs for path in root.glob(glob)}):
            file = path.relative_to(root).as_posix()
            if not only or any(Path(file).is_relative_to(place) for place in only):
                yield from find_words(read(path.read_text(encoding="utf-8")), file, rules)


def apply_exceptions(findings: Sequence[Finding], rules: Rules) -> tuple[list[Finding], list[str]]:
    """Return the findings that no exception allows, and one error for each exception that allows nothing."""
    allowed: dict[tuple[str, str], list[Finding]] = {
        (glob, word): [finding for finding in findings if finding.word == word and fnmatch(finding.file, glob)]
        for glob, word in rules.exceptions
    }
    hidden = {finding for found in allowed.values() for finding in found}
    unused = [f"exception for '{word}' in {glob} is unused: remove it" for (glob, word), f in allowed.items() if not f]
    return [finding for finding in findings if finding not in hidden], unused


def count(names: Iterator[str]) -> str:
    """Format how often each name occurs, most frequent first."""
    return ", ".join(f"{name} {times}" for name, times in Counter(names).most_common())


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Print the findings and their counts; return 1 if there are any."""
    parser = argparse.ArgumentParser(description="List words that nobody in the field uses.")
    parser.add_argument("paths", nargs="*", help="files and folders to check, from the root (default: all)")
    parser.add_argument("--counts", action="store_true", help="print the counts alone")
    options = parser.parse_args(arguments)
    rules = Rules.load(root / ".ci" / "prose.toml")
    findings, unused = apply_exceptions(list(find_all(root, rules, options.paths)), rules)
    errors = [] if options.paths else [f".ci/prose.toml: {error}" for error in unused]
    lines = [*([] if options.counts else map(str, findings)), *errors]
    if findings:
        lines.append("per word: " + count(finding.word for finding in findings))
        lines.append("per folder: " + count("/".join(Path(f.file).parts[:-1][:2]) or "." for f in findings))
    lines.append(f"words to replace: {len(findings)}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if findings or errors else 0


if __name__ == "__main__":
    sys.exit(main())
