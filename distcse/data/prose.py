"""Extract prose from docstrings: paragraphs without sections, code or markup, split into sentences."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
