"""Rank space (RankEncoder): sentences as rankings of reference sentences, and an encoder that scores pairs with them."""

from distcse.rank_space.encoder import RankSpaceEncoder, index_pairs, is_rank_space, pair_similarities
from distcse.rank_space.space import (
    DeviceRankSpace,
    RankSpace,
    draw_references,
    inner_products,
    rank_space,
    rank_vectors,
)

__all__ = [
    "DeviceRankSpace",
    "RankSpace",
    "RankSpaceEncoder",
    "draw_references",
    "index_pairs",
    "inner_products",
    "is_rank_space",
    "pair_similarities",
    "rank_space",
    "rank_vectors",
]
