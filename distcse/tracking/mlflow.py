"""MLflow: the run's parameters and figures at a tracking server."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from distcse.recipe import MLflowSection
from distcse.storage import fetch, write_text_atomic
from distcse.tracking.tracker import Ending, Tracked

_NOTED = "mlflow.run"
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_UNUSUAL = re.compile(r"[^/\w.\- :]")
"""Signs that no name there may have, such as the @ of recall@10."""
_MOST_PARAMS, _LONGEST = 100, 500
"""Of one request; characters of a value that every version takes."""


class MLflow:
    """A run of an experiment; a run that is resumed goes on in the same one."""

    def __init__(self, section: MLflowSection, run: Tracked) -> None:
        # MLflow's own are seven attempts of two minutes each: a run's end would wait for a server that is not there.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        self._client = MlflowClient(tracking_uri=section.uri)
        noted = run.folder / _NOTED
        self._run: str = self._gone_on_with(noted) or self._begun(section.experiment, run, noted)

    def figures(self, values: Mapping[str, float], step: int) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(_UNUSUAL.sub("_", name), float(value), now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, ending: Ending) -> None:
        self._client.set_terminated(self._run, _STATUS[ending])

    def _gone_on_with(self, noted: Path) -> str | None:
        if not fetch(noted):
            return None
        known = noted.read_text(encoding="utf-8")
        self._client.update_run(known, status="RUNNING")
        return known

    def _begun(self, experiment: str, run: Tracked, noted: Path) -> str:
        begun = self._client.create_run(self._experiment(experiment), run_name=run.name)
        params = [Param(_UNUSUAL.sub("_", name), str(value)[:_LONGEST]) for name, value in run.settings.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(begun.info.run_id, params=params[first : first + _MOST_PARAMS])
        write_text_atomic(noted, begun.info.run_id)
        return str(begun.info.run_id)

    def _experiment(self, name: str) -> Any:
        known = self._client.get_experiment_by_name(name)
        if known is not None:
            return known.experiment_id
        try:
            return self._client.create_experiment(name)
        except MlflowException:  # another run has just made it
            known = self._client.get_experiment_by_name(name)
            if known is None:
                raise
            return known.experiment_id
