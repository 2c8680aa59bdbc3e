"""Tokens of a corpus: the table, compared with transformers, its key and parts; `collate`; and the sampler of batches."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram, WordLevel, WordPiece
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from transformers import PreTrainedTokenizerFast

from distcse.errors import CorpusCacheError, CorpusTooSmallError, TokenizerError
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import CorpusSection
from distcse.storage import open_store
from distcse.text import BatchSampler, Corpus, Tokenization, TokenTable, tokenizer_fingerprint
from distcse.text import token_table as tokens_module
from distcse.text.collate import collate
from distcse.text.ragged import VALUES
from distcse.text.sampler import RowSet, split_held_out
from distcse.text.token_table import Reading, encode_batch, tokenizing
from tests.failures import fails_with


@pytest.fixture
def tokenizer(tiny: Callable[..., Path]) -> Any:
    return Encoder.load(tiny("bert"), pooling="mean").tokenizer


@pytest.fixture
def corpus(tmp_path: Path, sentences: list[str]) -> Corpus:
    return corpus_of(tmp_path, [*sentences, "long " * 100, "Zürich 東京 🙂 naïve", "."])


def corpus_of(folder: Path, lines: list[str]) -> Corpus:
    (folder / "corpus.txt").write_text("\n".join(lines))
    return Corpus.prepare(CorpusSection(path=str(folder / "corpus.txt")), open_store(folder))


def ids_of(table: TokenTable) -> list[list[int]]:
    return [row.tolist() for row in table.rows(range(len(table)))]


def words(vocabulary: dict[str, int]) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer without special tokens."""
    tokenizer = Tokenizer(WordLevel(vocabulary))
    tokenizer.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.mark.parametrize("prompt", ["", "say "])
def test_the_table_equals_the_tokenizers_output_and_is_written_once(
    prompt: str, tmp_path: Path, corpus: Corpus, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    table = TokenTable.prepare(corpus, tokenizer, 16, open_store(tmp_path), seen.append, prompt=prompt)
    texts = [prompt + text for text in corpus.texts(range(len(corpus)))]
    expected = tokenizer(texts, truncation=True, max_length=16)["input_ids"]
    assert ids_of(table) == expected and max(map(len, expected)) == 16
    assert table.lengths(range(len(table))).tolist() == [len(row) for row in expected]
    assert not table.reused and seen == [len(corpus)] and table.pad_id == tokenizer.pad_token_id
    monkeypatch.setattr(tokens_module, "encode_batch", lambda *_: pytest.fail("tokenized again"))
    again = TokenTable.prepare(corpus, tokenizer, 16, open_store(tmp_path), prompt=prompt)
    assert again.reused and again.store == table.store
    assert ids_of(TokenTable.open(again.store)) == expected
    (table.store.path / VALUES).write_bytes(b"")  # `prepare` writes it again: tests/faults/test_disk.py
    with fails_with(CorpusCacheError, str(table.store.path)):
        TokenTable.open(table.store)


def test_truncation_and_padding_of_the_tokenizer_are_restored_and_not_part_of_its_fingerprint(
    tmp_path: Path, corpus: Corpus, tokenizer: Any
) -> None:
    backend, plain = tokenizer.backend_tokenizer, tokenizer_fingerprint(tokenizer)
    backend.enable_truncation(77, stride=3)
    backend.enable_padding(length=11, pad_id=5, pad_token="x")
    assert tokenizer_fingerprint(tokenizer) == plain
    before = backend.truncation, backend.padding
    TokenTable.prepare(corpus, tokenizer, 8, open_store(tmp_path))
    assert (backend.truncation, backend.padding) == before
    backend.no_truncation()
    backend.no_padding()
    TokenTable.prepare(corpus, tokenizer, 9, open_store(tmp_path))
    assert backend.truncation is None and backend.padding is None
    assert len({plain, tokenizer_fingerprint(words({"a": 0})), tokenizer_fingerprint(words({"b": 0}))}) == 3


def test_ids_above_sixteen_bits_are_preserved(tmp_path: Path) -> None:
    corpus, vocabulary = corpus_of(tmp_path, ["a b c d e f"]), {word: number for number, word in enumerate("abcdef")}
    for largest, dtype in ((65_535, np.uint16), (65_536, np.int32)):
        table = TokenTable.prepare(corpus, words({**vocabulary, "b": largest}), 4, open_store(tmp_path))
        assert ids_of(table) == [[0, largest, 2, 3]] and table.rows([0])[0].dtype == dtype


def test_a_row_without_tokens_and_a_slow_tokenizer_are_refused(tmp_path: Path) -> None:
    class Slow:
        pass

    corpus = corpus_of(tmp_path, ["aa", "xyz"])
    letters = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0}, [])))  # drops unknown characters
    with fails_with(TokenizerError, "row 1", "'xyz'"):
        TokenTable.prepare(corpus, letters, 4, open_store(tmp_path))
    assert not list((tmp_path / "tokens").iterdir())
    with fails_with(TokenizerError, "tokenizer Slow", "tokenizer.json"):
        TokenTable.prepare(corpus, Slow(), 4, open_store(tmp_path))


