"""Exact counts: forward passes, tokens, bytes, requests to teachers, values read from tensors (benchmarks/targets.py)."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from distcse.cluster.sweep import TrialBackend
from distcse.devices.device import CPU
from distcse.events import Reporter
from distcse.losses import gather_views, jensen_shannon, list_mle, list_net
from distcse.models.frozen_pass import by_length
from distcse.recipe import Recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.distillation_task import train_student
from distcse.runs.experiment import experiment_of
from distcse.storage import open_store
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.teacher import open_table_teacher
from distcse.tuning.trial import TrialContext, run_trial
from tests.counting import (
    CountedSource,
    LargestTensor,
    dispatched,
    passes_of,
    shard_checksums,
)
from tests.jobs import make_recipe, make_spec
from tests.sweeps import LR
from tests.training_step import TrainingStep
from tests.wikipedia import wiki_sentences

QUIET = ("evaluation.dev=none", "evaluation.num_heldout=0", "evaluation.final_suites=[]")


def test_each_teacher_embeds_each_row_once_for_all_epochs_and_trials(
    recipe_with: Callable[..., Recipe], sentences: list[str]
) -> None:
    recipe = recipe_with(*QUIET, "training.epochs=2", "training.batch_size=64")
    with passes_of() as first:
        spec, tables = make_spec(recipe)
    assert first.rows == 2 * len(sentences)
    teachers = list(zip(recipe.teachers.encoders, tables, strict=True))
    with passes_of() as training:
        train_student(
            spec, [LocalTeacherClient(open_table_teacher(teacher, table)) for teacher, table in teachers], Reporter()
        )
    steps = 2 * (len(sentences) // 64)
    assert (training.calls, training.rows) == (steps, 2 * 64 * steps)  # only the student's two views
    with passes_of() as other_trial:
        make_spec(recipe_with(*QUIET, "seed=7", "training.lr=2e-3"))
    assert other_trial.rows == 0


def test_a_sweep_computes_the_checksum_of_each_shard_once(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    """The first sweep while it stores the shards; the next before its trials, which only look at the files' sizes."""
    recipe = make_recipe(tmp_path, tiny("bert"), [tiny("minilm")], sentences, QUIET[2], "training.max_steps=2")
    for sweep in ("first", "second"):
        trials = open_store(tmp_path / sweep)
        with shard_checksums() as computed:
            experiment_of(recipe).trials.prepare(LocalBackend(), Reporter(), RunDirectory(tmp_path))
            context = TrialContext(recipe, trials, TrialBackend(None, in_own_process=True))
            for lr in (1e-3, 1e-4):
                assert run_trial(context, f"{lr}", {LR: lr}, lambda metrics: None).status == "finished"
        assert sorted(computed) == [f"shard-{shard:05d}.npy" for shard in range(4)]


def test_a_teacher_is_queried_once_per_block_of_steps(recipe_with: Callable[..., Recipe], sentences: list[str]) -> None:
    recipe = recipe_with(*QUIET, "teachers.prefetch_steps=4", "training.batch_size=64", "training.epochs=3")
    spec, tables = make_spec(recipe)
    teachers = zip(recipe.teachers.encoders, tables, strict=True)
    clients = [CountedSource(LocalTeacherClient(open_table_teacher(teacher, table))) for teacher, table in teachers]
    train_student(spec, clients, Reporter())
    steps = 3 * (len(sentences) // 64)
    for client in clients:
        assert len(client.requests) == math.ceil(steps / 4)
        assert sum(client.requests) == steps


def test_a_step_of_twelve_layers_dispatches_at_most_8000_operations(
    recipe_with: Callable[..., Recipe], tiny: Callable[..., Path]
) -> None:
    """For any width; with dropout, gradient clipping, [CLS] pooling and rows of different lengths."""
    model = (f"student.backbone={tiny('bert', layers=12)}", "student.layers=null", "student.pooling=cls")
    spec, tables = make_spec(recipe_with(*QUIET, *model, "training.gradient_clipping=1.0"))
    teachers = zip(spec.recipe.teachers.encoders, tables, strict=True)
    step = TrainingStep(spec, [LocalTeacherClient(open_table_teacher(teacher, table)) for teacher, table in teachers])
    assert sum(p.requires_grad for p in step.task.model.parameters()) == 199
    step()
    assert 7000 < dispatched(step) <= 8000


def test_losses_create_no_tensor_of_pairs_times_dimensions() -> None:
    n, width = 96, 40
    draw = torch.Generator().manual_seed(n)
    z1, z2 = (torch.randn(n, width, generator=draw).requires_grad_() for _ in range(2))
    lists = torch.rand(n, n, generator=draw)
    with LargestTensor() as counted:
        views = gather_views(z1, z2)
        loss = jensen_shannon(views.similarities / 0.05, views.reverse / 0.05).mean()
        loss = loss + list_net(views.similarities, lists, 0.05, 0.025).mean()
        loss = loss + list_mle(views.similarities, lists, 0.05).mean()
        torch.autograd.grad(loss, (z1, z2))
    assert n**2 <= counted.numbers <= 2 * n**2


def test_an_embedding_pass_processes_little_padding(data: Path, minilm: str) -> None:
    from transformers import AutoTokenizer

    from distcse.models import resolve_model

    tokenizer, budget = AutoTokenizer.from_pretrained(resolve_model(minilm)), CPU.frozen_batch_tokens
    token_ids = tokenizer(wiki_sentences(data, 2000), truncation=True, max_length=32)["input_ids"]
    batches = by_length(token_ids, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(2000))
    processed = sum(len(batch) * max(len(token_ids[index]) for index in batch) for batch in batches)
    assert sum(map(len, token_ids)) / processed >= 0.965
