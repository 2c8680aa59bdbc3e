"""Prose out of documentation strings: paragraphs without sections, code and markup, split into sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator

_WORDS = range(5, 61)
_LETTERS = 0.8
_CODE_WORDS = 0.2

# A section of numpydoc, Google or reStructuredText style ends the prose.
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

# What no English word holds: a dot or bracket inside, an underscore, an operator, a capital after a small letter.
_CODE_WORD = re.compile(r"\w[.(\[]\w|_|[=<>{}|@/]|[a-z][A-Z]|\(\)|--")
# "As shown in [1]_." without its citation.
_DANGLING = re.compile(r"\b(?:of|in|from|by|and|the|see|a)\.$", re.IGNORECASE)
_CODE = re.compile(r"\\|https?:|www\.| = |==|->|=>|\{|\}|`|::|<\||\*\*|~")


def paragraphs(docstring: str) -> Iterator[str]:
    """Paragraphs of prose up to the first section, code or list, markup removed; a signature before them is skipped."""
    for block in re.split(r"\n\s*\n", docstring.strip()):
        lines = block.splitlines()
        if not lines or lines[0][:1].isspace() or _SIGNATURE.match(" ".join(lines)):
            continue
        if any(_ends_prose(line) for line in lines):
            return
        yield without_markup(" ".join(line.strip() for line in lines))


def without_markup(text: str) -> str:
    """The text as a reader of the rendered page sees it: no roles, links, citations, quoting or emphasis."""
    text = _LINK.sub(_inside, _ROLE.sub(r"\1", _CITATION.sub("", text)))
    return " ".join(_QUOTES.sub(_inside, text).replace("::", ":").split())


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


def is_sentence(text: str) -> bool:
    """Whether a text reads as one English sentence: its length, its ends, its brackets, and few words that are code."""
    words = text.split()
    if len(words) not in _WORDS or not text[0].isupper() or text[-1] not in ".!?" or not text.isprintable():
        return False
    letters = sum(character.isalpha() or character == " " for character in text)
    code = sum(_CODE_WORD.search(word.strip(".,;:!?()'\"")) is not None for word in words)
    return (
        letters >= _LETTERS * len(text)
        and code <= _CODE_WORDS * len(words)
        and _CODE.search(text) is None
        and _DANGLING.search(text) is None
        and all(text.count(opening) == text.count(closing) for opening, closing in ("()", "[]"))
        and text.count('"') % 2 == 0
    )


def _ends_prose(line: str) -> bool:
    # A line that ends in a colon announces a list or code; what follows on the next lines is no prose.
    return line.rstrip().endswith(":") or any(rule.match(line) for rule in (_SECTION, _STOP, _BULLET))


def _inside(match: re.Match[str]) -> str:
    """The one group of alternatives that matched."""
    return next(group for group in match.groups() if group)
