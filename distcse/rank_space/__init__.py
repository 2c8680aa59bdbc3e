"""Rank space (RankEncoder): sentences as orders of reference sentences; an encoder that scores pairs by it."""

from distcse.rank_space.device import DeviceRankSpace, rank_space
from distcse.rank_space.encoder import RankSpaceEncoder, is_rank_space, numbered
from distcse.rank_space.pairs import pair_similarities
from distcse.rank_space.space import RankSpace, inner_products, rank_vectors

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
