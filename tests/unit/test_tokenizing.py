"""Tokenization with the Rust tokenizer alone gives what transformers' tokenizers give."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import Unigram, WordPiece
from transformers import PreTrainedTokenizerFast

from distcse.models.texts import tokenize, tokenize_pairs

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NAMES = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
WORDS = ["the", "king", "##s", "of", "France", "is", "bald", "."]
TEXTS = ["the kings of France is bald .", "", "[MASK] is the king [SEP] of zzz", "of " * 50, "bald", "bald"]


class Shouting(PreTrainedTokenizerFast):
    """A tokenizer whose Python code changes texts and ids, as a model's remote code may."""

    def _encode_plus(self, text: Any, *positional: Any, **settings: Any) -> Any:
        encoded = super()._encode_plus([one + " bald" for one in text], *positional, **settings)
        encoded["input_ids"] = [[*ids, 4] for ids in encoded["input_ids"]]
        return encoded


def word_piece(kind: type[PreTrainedTokenizerFast] = PreTrainedTokenizerFast, **settings: Any) -> Any:
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    rust = Tokenizer(WordPiece(words, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return kind(tokenizer_object=rust, model_input_names=inputs, **NAMES, **settings)


def unigram() -> Any:
    rust = Tokenizer(Unigram([("<unk>", 0.0), *((letter, -2.0) for letter in "▁thekingsofbald"), ("▁the", -3.0)], 0))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>", model_input_names=["input_ids"])


TOKENIZERS: dict[str, Any] = {
    "word pieces": word_piece,
    "truncated on the left": lambda: word_piece(truncation_side="left"),
    "special tokens are split": lambda: word_piece(split_special_tokens=True),
    "unigram without special tokens": unigram,
    "with Python code": lambda: word_piece(Shouting),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_have_the_tokens_of_transformers(name: str) -> None:
    # Two objects, so that settings that one call leaves in the Rust tokenizer do not help the other.
    ids = tokenize(TOKENIZERS[name](), TEXTS, 7)
    assert ids == TOKENIZERS[name]()(TEXTS, truncation=True, max_length=7)["input_ids"]
    assert max(map(len, ids)) == 7 + (name == "with Python code")


@pytest.mark.parametrize("name", ["word pieces", "truncated on the left", "unigram without special tokens"])
def test_pairs_have_the_tokens_of_transformers(name: str) -> None:
    first, second = TEXTS, TEXTS[::-1]
    expected = TOKENIZERS[name]()(first, second, truncation="longest_first", max_length=12)
    ids, kinds = tokenize_pairs(TOKENIZERS[name](), list(zip(first, second, strict=True)), 12)
    assert ids == expected["input_ids"] and kinds == expected.get("token_type_ids")
    assert (kinds is None) == ("unigram" in name)


def test_settings_of_an_earlier_call_have_no_effect() -> None:
    tokenizer = word_piece()
    tokenizer(TEXTS, padding="max_length", max_length=40, split_special_tokens=True)
    assert tokenize(tokenizer, TEXTS, 7) == tokenize(word_piece(), TEXTS, 7)
