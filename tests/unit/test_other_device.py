"""Training steps where tensors lie on a device that is not the CPU: PyTorch's `meta` device, whose tensors hold no numbers.

It stands in for a GPU where there is none. What was left on the CPU cannot be combined with what lies there, and no number can
be asked of it, which on a GPU would make the host wait.
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
from distcse.detection import EditDetector, Edited
from distcse.experiments.distillation.model import Batch, build_student
from distcse.experiments.mutual.pairs import Pairs
from distcse.experiments.mutual.task import BiPairs, BiTokens, CrossPairs, CrossTokens
from distcse.losses import TeacherOutputs, bce_soft, build_objective, gather_views, mse_cosine
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import Recipe
from distcse.trainer.engines.torch_engine import TorchEngine
from tests.models import make_cross_encoder

META = torch.device("meta")
ROWS = [np.arange(2, 2 + length, dtype=np.int32) for length in (4, 7, 3, 5)]


@pytest.fixture(autouse=True)
def _other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where engines put their model. Autocast does not know the device; float32 is what is computed here."""
    monkeypatch.setattr("distcse.trainer.engines.torch_engine.default_device", lambda: "meta")
    known = torch.autocast
    monkeypatch.setattr(
        torch, "autocast", lambda kind, *rest, **more: nullcontext() if kind == "meta" else known(kind, *rest, **more)
    )


def tokens() -> Tokens:
    return collate(ROWS, 0, placed=True).to(META)


def step(recipe: Recipe, lists_on: torch.device = META) -> tuple[Tensor, dict[str, Tensor]]:
    """Two streams of four sentences, forward, backward and the update."""
    model, objective = build_student(recipe).train(), build_objective(recipe.objective)
    engine = TorchEngine(model, recipe.training, None)
    remembered = len(model.memory.vectors) if model.memory else 0
    landmarks = [tokens()] * 2 if model.memory and len(model.memory.landmarks) else []
    passed = engine.forward(Batch([(tokens(), 1), (tokens(), 2)], landmarks))
    views = gather_views(passed.z1, passed.z2, model.memory.vectors if model.memory else None, None)
    lists = torch.empty(8, 8 + remembered, device=lists_on)
    loss, parts = objective(views, TeacherOutputs(lists, lists, torch.empty(8, 32, device=META)), passed.found)
    engine.backward(loss)
    assert all(weight.grad is not None for weight in model.encoder.backbone.encoder.parameters())  # type: ignore[union-attr]
    engine.step(1e-3)
    if model.memory:
        model.memory.push(views.all_z1)
    return loss, parts


@pytest.mark.parametrize(
    "knobs",
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
def test_a_step_lies_on_its_device_and_asks_nothing_of_it(
    overrides: tuple[str, ...], recipe_with: Callable[..., Recipe]
) -> None:
    loss, parts = step(recipe_with(*overrides))
    assert {part.device for part in (loss, *parts.values())} == {META}


def test_what_was_left_on_the_cpu_is_found(recipe_with: Callable[..., Recipe]) -> None:
    with pytest.raises(RuntimeError, match="on device cpu is not on the expected device meta"):
        step(recipe_with(), lists_on=torch.device("cpu"))


def test_of_diffcse_only_the_number_of_edits_is_asked_for(
    recipe_with: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They decide on sizes; all else of the discriminator is on the device."""
    monkeypatch.setattr(EditDetector, "_edited", lambda self, told: Edited(told.ids, told.mask, told.mask))
    loss, parts = step(recipe_with("objective.detection={operation: deletion}"))
    assert {part.device for part in (loss, *parts.values())} == {META}


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_steps_of_pairs_lie_on_their_device(
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


def test_losses_that_the_gpu_benchmark_compares_lie_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It computes them on the GPU before it times either step, and stops at the first part that fails."""
    # transformers asks the device whether a mask is all ones.
    monkeypatch.setattr("transformers.masking_utils._ignore_bidirectional_mask_sdpa", lambda *_, **__: False)
    bench = gpu.Bench(META, tiny=True)
    ours = gpu.Student(bench, "base", gpu.RANKCSE, "fp32")
    theirs = gpu.Reference(bench, ours, ("base", "large"), None, half_teachers=False)
    ours.taught = gpu.cosines_of(theirs)
    ranks = gpu.RankReference(bench, ours, theirs.teachers[0].model, torch.empty(20, 64, device=META))
    assert {loss.device for loss in (ours.loss_of_next(), theirs.loss(), ranks.loss())} == {META}


def test_other_parts_of_the_reference_style_lie_on_their_device() -> None:
    cosines, mask = torch.empty(8, 8, device=META), torch.ones(8, 7, dtype=torch.long, device=META)
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    hidden = _through_layers(model.to(META), torch.empty(8, 7, 8, device=META), mask)
    assert hidden.device == list_mle(cosines, cosines, 0.05).device == META
