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


def mask(text: str) -> str:
    """Mask all but white space."""
    return re.sub(r"\S", MASK, text)


def mask_all(pattern: str, text: str) -> str:
    """Mask every match of a pattern."""
    return re.sub(pattern, lambda match: re.sub(r"[^\n]", MASK, match[0]), text, flags=re.MULTILINE | re.DOTALL)


def mask_fields(text: str) -> str:
    """Mask the replacement fields of an f-string, except messages in them: `{"is set" if x else "is not set"}`."""
    parts, depth, quote = [], 0, ""
    for part in re.findall(r"""\{\{|\}\}|[{}'"]|[^{}'"]+""", text):
        if depth and part in ("'", '"') and quote in ("", part):
            quote = "" if quote else part
            parts.append(part)
            continue
        depth += 0 if quote else part.count("{") - part.count("}") if depth else part == "{"
        parts.append(part if quote or not (depth or part == "}") else MASK * len(part))
    return "".join(parts)


def string_prose(literal: str) -> str:
    """Mask what is not prose in a string literal; its prefix becomes quotes, escapes become spaces."""
    prefix = re.match("[A-Za-z]*", literal)[0]  # type: ignore[index]
    text = '"' * len(prefix) + re.sub(r"\\.", "  ", literal[len(prefix) :])
    return mask_all("`+[^`]+`+", mask_fields(text) if "f" in prefix.lower() else text)


def python_prose(source: str) -> str:
    """Mask all but comments, docstrings, and string literals that contain a space."""
    starts = [0]
    for line in source.split("\n"):
        starts.append(starts[-1] + len(line) + 1)
    prose: dict[tuple[int, int], str] = {}
    strings: dict[tuple[int, int], str] = {}  # adjacent literals, which are one string
    depth, begin, in_statement, starts_statement = 0, 0, False, False
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        (first, left), (last, right) = token.start, token.end
        start, end = starts[first - 1] + left, starts[last - 1] + right
        if token.type == FSTRING_START:
            begin, depth = (begin if depth else start), depth + 1
        depth -= token.type == FSTRING_END
        if depth:
            continue
        if token.type == tokenize.COMMENT:
            prose[start, end] = mask_all("`+[^`]+`+", source[start:end])
        elif token.type in (tokenize.STRING, FSTRING_END):
            start = begin if token.type == FSTRING_END else start
            starts_statement = starts_statement if strings else not in_statement
            strings[start, end] = string_prose(source[start:end])
            in_statement = True
        elif token.type != tokenize.NL:
            if starts_statement or any(" " in text for text in strings.values()):
                prose |= strings
            strings, starts_statement = {}, False
            in_statement = token.type not in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    parts, done = [], 0
    for (start, end), text in sorted(prose.items()):
        parts += [mask(source[done:start]), text]
        done = end
    return "".join([*parts, mask(source[done:])])


def yaml_prose(source: str) -> str:
    """Mask all but comments."""
    lines = (re.fullmatch(r"(|.*?\s)(#.*)?", line) or re.fullmatch(r"(.*)()", line) for line in source.split("\n"))
    return "\n".join(mask(line[1]) + mask_all("`+[^`]+`+", line[2] or "") for line in lines if line)


def markdown_prose(source: str) -> str:
    """Mask fenced blocks, code in backticks, and the targets of links; of a changelog all but what is unreleased."""
    if source.startswith("# Changelog"):
        unreleased = re.search(r"^## \[?Unreleased\b.*?(?=^## |\Z)", source, re.MULTILINE | re.DOTALL)
        start, end = unreleased.span() if unreleased else (0, 0)
        source = mask(source[:start]) + source[start:end] + mask(source[end:])
    for pattern in (r"^ *(```+|~~~+).*?^ *\1", "(`+)(?!`).+?(?<!`)\\1(?!`)", r"\]\([^)\s]*|https?://[^\s)>]+"):
        source = mask_all(pattern, source)
    return source


SCOPES: tuple[tuple[Callable[[str], str], tuple[str, ...]], ...] = (
    (python_prose, tuple(f"{folder}/**/*.py" for folder in ("distcse", "tests", "benchmarks", "tune_spaces"))),
    (yaml_prose, tuple(f"{folder}/**/*.y*ml" for folder in ("distcse/recipes", "tune_spaces", "cluster"))),
    (markdown_prose, ("docs/**/*.md", "README.md", "CONTRIBUTING.md", "cluster/README.md", "CHANGELOG.md")),
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
    lines.append(f"{len(findings)} words to replace" if findings or errors else "no word to replace")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if findings or errors else 0


if __name__ == "__main__":
    sys.exit(main())
