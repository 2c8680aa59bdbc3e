"""Training steps on another device than the CPU: PyTorch's `meta` device, whose tensors have no values.

It simulates a GPU. An operation on a CPU tensor and a meta tensor is an error, and so is reading a value, for which the host
would wait on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import BertConfig, BertModel

from benchmarks import gpu
from benchmarks.reference_style import _through_layers, list_mle
from distcse.data.collate import Tokens, collate
from distcse.experiments.distillation.model import Batch, build_student
from distcse.experiments.mutual.pairs import Pairs
from distcse.experiments.mutual.task import BiPairs, BiTokens, CrossPairs, CrossTokens
from distcse.losses import TeacherOutputs, bce_soft, build_objective, gather_views, mse_cosine
from distcse.models import CrossEncoder, Encoder
from distcse.models.detection import EditDetector, Edited
from distcse.recipe import Recipe
from distcse.trainer.engines.torch_engine import TorchEngine
from tests.models import make_cross_encoder

META = torch.device("meta")
ROWS = [np.arange(2, 2 + length, dtype=np.int32) for length in (4, 7, 3, 5)]


@pytest.fixture(autouse=True)
def _other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the device of the engines. Autocast does not support it, so steps run in float32."""
    monkeypatch.setattr("distcse.trainer.engines.torch_engine.default_device", lambda: "meta")
    known = torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda kind, *rest, **more: nullcontext() if kind == "meta" else known(kind, *rest, **more)
    )


def tokens() -> Tokens:
    return collate(ROWS, 0, with_token_index=True).to(META)


def step(recipe: Recipe, lists_on: torch.device = META) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward, backward and update for two streams of four sentences."""
    model, objective = build_student(recipe).train(), build_objective(recipe.objective)
    engine = TorchEngine(model, recipe.training, None)
    queue_size = len(model.queue.vectors) if model.queue else 0
    anchors = [tokens()] * 2 if model.queue and len(model.queue.anchors) else []
    output = engine.forward(Batch([(tokens(), 1), (tokens(), 2)], anchors))
    views = gather_views(output.z1, output.z2, model.queue.vectors if model.queue else None, None)
    lists = torch.empty(8, 8 + queue_size, device=lists_on)
    loss, parts = objective(views, TeacherOutputs(lists, lists, torch.empty(8, 32, device=META)), output.detection)
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


def test_losses_of_the_gpu_benchmark_stay_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark computes them on the GPU before it times a step, and stops at the first failure."""
    # transformers would read from the device whether a mask is all ones.
    monkeypatch.setattr("transformers.masking_utils._ignore_bidirectional_mask_sdpa", lambda *_, **__: False)
    bench = gpu.Bench(META, tiny=True)
    ours = gpu.Student(bench, "base", gpu.RANKCSE, "fp32")
    theirs = gpu.Reference(bench, ours, ("base", "large"), None, half_teachers=False)
    ours.taught = gpu.cosines_of(theirs)
    ranks = gpu.RankReference(bench, ours, theirs.teachers[0].model, torch.empty(20, 64, device=META))
    assert {loss.device for loss in (ours.loss_of_next(), theirs.loss(), ranks.loss())} == {META}


def test_other_parts_of_the_reference_style_stay_on_their_device() -> None:
    cosines, mask = torch.empty(8, 8, device=META), torch.ones(8, 7, dtype=torch.long, device=META)
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    hidden = _through_layers(model.to(META), torch.empty(8, 7, 8, device=META), mask)
    assert hidden.device == list_mle(cosines, cosines, 0.05).device == META
