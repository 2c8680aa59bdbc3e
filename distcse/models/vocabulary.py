"""Checks of a model folder's tokenizer files.

Without a vocabulary file, transformers may create a tokenizer that has only special tokens.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from distcse.errors import EncoderError, ModelFormatError, TokenizerMismatchError, TokenizerMissingError
from distcse.models.json_files import is_lfs_pointer, lfs_pointer_error, read_json

_FILES = ("tokenizer.json", "tokenizer.*.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken", "tekken.json")
_EXPECTED = "tokenizer.json, vocab.txt, vocab.json with merges.txt, or a SentencePiece *.model"
_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")


def vocabulary_files(folder: Path) -> list[Path]:
    """Return the folder's vocabulary files, by the file names that transformers' tokenizers use."""
    return sorted({file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()})


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a vocabulary file."""
    return bool(vocabulary_files(folder))


def refuse_broken_files(folder: Path) -> None:
    """Refuse tokenizer files that are Git LFS pointers or empty.

    With a complete tokenizer.json, other vocabulary files are not read, and may be pointers.

    Raises:
        ModelFormatError: A file that the tokenizer reads is a pointer or empty.
    """
    complete = folder / "tokenizer.json"
    if complete.is_file() and not is_lfs_pointer(complete):
        vocabularies, others = [complete], [folder / "tokenizer_config.json"]
    else:
        vocabularies, others = vocabulary_files(folder), [folder / "merges.txt", folder / "tokenizer_config.json"]
    pointer = next((file for file in [*vocabularies, *others] if is_lfs_pointer(file)), None)
    if pointer is not None:
        raise lfs_pointer_error(pointer)
    empty = next((file for file in vocabularies if file.stat().st_size == 0), None)
    if empty is not None:
        raise ModelFormatError(f"{empty} is empty; {_describe_fix(folder)}")


def refuse_missing_reader(folder: Path) -> None:
    """Refuse a vocabulary that only SentencePiece reads, where it is not installed.

    Raises:
        TokenizerMismatchError: Names the package to install.
    """
    files = vocabulary_files(folder)
    if find_spec("sentencepiece") is None and files and all(file.suffix == ".model" for file in files):
        raise TokenizerMismatchError(
            f"{folder} has a SentencePiece vocabulary ({files[0].name}) and no tokenizer.json; "
            "pip install sentencepiece"
        )


def refuse_empty_vocabulary(folder: Path, tokenizer: Any) -> None:
    """Refuse a loaded tokenizer whose vocabulary has only special, added and unused tokens.

    Raises:
        TokenizerMissingError: The folder has no vocabulary file.
        TokenizerMismatchError: The tokenizer does not read the vocabulary files of the folder.
    """
    others = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    for token in tokenizer.get_vocab():
        if token not in others and token.strip(" ▁Ġ") and not _UNUSED.fullmatch(token):
            return
    names = ", ".join(file.name for file in vocabulary_files(folder))
    if not names:
        raise TokenizerMissingError(_describe_missing(folder))
    kind = type(tokenizer)
    reads = ", ".join(sorted({str(name) for name in kind.vocab_files_names.values()}))
    raise TokenizerMismatchError(
        f"{folder} has a tokenizer without a vocabulary: {kind.__name__} reads {reads}, but the folder has {names}; "
        f"{_describe_fix(folder)}"
    )


def tokenizer_load_error(folder: Path, error: Exception) -> EncoderError:
    """Return the error for a tokenizer that transformers cannot load; it names missing files where they are the cause."""
    has_custom_code = "auto_map" in read_json(folder / "tokenizer_config.json")  # may read other files
    names = {file.name for file in vocabulary_files(folder)}
    if not names and not has_custom_code:
        return TokenizerMissingError(_describe_missing(folder))
    reason = " ".join(str(error).split())[:400]
    if names == {"vocab.json"} and not has_custom_code and not (folder / "merges.txt").is_file():
        reason = "vocab.json without merges.txt"
    return TokenizerMismatchError(f"{folder} has a tokenizer that does not load: {reason}; {_describe_fix(folder)}")


def _describe_missing(folder: Path) -> str:
    return f"{folder} has no tokenizer: it has none of {_EXPECTED}; {_describe_fix(folder)}"


def _describe_fix(folder: Path) -> str:
    """Return the command that saves a tokenizer in the folder."""
    return f"save the original model's tokenizer there: AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})"
