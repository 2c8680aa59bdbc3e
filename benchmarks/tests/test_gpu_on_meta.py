"""The GPU benchmark's losses on PyTorch's `meta` device: no operation mixes devices, and no value is read."""

from __future__ import annotations

import pytest
import torch
from transformers import BertConfig, BertModel

from benchmarks import gpu
from benchmarks.reference_style import list_mle, through_layers
from tests.meta_device import META, use_meta_device


@pytest.fixture(autouse=True)
def _other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    use_meta_device(monkeypatch)


def test_losses_of_the_gpu_benchmark_stay_on_their_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark computes them on the GPU before it times a step, and stops at the first failure."""
    # transformers would read from the device whether a mask is all ones.
    monkeypatch.setattr("transformers.masking_utils._ignore_bidirectional_mask_sdpa", lambda *_, **__: False)
    bench = gpu.Bench(META, tiny=True)
    ours = gpu.Student(bench, "base", gpu.RANKCSE, "fp32")
    theirs = gpu.Reference(bench, ours, ("base", "large"), None, half_teachers=False)
    ours.teacher_lists = gpu.cosines_of(theirs)
    ranks = gpu.RankReference(bench, ours, theirs.teachers[0].model, torch.empty(20, 64, device=META))
    assert {loss.device for loss in (ours.loss_of_next(), theirs.loss(), ranks.loss())} == {META}


def test_other_parts_of_the_reference_style_stay_on_their_device() -> None:
    cosines, mask = torch.empty(8, 8, device=META), torch.ones(8, 7, dtype=torch.long, device=META)
    model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16))
    hidden = through_layers(model.to(META), torch.empty(8, 7, 8, device=META), mask)
    assert hidden.device == list_mle(cosines, cosines, 0.05).device == META
