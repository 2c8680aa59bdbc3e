"""Measures of a sentence encoder by the protocols of the papers, one protocol a file."""

from distcse.evaluation.agreement import AgreementTask, agreement
from distcse.evaluation.candidates import LoadOptions, candidate_of, named, open_candidate, scorer_of
from distcse.evaluation.catalogue import STSB_DEV, SUITES, DatasetFolder, suites_named
from distcse.evaluation.contamination import Contamination
from distcse.evaluation.evaluation import Candidate, Evaluation, ModelInfo, Score, evaluate
from distcse.evaluation.leakage import excluded_from, refuse_test_as_dev
from distcse.evaluation.models import Ensemble, Model, PairModel, PairScores, VectorModel
from distcse.evaluation.pairs import PairClassificationTask
from distcse.evaluation.retrieval import RetrievalDataset, RetrievalTask
from distcse.evaluation.sts import ScoredPairs, StsTask, sts_score
from distcse.evaluation.suites import CustomSet, EvalConfig, Tasks, collect, labelled_dev
from distcse.evaluation.tables import read_table

__all__ = [
    "STSB_DEV",
    "SUITES",
    "AgreementTask",
    "Candidate",
    "Contamination",
    "CustomSet",
    "DatasetFolder",
    "Ensemble",
    "EvalConfig",
    "Evaluation",
    "LoadOptions",
    "Model",
    "ModelInfo",
    "PairClassificationTask",
    "PairModel",
    "PairScores",
    "RetrievalDataset",
    "RetrievalTask",
    "Score",
    "ScoredPairs",
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
