"""MLflow: logs the run's parameters and metrics to a tracking server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from distcse.recipe import MLflowSection
from distcse.storage import ArtifactStore
from distcse.tracking.loggers import RunInfo, RunStatus

_RUN_ID_FILE = "mlflow.run"
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_FORBIDDEN = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow allows in no name, such as the @ of recall@10."""
_MAX_PARAMS, _MAX_VALUE_LENGTH = 100, 500
"""Parameters per request, and characters per value, that every version of MLflow accepts."""


class MLflow:
    """Tracker for one run of an MLflow experiment; a resumed run continues the same MLflow run."""

    def __init__(self, section: MLflowSection, run: RunInfo) -> None:
        # With MLflow's defaults, seven attempts of two minutes each, an unreachable server would delay the end of the run.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._client = MlflowClient(tracking_uri=section.uri)
        self._run: str = self._resume(run.folder) or self._create(section.experiment, run)

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(_FORBIDDEN.sub("_", name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self, status: RunStatus) -> None:
        self._client.set_terminated(self._run, _STATUS[status])

    def _resume(self, store: ArtifactStore) -> str | None:
        if not store.fetch(_RUN_ID_FILE):
            return None
        run_id = (store.path / _RUN_ID_FILE).read_text(encoding="utf-8")
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _create(self, experiment: str, run: RunInfo) -> str:
        tags = {"sweep": run.sweep} if run.sweep else None
        created = self._client.create_run(self._experiment_id(experiment), run_name=run.name, tags=tags)
        params = [
            Param(_FORBIDDEN.sub("_", name), str(value)[:_MAX_VALUE_LENGTH]) for name, value in run.settings.items()
        ]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(created.info.run_id, params=params[start : start + _MAX_PARAMS])
        run.folder.write_text(_RUN_ID_FILE, created.info.run_id)
        return str(created.info.run_id)

    def _experiment_id(self, name: str) -> Any:
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None:
            return experiment.experiment_id
        try:
            return self._client.create_experiment(name)
        except MlflowException:  # another run may have created it in the meantime
            experiment = self._client.get_experiment_by_name(name)
            if experiment is None:
                raise
            return experiment.experiment_id
