"""Training data: corpus readers, a memory-mapped corpus with stable row ids, its token table, and the batch sampler.

A source (files, a data set) is read once into a `Corpus`, and tokenized once into a `TokenTable`. Both are
cached by their content, so that later runs memory-map them. `BatchSampler` selects the rows of each step's batch, and
`distcse.text.collate` pads them. That module alone imports PyTorch, which servers of cached tables do not need.
"""

from distcse.text.corpus import Corpus, Excluded, normalized_key
from distcse.text.pairs import Pairs
from distcse.text.sampler import BatchSampler, CandidateSampler
from distcse.text.sources import check_sources, count_repeated_files, source_rows
from distcse.text.token_table import PairTokenTable, Tokenization, TokenTable, tokenizer_fingerprint

__all__ = [
    "BatchSampler",
    "CandidateSampler",
    "Corpus",
    "Excluded",
    "PairTokenTable",
    "Pairs",
    "TokenTable",
    "Tokenization",
    "check_sources",
    "count_repeated_files",
    "normalized_key",
    "source_rows",
    "tokenizer_fingerprint",
]
