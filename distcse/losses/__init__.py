"""The mathematics: one term a file, each a pure function of similarity matrices and a thin module around it.

A step's global batch has C sentences over W workers, of which one worker owns R rows. Every term computes this
worker's *share* of the global mean: the sum over its own rows, divided by C. The shares of all workers add up to the
loss that one worker would compute on the whole batch, and so do their gradients, because `gather_views` adds gradients
over workers on the way back. Data-parallel engines average over workers instead of adding: they multiply the share by
W first.
"""

from distcse.losses.consistency import Consistency, jensen_shannon, negative_entropy
from distcse.losses.detection import Detection, detection
from distcse.losses.info_nce import InfoNCE, info_nce, negative_weights
from distcse.losses.list_mle import ListMLE, list_mle
from distcse.losses.list_net import ListNet, list_net
from distcse.losses.objective import Objective, build_objective
from distcse.losses.pseudo_labels import bce_soft, mse_cosine
from distcse.losses.rank_regression import RankRegression, squared_errors
from distcse.losses.regression import Regression, cosine_errors, squared_distances
from distcse.losses.similarity_lists import disagreement_weights, drop_positive, mix_lists, shuffle_rank_groups
from distcse.losses.teacher_outputs import TeacherOutputs
from distcse.losses.views import Views, gather_views

__all__ = [
    "Consistency",
    "Detection",
    "InfoNCE",
    "ListMLE",
    "ListNet",
    "Objective",
    "RankRegression",
    "Regression",
    "TeacherOutputs",
    "Views",
    "bce_soft",
    "build_objective",
    "cosine_errors",
    "detection",
    "disagreement_weights",
    "drop_positive",
    "gather_views",
    "info_nce",
    "jensen_shannon",
    "list_mle",
    "list_net",
    "mix_lists",
    "mse_cosine",
    "negative_entropy",
    "negative_weights",
    "shuffle_rank_groups",
    "squared_distances",
    "squared_errors",
]
