"""Checks of a model folder's tokenizer files.

Without a vocabulary file, transformers may create a tokenizer that has only special tokens.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from distcse.errors import EncoderError, TokenizerError
from distcse.models.json_files import read_json, refuse_pointer

_FILES = ("tokenizer.json", "tokenizer.*.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken", "tekken.json")
_EXPECTED = "tokenizer.json, vocab.txt, vocab.json with merges.txt, or a SentencePiece *.model"
_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")


def vocabulary_files(folder: Path) -> list[Path]:
    """Return the folder's vocabulary files, by the file names that transformers' tokenizers use."""
    return sorted({file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()})


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a vocabulary file."""
    return bool(vocabulary_files(folder))


def refuse_pointers(folder: Path) -> None:
    """Refuse Git LFS pointers in place of vocabulary files; with tokenizer.json, the others are not read.

    Raises:
        ModelFormatError: There is one.
    """
    complete = folder / "tokenizer.json"
    for file in [complete] if complete.is_file() else [*vocabulary_files(folder), folder / "merges.txt"]:
        refuse_pointer(file)


def refuse_empty_vocabulary(folder: Path, tokenizer: Any) -> None:
    """Refuse a loaded tokenizer whose vocabulary has only special, added and unused tokens.

    Raises:
        TokenizerError: The folder has no vocabulary file. The tokenizer does not read the vocabulary files of the
            folder.
    """
    others = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    for token in tokenizer.get_vocab():
        if token not in others and token.strip(" ▁Ġ") and not _UNUSED.fullmatch(token):
            return
    kind = type(tokenizer)
    reads = ", ".join(sorted({str(name) for name in kind.vocab_files_names.values()}))
    raise _error(folder, f"has a tokenizer without a vocabulary: {kind.__name__} reads {reads}, but the folder has ")


def tokenizer_load_error(folder: Path, error: Exception) -> EncoderError:
    """Return the error for a tokenizer that transformers cannot load; it names missing files where they are the cause."""
    reason = " ".join(str(error).split())[:400]
    if "auto_map" in read_json(folder / "tokenizer_config.json"):  # custom code may read other files
        return TokenizerError(f"{folder} has a tokenizer that does not load: {reason}; {_describe_fix(folder)}")
    return _error(folder, f"has a tokenizer that does not load: {reason}; the folder has ")


def _error(folder: Path, problem: str) -> EncoderError:
    """Return the error for a tokenizer with a problem, or for a missing one."""
    names = ", ".join(file.name for file in vocabulary_files(folder))
    if not names:
        return TokenizerError(f"{folder} has no tokenizer: it has none of {_EXPECTED}; {_describe_fix(folder)}")
    return TokenizerError(f"{folder} {problem}{names}; {_describe_fix(folder)}")


def _describe_fix(folder: Path) -> str:
    """Return the command that saves a tokenizer in the folder."""
    return f"save the original model's tokenizer there: AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})"
