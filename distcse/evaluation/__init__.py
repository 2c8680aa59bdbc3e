"""Evaluation of sentence encoders by the protocols of the papers, one protocol per module."""

from distcse.evaluation.candidates import (
    LoadOptions,
    make_candidate,
    make_ensembles,
    measure_ensemble,
    open_candidate,
    parse_models,
    parse_prompts,
)
from distcse.evaluation.contamination import Contamination, evaluation_sentences, refuse_test_as_dev
from distcse.evaluation.dev import CustomDev, Dev, LabelledDev, labelled_dev, read_dev
from distcse.evaluation.evaluation import (
    Candidate,
    ModelResults,
    compare_models,
    evaluate,
    measure_model,
)
from distcse.evaluation.models import Ensemble, Model, PairModel, PairScores, RecordedScores, VectorModel, reporting
from distcse.evaluation.results import NO_LIMITS, Choice, Evaluation, Limits, ModelInfo, Score
from distcse.evaluation.suites import DEV_SETS, SUITES, CustomSet, DatasetFolder, Tasks, collect, parse_suites
from distcse.evaluation.tables import read_table, stream_texts
from distcse.evaluation.tasks.agreement import MIN_TEXTS, HeldOutVectors, TextsTask, agreement_result
from distcse.evaluation.tasks.pairs import PairClassificationTask
from distcse.evaluation.tasks.retrieval import RetrievalDataset, RetrievalTask
from distcse.evaluation.tasks.sts import ScoredPairs, StsTask, sts_score

__all__ = [
    "DEV_SETS",
    "MIN_TEXTS",
    "NO_LIMITS",
    "SUITES",
    "Candidate",
    "Choice",
    "Contamination",
    "CustomDev",
    "CustomSet",
    "DatasetFolder",
    "Dev",
    "Ensemble",
    "Evaluation",
    "HeldOutVectors",
    "LabelledDev",
    "Limits",
    "LoadOptions",
    "Model",
    "ModelInfo",
    "ModelResults",
    "PairClassificationTask",
    "PairModel",
    "PairScores",
    "RecordedScores",
    "RetrievalDataset",
    "RetrievalTask",
    "Score",
    "ScoredPairs",
    "StsTask",
    "Tasks",
    "TextsTask",
    "VectorModel",
    "agreement_result",
    "collect",
    "compare_models",
    "evaluate",
    "evaluation_sentences",
    "labelled_dev",
    "make_candidate",
    "make_ensembles",
    "measure_ensemble",
    "measure_model",
    "open_candidate",
    "parse_models",
    "parse_prompts",
    "parse_suites",
    "read_dev",
    "read_table",
    "refuse_test_as_dev",
    "reporting",
    "stream_texts",
    "sts_score",
]
