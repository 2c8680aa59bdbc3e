"""Sentences in: readers, a memory-mapped corpus with stable row ids, its token table, and the order rows are learned in."""

from distcse.corpus.collate import Tokens, collate
from distcse.corpus.corpus import Corpus
from distcse.corpus.sampler import BatchSampler, split_held_out
from distcse.corpus.tokens import TokenTable

__all__ = ["BatchSampler", "Corpus", "TokenTable", "Tokens", "collate", "split_held_out"]