def test_a_table_made_of_parts_equals_one_of_a_single_pass(tmp_path: Path, corpus: Corpus, tokenizer: Any) -> None:
    whole = TokenTable.prepare(corpus, tokenizer, 16, open_store(tmp_path / "whole"), prompt="q: ")
    wanted = Tokenization(corpus, tokenizer, {"text": Reading("q: ", 16)}, open_store(tmp_path), part_rows=100)
    count, done = len(wanted.parts), list[int]()
    assert [*chain.from_iterable(wanted.parts)] == [*range(len(corpus))] and count > 3
    assert wanted.missing_parts() == [*range(count)]
    for number in (0, 2, count - 1):
        wanted.write_part(number, done.append)
    assert done == [100, 100, len(wanted.parts[-1])]
    other = Tokenization(corpus, tokenizer, {"text": Reading("q: ", 16)}, open_store(tmp_path), part_rows=50)
    assert other.store == wanted.store and other.missing_parts() == [*range(len(other.parts))]
    other.write_part(1)
    (wanted.parts_store.path / "200-300" / VALUES).write_bytes(b"damaged")
    assert wanted.missing_parts() == [1, *range(2, count - 1)]
    wanted.write_table()
    table = TokenTable.open(wanted.store)
    assert not list(wanted.parts_store.path.iterdir())
    for file in whole.store.path.iterdir():
        assert (table.store.path / file.name).read_bytes() == file.read_bytes()


def test_collate_pads_on_the_right_with_the_given_id() -> None:
    tokens = collate([np.array([65_535, 2], dtype=np.uint16), np.array([3], dtype=np.uint16)], pad_id=9).to("cpu")
    assert tokens.ids.tolist() == [[65_535, 2], [3, 9]] and tokens.mask.tolist() == [[1, 1], [1, 0]]
    assert tokens.ids.dtype == tokens.mask.dtype == torch.int64


def test_the_token_index_has_all_tokens_and_little_padding_so_that_batches_share_shapes() -> None:
    generator = np.random.default_rng(0)
    shapes = set()
    for _ in range(50):
        rows = [np.arange(1, generator.integers(5, 33), dtype=np.int64) for _ in range(128)]
        batch = collate(rows, 0, with_token_index=True)
        assert batch.token_index is not None
        index = batch.token_index.numpy()
        tokens = batch.mask.numpy().ravel().nonzero()[0]
        assert (np.diff(index) > 0).all() and set(tokens) <= set(index)
        assert len(index) <= len(tokens) * 17 / 16
        shapes.add(len(index))
    assert len(shapes) <= 5
    full = collate([np.arange(1, 18, dtype=np.int64)] * 3, 0, with_token_index=True)
    assert full.token_index is not None and full.token_index.tolist() == list(range(51)), "nothing to pad"


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
def test_texts_and_pairs_have_the_tokens_of_transformers_whatever_an_earlier_call_set(name: str) -> None:
    used = TOKENIZERS[name]()
    if used.pad_token is not None:
        used(TEXTS, padding="max_length", max_length=40)
    # Other objects give what is expected, so that settings that one call leaves in the Rust tokenizer do not help.
    ids = tokenize(used, TEXTS, 7)
    assert ids == TOKENIZERS[name]()(TEXTS, truncation=True, max_length=7)["input_ids"]
    assert max(map(len, ids)) == 7
    first, second = TEXTS, TEXTS[::-1]
    expected = TOKENIZERS[name]()(first, second, truncation="longest_first", max_length=12)
    pairs, kinds = CrossEncoder(nn.Identity(), used, 12).token_ids(list(zip(first, second, strict=True)))
    assert pairs == expected["input_ids"] and kinds == expected.get("token_type_ids")
    assert (kinds is None) == ("unigram" in name)


