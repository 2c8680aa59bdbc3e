"""Settings that work and probably do not do what is meant: the run, its dry run and the doctor report the same lines."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoConfig

from distcse.data import Corpus
from distcse.doctor import main as doctor
from distcse.events import Event, LogMessage, Reporter
from distcse.experiments.distillation.experiment import Distillation
from distcse.experiments.distillation.warnings import settings_warnings
from distcse.experiments.local_backend import LocalBackend
from distcse.experiments.mutual.experiment import MutualDistillation
from distcse.experiments.settings_warnings import SettingsWarning, warn_of_session_folders
from distcse.recipe import Recipe, StorageSection, recipe_yaml
from distcse.storage import resolve_path
from distcse.teachers.cosine_band import SAMPLE, cosine_band
from distcse.teachers.table import EmbeddingTable, TableIdentity
from tests.jobs import make_recipe
from tests.pairs import make_mutual_recipe

SHORT = ("training.max_steps=2", "evaluation.eval_steps=2", "evaluation.final_suites=[]")


def codes(warnings: list[SettingsWarning]) -> list[str]:
    return [warning.code for warning in warnings]


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text() if file.exists() else "{}"), **values}))


@pytest.fixture
def recipe(tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]) -> Recipe:
    """Return a recipe to which all four warnings apply, once its teachers have embedded the corpus."""
    folder = tmp_path / "session_2026-11-26_06-49-30_123456_7890"
    folder.mkdir()
    student, prompted, narrow = (tmp_path / name for name in ("student", "prompted", "narrow"))
    shutil.copytree(tiny("bert", dropout=0.0), student)
    shutil.copytree(tiny("bert"), prompted)
    change(prompted / "config_sentence_transformers.json", prompts={"query": "query: ", "passage": "passage: "})
    made = make_recipe(folder, student, [prompted, tiny("minilm")], sentences, *SHORT)
    return made


def narrow(table: EmbeddingTable) -> None:
    """Move a table's vectors close together."""
    for shard in range(table.identity.shards):
        rows = np.asarray(table.shard_range(shard))
        vectors = table.vectors(rows)
        table.write_shard(shard, vectors * 0.1 + np.eye(vectors.shape[1], dtype=np.float32)[0])


def test_the_run_its_dry_run_and_the_doctor_report_the_same_warnings(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def reported(work: Callable[[Reporter], object]) -> list[str]:
        events: list[Event] = []
        work(Reporter(events.append))
        return [e.text for e in events if isinstance(e, LogMessage) and e.warning and "[DCSE-W" in e.text]

    backend, experiment = LocalBackend(), Distillation(recipe)
    first = reported(lambda reporter: experiment.run(backend, reporter))
    assert [line[1:9] for line in first] == ["DCSE-W03", "DCSE-W03", "DCSE-W01", "DCSE-W04"]
    (directory,) = (
        folder
        for folder in (resolve_path(recipe.storage.cache) / "tables").iterdir()
        if json.loads((folder / "table.json").read_text())["pooling"] == "mean"
        and np.load(folder / "shard-00000.npy").shape[1] == 48
    )
    table = EmbeddingTable(directory, TableIdentity(**json.loads((directory / "table.json").read_text())))
    narrow(table)
    (directory / "band.json").unlink()
    dry = reported(lambda reporter: experiment.check(backend, reporter))
    assert not (directory / "band.json").exists()
    run = reported(lambda reporter: experiment.run(backend, reporter))
    assert (directory / "band.json").exists()
    assert dry == run and [line[1:9] for line in run] == [*(line[1:9] for line in first), "DCSE-W02"]
    file = tmp_path / "all.yaml"
    file.write_text(recipe_yaml(recipe))
    doctor([str(file), "--json"])
    checks = json.loads(capsys.readouterr().out)
    assert [f"{check['found']}; {check['fix']}" for check in checks if check["name"] == "settings"] == run
    assert all(check["verdict"] == "warn" for check in checks if check["name"] == "settings")
