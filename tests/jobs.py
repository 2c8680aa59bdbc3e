"""Small distillation runs: a tiny student, two tiny teachers of other widths, a few hundred sentences."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from distcse.events import Event, Reporter, StageProgress
from distcse.models import Encoder
from distcse.recipe import Recipe, load_recipe
from distcse.runs.backend import EmbeddingRequest, LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.distillation_task import TrainSpec, train_student
from distcse.runs.distillation.preparation import PreparedCorpus
from distcse.storage import open_store
from distcse.teachers.embedding import table_of
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import open_table_teacher
from distcse.text import Corpus, TokenTable
from distcse.training.trainer import TrainResult


def make_recipe(folder: Path, student: Path, teachers: list[Path], lines: list[str], *overrides: str) -> Recipe:
    """Write a recipe file and its corpus, and load the recipe. All precisions are fp32, so that tests pass on every CPU."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(lines) + "\n", encoding="utf-8")
    document: dict[str, Any] = {
        "name": "small",
        "corpus": {"path": str(corpus)},
        "student": {"backbone": str(student), "pooling": "mean", "max_length": 16, "layers": [0, 2]},
        "teachers": {
            "encoders": [
                {
                    "backbone": str(teacher),
                    "pooling": "mean",
                    "max_length": 24,
                    "alpha": float(number),
                    "precision": "fp32",
                }
                for number, teacher in enumerate(teachers, start=1)
            ],
            "shard_rows": 100,
            "prefetch_steps": 3,
        },
        "objective": {"rank": {"form": "list_net", "tau2": 0.1, "tau3": 0.1}},
        "training": {
            "batch_size": 16,
            "epochs": 1,
            "lr": 1e-3,
            "workers": 0,
            "engine": "torch",
            "log_every": 4,
            "precision": "fp32",
        },
        "evaluation": {"num_heldout": 32, "eval_steps": 6, "precision": "fp32"},
        "storage": {"runs": str(folder / "runs"), "cache": str(folder / "cache")},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(document))
    return load_recipe(str(file), overrides)


def make_two_worker_recipe(folder: Path, tiny: Callable[..., Path], lines: list[str], *overrides: str) -> Recipe:
    """Make a recipe with two teachers whose results do not depend on the number of workers, one or two."""
    return make_recipe(
        folder,
        tiny("bert"),
        [tiny("minilm"), tiny("roberta")],
        lines,
        "training.dropout_rng_streams=2",
        "training.cpus_per_worker=1",
        "evaluation.final_suites=[]",
        *overrides,
    )


def embed_tables(recipe: Recipe, corpus: Corpus | None = None) -> list[EmbeddingTable]:
    """Embed the corpus with all teachers in this process, so that a run on Ray starts no embedding actors."""
    cache = Path(recipe.storage.cache)
    corpus = corpus or Corpus.prepare(recipe.corpus, open_store(cache))
    tables = [
        table_of(teacher, corpus, open_store(cache), recipe.teachers.shard_rows) for teacher in recipe.teachers.encoders
    ]
    for teacher, table in zip(recipe.teachers.encoders, tables, strict=True):
        if missing := table.missing_shards():
            LocalBackend().embed(
                EmbeddingRequest(teacher, recipe.teachers, corpus, table, missing, lambda done: None, Reporter())
            )
    return tables


def make_spec(recipe: Recipe, run: RunDirectory | None = None) -> tuple[TrainSpec, list[EmbeddingTable]]:
    """Prepare corpus, tokens and tables, and create a run directory unless `run` is given."""
    cache = Path(recipe.storage.cache)
    corpus = Corpus.prepare(recipe.corpus, open_store(cache))
    encoder = Encoder.from_section(recipe.student)
    tokens = TokenTable.prepare(corpus, encoder.tokenizer, encoder.max_length, open_store(cache))
    tables = embed_tables(recipe, corpus)
    directory = run or RunDirectory.create(recipe)
    return PreparedCorpus(corpus, tokens, recipe).spec(directory, tables, LocalBackend(), Reporter()), tables


def local_clients(spec: TrainSpec, tables: list[EmbeddingTable]) -> list[LocalTeacherClient]:
    """Return clients of a run's teachers, which a thread of this process serves."""
    teachers = zip(spec.recipe.teachers.encoders, tables, strict=True)
    return [LocalTeacherClient(open_table_teacher(teacher, table)) for teacher, table in teachers]


def train(
    spec: TrainSpec, tables: list[EmbeddingTable], events: list[Event] | None = None, stop_after: int = -1
) -> TrainResult:
    """Train in this process; after `stop_after` events, the run is asked to stop at its next report."""
    seen: list[Event] = events if events is not None else []
    reporter = Reporter(seen.append, lambda: 0 <= stop_after < len(seen))
    return train_student(spec, local_clients(spec, tables), reporter)


def train_with_and_without_interruption(recipe: Recipe) -> tuple[TrainSpec, TrainSpec]:
    """Train a recipe twice: once without interruption, once interrupted and resumed."""
    uninterrupted, tables = make_spec(recipe)
    train(uninterrupted, tables)
    spec, tables = make_spec(recipe)
    assert train(spec, tables, stop_after=2).interrupted
    train(spec, tables)
    return uninterrupted, spec


def rows_embedded(events: list[Event]) -> list[int]:
    """Return the number of rows that each teacher embedded."""
    return [
        event.done
        for event in events
        if isinstance(event, StageProgress) and event.finished and event.name.startswith("teacher")
    ]
