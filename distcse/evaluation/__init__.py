"""Measures of a sentence encoder by the protocols of the papers, one protocol a file."""

from distcse.evaluation.agreement import AgreementTask, agreement
from distcse.evaluation.candidates import Reading, candidate_of, named, open_candidate, scorer_of
from distcse.evaluation.catalogue import STSB_DEV, SUITES, Shelf, suites_named
from distcse.evaluation.evaluation import About, Candidate, Evaluation, Score, evaluate
from distcse.evaluation.exposure import Exposure
from distcse.evaluation.leakage import excluded_from, refuse_test_as_dev
from distcse.evaluation.models import Ensemble, Model, PairModel, PairScores, VectorModel
from distcse.evaluation.pairs import PairTask
from distcse.evaluation.retrieval import Collection, RetrievalTask
from distcse.evaluation.sts import ScoredPairs, StsTask, sts_score
from distcse.evaluation.suites import OwnSet, Protocol, Tasks, collect, labelled_dev
from distcse.evaluation.tables import read_table

__all__ = [
    "STSB_DEV",
    "SUITES",
    "About",
    "AgreementTask",
    "Candidate",
    "Collection",
    "Ensemble",
    "Evaluation",
    "Exposure",
    "Model",
    "OwnSet",
    "PairModel",
    "PairScores",
    "PairTask",
    "Protocol",
    "Reading",
    "RetrievalTask",
    "Score",
    "ScoredPairs",
    "Shelf",
    "StsTask",
    "Tasks",
    "VectorModel",
    "agreement",
    "candidate_of",
    "collect",
    "evaluate",
    "excluded_from",
    "labelled_dev",
    "named",
    "open_candidate",
    "read_table",
    "refuse_test_as_dev",
    "scorer_of",
    "sts_score",
    "suites_named",
]
