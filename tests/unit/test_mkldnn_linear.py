"""Frozen models with weights in oneDNN's layout compute the same embeddings."""

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
from distcse.models.cpu_kernels import is_faster, use_mkldnn_linear
from distcse.recipe import TeacherSection
from distcse.teachers.kinds import kind_of
from tests.models import make_cross_encoder

_HAS_KERNELS = torch.backends.mkldnn.is_available()
needs_kernels = pytest.mark.skipif(not _HAS_KERNELS, reason="this PyTorch has no oneDNN")


@needs_kernels
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert", "mpnet"])
def test_embeddings_are_equal_and_the_original_weights_are_released(
    tiny: Callable[..., Path], sentences: list[str], kind: str
) -> None:
    plain = Encoder.load(tiny(kind), pooling="mean").eval()
    converted = copy.deepcopy(plain)
    use_mkldnn_linear(converted)
    np.testing.assert_allclose(converted.encode(sentences[:50]), plain.encode(sentences[:50]), atol=2e-6)
    assert any(type(part) is nn.Linear for part in plain.modules())
    assert any(type(part) is nn.Linear for part in converted.modules()) != is_faster("fp32")


def test_slow_and_unsupported_kernels_are_not_used(
    tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Intel CPUs, oneDNN may be slower than MKL in fp32; without AVX-512, its bf16 operator raises."""
    monkeypatch.setattr("distcse.models.cpu_kernels.fp32_speedup", lambda: 0.8)
    monkeypatch.setattr("distcse.models.cpu_kernels.onednn_supports", lambda precision: False)
    plain = Encoder.load(tiny(), pooling="mean").eval()
    for precision in ("fp32", "bf16"):
        converted = copy.deepcopy(plain)
        use_mkldnn_linear(converted, precision)
        assert any(type(part) is nn.Linear for part in converted.modules())
        np.testing.assert_array_equal(
            converted.encode(sentences[:9], precision=precision), plain.encode(sentences[:9], precision=precision)
        )


@needs_kernels
@pytest.mark.parametrize(("measured", "is_used"), [(0.95, False), (1.01, False), (1.5, True)])
def test_a_product_that_is_as_fast_does_not_pay_for_a_model(
    measured: float, is_used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distcse.models.cpu_kernels.fp32_speedup", lambda: measured)
    assert is_faster("fp32") is is_used


@needs_kernels
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not list mappings")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_mapping_of_the_original_weights_is_closed(
    tmp_path: Path, tiny: Callable[..., Path], precision: str
) -> None:
    """A single tensor in the mapping would keep the weights in memory twice."""
    if not is_faster(precision):
        pytest.skip(f"oneDNN's layout is not faster in {precision} on this CPU")
    folder = tmp_path / "read once"
    shutil.copytree(tiny(), folder)
    encoder = Encoder.load(folder, pooling="mean").eval()
    assert f"{folder}/model.safetensors" in Path("/proc/self/maps").read_text()
    use_mkldnn_linear(encoder, precision)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert np.isfinite(encoder.encode(["A sentence."], precision=precision)).all()


@needs_kernels
def test_bf16_embeddings_are_close_to_those_of_autocast(tiny: Callable[..., Path], sentences: list[str]) -> None:
    plain = Encoder.load(tiny(), pooling="mean").eval()
    converted = copy.deepcopy(plain)
    use_mkldnn_linear(converted, "bf16")
    half = converted.encode(sentences[:50], precision="bf16")
    np.testing.assert_allclose(half, plain.encode(sentences[:50], precision="bf16"), atol=1e-2)
    assert np.abs(half - plain.encode(sentences[:50])).max() > 1e-4


@needs_kernels
def test_scores_of_pairs_are_equal(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> None:
    plain = CrossEncoder.load(make_cross_encoder(tmp_path, tiny()))
    converted, pairs = copy.deepcopy(plain), list(zip(sentences[:20], sentences[20:40], strict=True))
    use_mkldnn_linear(converted)
    np.testing.assert_allclose(converted.score(pairs), plain.score(pairs), atol=1e-6)


def test_fp16_leaves_a_model_unchanged(tiny: Callable[..., Path]) -> None:
    model = Encoder.load(tiny(), pooling="mean")
    use_mkldnn_linear(model, "fp16")
    assert any(type(part) is nn.Linear for part in model.modules())


@needs_kernels
def test_teachers_are_converted_in_their_precision(tiny: Callable[..., Path], sentences: list[str]) -> None:
    sections = [TeacherSection(backbone=str(tiny()), pooling="mean", precision=kind) for kind in ("fp32", "bf16")]
    plain = Encoder.load(tiny(), pooling="mean").eval()
    for section, tolerance in zip(sections, (2e-6, 1e-2), strict=True):
        converted = kind_of(section).open_embedder()
        assert isinstance(converted, Encoder)
        assert any(type(part) is nn.Linear for part in converted.modules()) != is_faster(section.precision)
        found, expected = (each.encode(sentences[:9], precision=section.precision) for each in (converted, plain))
        np.testing.assert_allclose(found, expected, atol=tolerance)


def test_frozen_matrices_are_fp16_on_a_gpu(
    tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's `meta` device, whose tensors have no values, replaces the GPU; the values are computed on the CPU."""
    monkeypatch.setattr("distcse.teachers.kinds.base.default_device", lambda: "meta")
    section = TeacherSection(backbone=str(tiny()), pooling="mean", precision="fp16")
    frozen = kind_of(section).open_embedder()
    assert isinstance(frozen, Encoder)
    matrices = {id(weight) for part in frozen.modules() if isinstance(part, nn.Linear) for weight in part.parameters()}
    for weight in frozen.parameters():
        assert weight.dtype == (torch.float16 if id(weight) in matrices else torch.float32)
    half, plain = Encoder.from_section(section, torch.float16).eval(), Encoder.from_section(section).eval()
    found, expected = (each.encode(sentences[:50], precision="fp16", normalize=True) for each in (half, plain))
    assert found.dtype == np.float32 and np.abs(found @ found.T - expected @ expected.T).max() < 2e-3


def test_fp16_weights_keep_the_similarities_of_a_real_teacher(minilm: str, sentences: list[str]) -> None:
    """Within 6e-4, which the recipe reference states for fp16."""
    section = TeacherSection(backbone=minilm, precision="fp16")
    half, plain = Encoder.from_section(section, torch.float16).eval(), Encoder.from_section(section).eval()
    found = half.encode(sentences[:64], precision="fp16", normalize=True)
    expected = plain.encode(sentences[:64], normalize=True)
    assert np.abs(found @ found.T - expected @ expected.T).max() < 6e-4
