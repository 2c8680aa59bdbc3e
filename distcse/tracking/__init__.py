"""Experiment trackers: reports a run's events as metrics to TensorBoard, MLflow and Weights & Biases."""

from distcse.tracking.loggers import require_mlflow_server, require_packages, require_trial_loggers
from distcse.tracking.tracking import Tracking, track_run

__all__ = ["Tracking", "require_mlflow_server", "require_packages", "require_trial_loggers", "track_run"]
