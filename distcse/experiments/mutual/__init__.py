"""Trans-Encoder: bi- and cross-encoders of several language models teach each other, one group of actors a model.

A run is cycles of two phases: cross-encoders learn the bi-encoders' cosines, bi-encoders learn the cross-encoders'
probabilities. Each group trains and scores by itself; what crosses between groups is one score a pair, and what comes back
is their mean. `ledger.json` holds how far every group is, so that a run goes on after whatever was killed.
"""

from distcse.experiments.mutual.run import Best, MutualResult, run_mutual

__all__ = ["Best", "MutualResult", "run_mutual"]
