"""Rank space (RankEncoder): sentences as orders of reference sentences; an encoder that scores pairs by it."""

from distcse.ranks.device import DeviceRankSpace, rank_space
from distcse.ranks.encoder import RankSpaceEncoder, is_rank_space, numbered
from distcse.ranks.pairs import pair_similarities
from distcse.ranks.space import RankSpace, inner_products, rank_vectors

__all__ = [
    "DeviceRankSpace",
    "RankSpace",
    "RankSpaceEncoder",
    "inner_products",
    "is_rank_space",
    "numbered",
    "pair_similarities",
    "rank_space",
    "rank_vectors",
]
