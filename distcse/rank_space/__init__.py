"""Rank space (RankEncoder): sentences as rankings of reference sentences, and an encoder that scores pairs with them."""

from distcse.rank_space.device import DeviceRankSpace, rank_space
from distcse.rank_space.encoder import RankSpaceEncoder, index_pairs, is_rank_space
from distcse.rank_space.pairs import pair_similarities
from distcse.rank_space.references import draw_references
from distcse.rank_space.space import RankSpace, inner_products, rank_vectors

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
