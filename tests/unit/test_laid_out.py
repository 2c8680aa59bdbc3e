"""Weights of frozen models in the kernels' own order: what is computed stays."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from distcse.models import CrossEncoder, Encoder
from distcse.models.fast.mkldnn_linear import pays, use_mkldnn_linear
from distcse.recipe import TeacherSection
from distcse.teachers.factory import open_embedder
from tests.models import make_cross_encoder

_HAS_KERNELS = torch.backends.mkldnn.is_available()
needs_kernels = pytest.mark.skipif(not _HAS_KERNELS, reason="this PyTorch has no oneDNN")


@needs_kernels
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "mpnet"])
def test_vectors_stay_and_plain_weights_go(tiny: Callable[..., Path], sentences: list[str], kind: str) -> None:
    plain = Encoder.load(tiny(kind), pooling="mean").eval()
    laid = copy.deepcopy(plain)
    use_mkldnn_linear(laid)
    np.testing.assert_allclose(laid.encode(sentences[:50]), plain.encode(sentences[:50]), atol=2e-6)
    assert any(type(part) is nn.Linear for part in plain.modules())
    assert any(type(part) is nn.Linear for part in laid.modules()) != pays("fp32")


def test_a_slower_kernel_and_one_that_is_not_there_are_left_out(
    tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """MKL's own CPUs, where oneDNN may be slower in fp32, and CPUs without AVX-512, where its bf16 operator raises."""
    monkeypatch.setattr("distcse.models.fast.mkldnn_linear._fp32_speedup", lambda: 0.8)
    monkeypatch.setattr("distcse.models.fast.mkldnn_linear.onednn_supports", lambda precision: False)
    plain = Encoder.load(tiny(), pooling="mean").eval()
    for precision in ("fp32", "bf16"):
        laid = copy.deepcopy(plain)
        use_mkldnn_linear(laid, precision)
        assert any(type(part) is nn.Linear for part in laid.modules())
        np.testing.assert_array_equal(
            laid.encode(sentences[:9], precision=precision), plain.encode(sentences[:9], precision=precision)
        )


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list mappings")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_file_of_the_plain_weights_is_let_go(tmp_path: Path, tiny: Callable[..., Path], precision: str) -> None:
    """One tensor that still lies in the file's mapping would keep the weights in memory twice."""
    if not pays(precision):
        pytest.skip(f"this CPU lays no {precision} weights out")
    folder = tmp_path / "read once"
    shutil.copytree(tiny(), folder)
    encoder = Encoder.load(folder, pooling="mean").eval()
    assert f"{folder}/model.safetensors" in Path("/proc/self/maps").read_text()
    use_mkldnn_linear(encoder, precision)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert np.isfinite(encoder.encode(["A sentence."], precision=precision)).all()


@needs_kernels
def test_bf16_is_that_of_autocast(tiny: Callable[..., Path], sentences: list[str]) -> None:
    plain = Encoder.load(tiny(), pooling="mean").eval()
    laid = copy.deepcopy(plain)
    use_mkldnn_linear(laid, "bf16")
    half = laid.encode(sentences[:50], precision="bf16")
    np.testing.assert_allclose(half, plain.encode(sentences[:50], precision="bf16"), atol=1e-2)
    assert np.abs(half - plain.encode(sentences[:50])).max() > 1e-4


@needs_kernels
def test_scores_of_pairs_stay(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    plain = CrossEncoder.load(make_cross_encoder(tmp_path, tiny()))
    laid, pairs = copy.deepcopy(plain), list(zip(sentences[:20], sentences[20:40], strict=True))
    use_mkldnn_linear(laid)
    np.testing.assert_allclose(laid.score(pairs), plain.score(pairs), atol=1e-6)


def test_fp16_leaves_a_model_as_it_is(tiny: Callable[..., Path]) -> None:
    model = Encoder.load(tiny(), pooling="mean")
    use_mkldnn_linear(model, "fp16")
    assert any(type(part) is nn.Linear for part in model.modules())


@needs_kernels
def test_teachers_are_laid_out_in_the_precision_they_are_asked_in(
    tiny: Callable[..., Path], sentences: list[str]
) -> None:
    sections = [TeacherSection(backbone=str(tiny()), pooling="mean", precision=how) for how in ("fp32", "bf16")]
    plain = Encoder.load(tiny(), pooling="mean").eval()
    for section, moved in zip(sections, (2e-6, 1e-2), strict=True):
        laid = open_embedder(section)
        assert isinstance(laid, Encoder)
        assert any(type(part) is nn.Linear for part in laid.modules()) != pays(section.precision)
        told, known = (each.encode(sentences[:9], precision=section.precision) for each in (laid, plain))
        np.testing.assert_allclose(told, known, atol=moved)


def test_on_a_gpu_frozen_weights_are_half_as_large(
    tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's `meta` device, whose tensors hold no numbers, stands in for it; the numbers are made on the CPU."""
    monkeypatch.setattr("distcse.teachers.factory.default_device", lambda: "meta")
    section = TeacherSection(backbone=str(tiny()), pooling="mean", precision="fp16")
    frozen = open_embedder(section)
    assert isinstance(frozen, Encoder) and {weight.dtype for weight in frozen.parameters()} == {torch.float16}
    half, plain = Encoder.from_section(section, torch.float16).eval(), Encoder.from_section(section).eval()
    found, known = (each.encode(sentences[:50], precision="fp16", normalize=True) for each in (half, plain))
    assert found.dtype == np.float32 and np.abs(found @ found.T - known @ known.T).max() < 2e-3


def test_half_weights_keep_the_lists_of_a_real_teacher(minilm: str, sentences: list[str]) -> None:
    """Within the 6e-4 that the recipe's reference tells of fp16."""
    section = TeacherSection(backbone=minilm, precision="fp16")
    half, plain = Encoder.from_section(section, torch.float16).eval(), Encoder.from_section(section).eval()
    found = half.encode(sentences[:64], precision="fp16", normalize=True)
    known = plain.encode(sentences[:64], normalize=True)
    assert np.abs(found @ found.T - known @ known.T).max() < 6e-4
