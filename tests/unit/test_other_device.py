"""Training steps on another device than the CPU: PyTorch's `meta` device, whose tensors have no values.

It simulates a GPU. An operation on a CPU tensor and a meta tensor is an error, and so is reading a value, for which the host
would wait on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from distcse.data.collate import Tokens, collate
from distcse.experiments.distillation.model import Batch, build_student
from distcse.experiments.mutual.pair_task import BiPairs, BiTokens, CrossPairs, CrossTokens
from distcse.experiments.mutual.pairs import Pairs
from distcse.losses import TeacherOutputs, bce_soft, build_objective, gather_views, mse_cosine
from distcse.models import CrossEncoder, Encoder
from distcse.models.detection import EditDetector, Edited
from distcse.recipe import Recipe
from distcse.trainer.engines.torch_engine import TorchEngine
from tests.meta_device import META, use_meta_device
from tests.models import make_cross_encoder

ROWS = [np.arange(2, 2 + length, dtype=np.int32) for length in (4, 7, 3, 5)]


@pytest.fixture(autouse=True)
def _other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use_meta_device(monkeypatch)


def tokens() -> Tokens:
    return collate(ROWS, 0, with_token_index=True).to(META)


def step(recipe: Recipe, lists_on: torch.device = META) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward, backward and update for two streams of four sentences."""
    model, objective = build_student(recipe).train(), build_objective(recipe.objective)
    engine = TorchEngine(model, recipe.training, None)
    queue_size = len(model.queue.vectors) if model.queue else 0
    anchors = [tokens()] * 2 if model.queue and len(model.queue.anchors) else []
    output = engine.forward(Batch([(tokens(), 1), (tokens(), 2)], anchors))
    queued = model.queue.vectors if model.queue else None
    views = gather_views(output.z1, output.z2, queued, None, output.detection)
    lists = torch.empty(8, 8 + queue_size, device=lists_on)
    loss, parts = objective(views, TeacherOutputs(lists, lists, torch.empty(8, 32, device=META)))
    engine.backward(loss)
    assert all(weight.grad is not None for weight in model.encoder.backbone.encoder.parameters())  # type: ignore[union-attr]
    engine.step(1e-3)
    if model.queue:
        model.queue.push(views.all_z1)
    return loss, parts


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("student.pooling=cls",),
        ("student.pooling=first_last_avg",),
        ("student.projection=batch_norm_mlp",),
        ("student.embedding_size=8",),
        ("training.grad_cache_chunk=4",),
        ("objective.info_nce.false_negatives={threshold: 0.9}", "objective.rank=null"),
        ("objective.rank.form=list_mle",),
        ("objective.rank.queue={num_batches: 2, num_anchors: 8}", "student.projection=none"),
        ("objective.regression={form: cosine}", "student.projection=none"),
        ("objective.rank=null", "objective.rank_regression={}"),
        ("objective.rank=null", "objective.rank_regression={}", "objective.combine=hinge"),
    ],
    ids=lambda overrides: " ".join(overrides).replace("objective.", "") or "RankCSE",
)
def test_a_step_stays_on_its_device_and_reads_no_value(
    overrides: tuple[str, ...], recipe_with: Callable[..., Recipe]
) -> None:
    loss, parts = step(recipe_with(*overrides))
    assert {part.device for part in (loss, *parts.values())} == {META}


def test_a_tensor_on_the_cpu_is_an_error(recipe_with: Callable[..., Recipe]) -> None:
    with pytest.raises(RuntimeError, match="on device cpu is not on the expected device meta"):
        step(recipe_with(), lists_on=torch.device("cpu"))


def test_diffcse_reads_only_the_number_of_edits(
    recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number decides sizes; everything else of the discriminator is on the device."""
    monkeypatch.setattr(EditDetector, "edited_length", lambda self, tokens: tokens.ids.shape[1])
    monkeypatch.setattr(EditDetector, "_edited", lambda self, tokens: Edited(tokens.ids, tokens.mask, tokens.mask))
    loss, parts = step(recipe_with("objective.detection={operation: deletion}"))
    assert {part.device for part in (loss, *parts.values())} == {META}


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_steps_of_pairs_stay_on_their_device(
    kind: str, tiny: Callable[..., Path], sentences: list[str], tmp_path: Path
) -> None:
    pairs = Pairs(sentences[:8], sentences[8:16])
    encoder = Encoder.load(tiny(kind), pooling="mean", max_length=16)
    scorer = CrossEncoder.load(make_cross_encoder(tmp_path / "cross", tiny(kind)), max_length=32)
    rows, labels = np.arange(8), torch.empty(8, device=META)
    first, second = BiPairs(encoder).to(META)(BiTokens(encoder, pairs).batch(rows, 1, META))
    mse_cosine(first, second, labels).sum().backward()
    logits = CrossPairs(scorer).to(META)(CrossTokens(scorer, pairs, both_orders=True).batch(rows, 1, META))
    bce_soft(logits, labels).sum().backward()
    assert first.device == logits.device == META
