"""Measures of an encoder: STS correlation, agreement with teachers, retrieval. Pure functions of vectors and labels."""

from distcse.evaluation.agreement import agreement
from distcse.evaluation.retrieval import recall_at
from distcse.evaluation.sts import STS_TESTS, STSB_DEV, PairSet, read_pairs, sts_score

__all__ = ["STSB_DEV", "STS_TESTS", "PairSet", "agreement", "read_pairs", "recall_at", "sts_score"]
