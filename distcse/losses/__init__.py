"""Loss terms: each key of `objective` has a file with its name, of pure functions and a thin module that calls them.

A step's global batch has C sentences on W workers; one worker has R of the rows. Each term computes this worker's *share* of
the global mean: the sum over its R rows, divided by C. `rank_regression` divides by the kept pairs of the global batch
instead, `detection` by its tokens. The sum of all workers' shares equals the loss of one worker with the full batch. The
same is true of gradients, because the backward pass of `gather_views` sums them over workers. Data-parallel engines
average gradients instead, and therefore multiply the share by W.
"""

from distcse.losses.consistency import Consistency, jensen_shannon, negative_entropy
from distcse.losses.detection import ReplacedTokenDetection, detection
from distcse.losses.info_nce import InfoNCE, info_nce
from distcse.losses.objective import TRIED_WIDTH, Objective, build_objective, try_terms
from distcse.losses.rank import ListMLE, ListNet, drop_positive, list_mle, list_net
from distcse.losses.rank_regression import RankRegression, squared_errors
from distcse.losses.regression import Regression, cosine_errors, squared_distances
from distcse.losses.views import Detection, TeacherOutputs, Views, gather_views, mix_lists

__all__ = [
    "TRIED_WIDTH",
    "Consistency",
    "Detection",
    "InfoNCE",
    "ListMLE",
    "ListNet",
    "Objective",
    "RankRegression",
    "Regression",
    "ReplacedTokenDetection",
    "TeacherOutputs",
    "Views",
    "build_objective",
    "cosine_errors",
    "detection",
    "drop_positive",
    "gather_views",
    "info_nce",
    "jensen_shannon",
    "list_mle",
    "list_net",
    "mix_lists",
    "negative_entropy",
    "squared_distances",
    "squared_errors",
    "try_terms",
]
