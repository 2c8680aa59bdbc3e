"""Sentences in: readers, a memory-mapped corpus with stable row ids, its token table, and the order of learning.

A source (files, a data set, documentation strings) is read once into a `Corpus`, which one tokenizer turns into a
`TokenTable` once. Both are keyed by content, so every later run maps them and reads nothing again. `BatchSampler` says
which rows make the batch of a step, and `collate` makes a rectangle of them.
"""

from distcse.data.collate import Tokens, collate
from distcse.data.corpus import Corpus, source_rows
from distcse.data.neighbor_batching import Grouping
from distcse.data.normalized_key import Excluded, normalized_key
from distcse.data.sampler import BatchSampler, duplicate_mask, split_held_out
from distcse.data.token_table import TokenTable, tokenizer_fingerprint

__all__ = [
    "BatchSampler",
    "Corpus",
    "Excluded",
    "Grouping",
    "TokenTable",
    "Tokens",
    "collate",
    "duplicate_mask",
    "normalized_key",
    "source_rows",
    "split_held_out",
    "tokenizer_fingerprint",
]
