"""A run's figures, told to trackers: a listener of its events on one side, TensorBoard, MLflow and W&B on the other."""

from distcse.tracking.packages import require_mlflow_server, require_packages
from distcse.tracking.tracking import Tracking, tracking

__all__ = ["Tracking", "require_mlflow_server", "require_packages", "tracking"]