@settings(deadline=None, derandomize=True, database=None)
@given(
    rows=st.integers(2, 200),
    batch_share=st.floats(0, 1),
    held_out_share=st.floats(0, 0.9),
    seed=st.integers(0, 2**32),
    jumps=st.lists(st.integers(0, 10), max_size=4),
)
def test_an_epoch_uses_each_training_row_at_most_once_and_drops_fewer_than_a_batch(
    rows: int, batch_share: float, held_out_share: float, seed: int, jumps: list[int]
) -> None:
    """Steps may be requested in any order."""
    train, held_out = split_held_out(rows, int(held_out_share * rows), seed)
    ids = train.ids()
    assert np.array_equal(np.setdiff1d(np.arange(rows), held_out), ids) and len(held_out) == int(held_out_share * rows)
    assert np.array_equal(held_out, np.sort(held_out)) and held_out.dtype == ids.dtype == np.int64
    assert np.array_equal(split_held_out(rows, len(held_out), seed)[1], held_out)
    batch_size = 1 + int(batch_share * (len(ids) - 1))
    batches = BatchSampler(train, batch_size, seed)
    steps = batches.steps_per_epoch
    assert steps == len(ids) // batch_size
    epochs = [batches.block(epoch * steps, steps) for epoch in range(3)]
    for used in epochs:
        assert used.shape == (steps, batch_size) and used.dtype == np.int64
        assert len(np.unique(used)) == used.size and np.isin(used, ids).all()
    again, known = BatchSampler(ids, batch_size, seed), np.concatenate(epochs)
    for step in (jump % len(known) for jump in jumps):
        assert np.array_equal(again.batch(step), known[step])
        assert np.array_equal(again.block(step, 2)[0], known[step])
    assert np.array_equal(batches.block(steps - 1, 2), known[steps - 1 : steps + 1])  # across the end of an epoch


def test_epochs_and_seeds_have_different_orders_and_drop_different_rows() -> None:
    batches = BatchSampler(105, 10, seed=0)
    epochs = [batches.block(epoch * 10, 10).ravel().tolist() for epoch in range(20)]
    assert len({*map(tuple, epochs)}) == 20
    assert len({row for epoch in epochs for row in set(range(105)) - set(epoch)}) > 50
    assert BatchSampler(105, 10, seed=1).batch(0).tolist() != batches.batch(0).tolist()


def test_the_order_is_stable_between_releases() -> None:
    # A resumed run must continue with its order, whichever version of distcse wrote the checkpoint.
    assert BatchSampler(10, 5, seed=42).block(0, 3).tolist() == [[5, 6, 0, 7, 3], [2, 4, 9, 1, 8], [0, 8, 7, 4, 3]]
    assert split_held_out(20, 4, seed=42)[1].tolist() == [4, 12, 13, 15]
    rows = np.arange(10, 2010, 2)
    expected = rows[np.random.Generator(np.random.PCG64([7, 1])).permutation(len(rows))]
    assert BatchSampler(rows, 100, seed=7).batch(10).tolist() == expected[:100].tolist()
    assert (BatchSampler(rows + 2**33, 100, seed=7).batch(10) - 2**33).tolist() == expected[:100].tolist()


def peak_bytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    work()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_orders_take_four_bytes_a_row() -> None:
    rows = np.arange(100_000)
    assert peak_bytes(lambda: BatchSampler(rows, 100, seed=7).batch(1000)) < 5 * len(rows)
    assert peak_bytes(lambda: split_held_out(10**6, 0, seed=7)) < 2**16


def test_a_row_set_takes_the_rows_that_an_array_of_its_ids_has() -> None:
    without = np.array([0, 3, 4, 5, 18, 19])
    rows, ids = RowSet(20, without), np.setdiff1d(np.arange(20), without)
    assert len(rows) == 14 and np.array_equal(rows.ids(), ids)
    assert np.array_equal(rows.take(np.array([13, 0, 5], dtype=np.uint32)), ids[[13, 0, 5]])
    assert [block.tolist() for block in rows.blocks(10)] == [ids[:10].tolist(), ids[10:].tolist()]
    taken, others = rows.split(np.array([1, 13]))
    assert np.array_equal(taken, ids[[1, 13]]) and np.array_equal(others.ids(), np.delete(ids, [1, 13]))


def test_too_few_rows_and_negative_steps_are_errors() -> None:
    with fails_with(CorpusTooSmallError, "9", "10", "training.batch_size", "evaluation.num_heldout"):
        BatchSampler(9, 10, seed=1)
    with fails_with(CorpusTooSmallError, "evaluation.num_heldout is 5", "below 5"):
        split_held_out(5, 5, seed=1)
    with pytest.raises(ValueError, match="non-negative"):
        BatchSampler(10, 5, seed=1).batch(-1)
