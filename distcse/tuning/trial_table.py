"""Writes a sweep's trials as a table with a row per trial and a column per parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from distcse.storage import ArtifactStore
from distcse.tuning.records import Trial


def rows_of(trials: Sequence[Trial]) -> list[dict[str, Any]]:
    """Return one row per trial, in the given order, numbered from 1."""
    parameters = list(dict.fromkeys(path for trial in trials for path in trial.values))
    return [
        {
            "trial": number,
            "status": trial.status,
            "dev": trial.best.score if trial.best else None,
            "dev_step": trial.best.step if trial.best else None,
            "progress": trial.metrics[-1].progress if trial.metrics else 0.0,
            "seconds": trial.seconds,
            "num_starts": trial.num_starts,
            **{path: _cell(trial.values.get(path)) for path in parameters},
            "reason": trial.reason,
            "reused_from": trial.reused_from,
            "folder": trial.name,
        }
        for number, trial in enumerate(trials, start=1)
    ]


def write_tables(trials: Sequence[Trial], store: ArtifactStore) -> None:
    """Write trials.parquet and trials.csv into a folder; nothing without trials."""
    if not trials:
        return
    table = pa.Table.from_pylist(rows_of(trials))
    with store.write("trials.parquet") as file:
        pa.parquet.write_table(table, file)
    with store.write("trials.csv") as file:
        pa.csv.write_csv(table, file)


def _cell(value: Any) -> Any:
    return str(value) if isinstance(value, list) else value
