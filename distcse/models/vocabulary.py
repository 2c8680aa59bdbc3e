"""Whether a folder holds its tokenizer's vocabulary. Where it does not, transformers may make up a tokenizer without words."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from distcse.errors import EncoderError, ModelFormatError, TokenizerMismatchError, TokenizerMissingError
from distcse.models.st_format import written_json

_FILES = ("tokenizer.json", "tokenizer.*.json", "vocab.txt", "vocab.json", "*.model", "*.tiktoken", "tekken.json")
_WANTED = "tokenizer.json, vocab.txt, vocab.json with merges.txt, or a SentencePiece *.model"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_UNUSED = re.compile(r"[\[<]unused_?\d+[\]>]")


def vocabulary_files(folder: Path) -> list[Path]:
    """Files that a vocabulary is read from, by the names that the tokenizers of transformers have for them."""
    return sorted({file for pattern in _FILES for file in folder.glob(pattern) if file.is_file()})


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder holds a file that a vocabulary is read from."""
    return bool(vocabulary_files(folder))


def refuse_broken_files(folder: Path) -> None:
    """Raise `EncoderError` where the tokenizer would read a Git LFS pointer, or an empty file.

    With a complete tokenizer.json no other vocabulary is read: the others may be pointers.
    """
    complete = folder / "tokenizer.json"
    if complete.is_file() and not _is_pointer(complete):
        vocabularies, others = [complete], [folder / "tokenizer_config.json"]
    else:
        vocabularies, others = vocabulary_files(folder), [folder / "merges.txt", folder / "tokenizer_config.json"]
    pointer = next((file for file in [*vocabularies, *others] if _is_pointer(file)), None)
    if pointer is not None:
        raise ModelFormatError(f"{pointer} is a Git LFS pointer, not the file; fetch it: git -C {folder} lfs pull")
    empty = next((file for file in vocabularies if file.stat().st_size == 0), None)
    if empty is not None:
        raise ModelFormatError(f"{empty} is empty; {_saving(folder)}")


def refuse_without_words(folder: Path, tokenizer: Any) -> None:
    """Raise `EncoderError` for a loaded tokenizer that would read all texts alike: one that knows no words.

    Special tokens, tokens that were added to a vocabulary, and places that were left unused are no words.
    """
    others = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    for token in tokenizer.get_vocab():
        if token not in others and token.strip(" ▁Ġ") and not _UNUSED.fullmatch(token):
            return
    names = ", ".join(file.name for file in vocabulary_files(folder))
    if not names:
        raise TokenizerMissingError(_nothing_there(folder))
    kind = type(tokenizer)
    reads = ", ".join(sorted({str(name) for name in kind.vocab_files_names.values()}))
    raise TokenizerMismatchError(
        f"{folder} has a tokenizer without words, to which all texts are alike: {kind.__name__} reads {reads}, and finds "
        f"none in {names}; {_saving(folder)}"
    )


def unloadable(folder: Path, refused: Exception) -> EncoderError:
    """The error for a tokenizer that transformers does not load: it names the missing files where files are missing."""
    reads_others = "auto_map" in written_json(folder / "tokenizer_config.json")  # by code of the model's author
    names = {file.name for file in vocabulary_files(folder)}
    if not names and not reads_others:
        return TokenizerMissingError(_nothing_there(folder))
    reason = " ".join(str(refused).split())[:400]
    if names == {"vocab.json"} and not reads_others and not (folder / "merges.txt").is_file():
        reason = "vocab.json without merges.txt"
    return TokenizerMismatchError(f"{folder} has no tokenizer that loads: {reason}; {_saving(folder)}")


def _nothing_there(folder: Path) -> str:
    return f"{folder} has no tokenizer: it holds none of {_WANTED}; {_saving(folder)}"


def _saving(folder: Path) -> str:
    """How a folder gets its tokenizer."""
    return f"save the original model's tokenizer there: AutoTokenizer.from_pretrained(NAME).save_pretrained({str(folder)!r})"


def _is_pointer(file: Path) -> bool:
    """Whether a file is what a clone without Git LFS has in its place."""
    try:
        with file.open("rb") as opened:
            return opened.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        return False
