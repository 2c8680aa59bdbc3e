"""Tokenization with the Rust tokenizer alone gives what transformers' tokenizers give."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import Unigram, WordPiece
from torch import nn
from transformers import PreTrainedTokenizerFast

from distcse.models import CrossEncoder
from distcse.text.token_table import encode_batch, tokenizing

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
NAMES = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
WORDS = ["the", "king", "##s", "of", "France", "is", "bald", "."]
TEXTS = ["the kings of France is bald .", "", "[MASK] is the king [SEP] of zzz", "of " * 50, "bald", "bald"]


def word_piece(**settings: Any) -> Any:
    words = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    rust = Tokenizer(WordPiece(words, unk_token="[UNK]"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=rust, model_input_names=inputs, **NAMES, **settings)


def unigram() -> Any:
    rust = Tokenizer(Unigram([("<unk>", 0.0), *((letter, -2.0) for letter in "▁thekingsofbald"), ("▁the", -3.0)], 0))
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=rust, unk_token="<unk>", model_input_names=["input_ids"])


TOKENIZERS: dict[str, Any] = {
    "word pieces": word_piece,
    "truncated on the left": lambda: word_piece(truncation_side="left"),
    "unigram without special tokens": unigram,
}


def tokenize(tokenizer: Any, texts: list[str], max_length: int) -> list[list[int]]:
    with tokenizing(tokenizer, max_length) as backend:
        return encode_batch(backend, texts)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_have_the_tokens_of_transformers(name: str) -> None:
    # Two objects, so that settings that one call leaves in the Rust tokenizer do not help the other.
    ids = tokenize(TOKENIZERS[name](), TEXTS, 7)
    assert ids == TOKENIZERS[name]()(TEXTS, truncation=True, max_length=7)["input_ids"]
    assert max(map(len, ids)) == 7


@pytest.mark.parametrize("name", ["word pieces", "truncated on the left", "unigram without special tokens"])
def test_pairs_have_the_tokens_of_transformers(name: str) -> None:
    first, second = TEXTS, TEXTS[::-1]
    expected = TOKENIZERS[name]()(first, second, truncation="longest_first", max_length=12)
    scorer = CrossEncoder(nn.Identity(), TOKENIZERS[name](), 12)
    ids, kinds = scorer.token_ids(list(zip(first, second, strict=True)))
    assert ids == expected["input_ids"] and kinds == expected.get("token_type_ids")
    assert (kinds is None) == ("unigram" in name)


def test_settings_of_an_earlier_call_have_no_effect() -> None:
    tokenizer = word_piece()
    tokenizer(TEXTS, padding="max_length", max_length=40)
    assert tokenize(tokenizer, TEXTS, 7) == tokenize(word_piece(), TEXTS, 7)
