"""Shortcuts of frozen models change no result, and a run uses every shortcut. Of trained models: test_last_layer.py."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from distcse.api import run
from distcse.events import Reporter
from distcse.models import CrossEncoder, Encoder
from distcse.models.cpu_kernels import is_faster, use_mkldnn_linear
from distcse.rank_space import RankSpace, rank_space
from distcse.recipe import TeacherSection
from distcse.teachers.kinds import kind_of
from tests.backends import run_mutual
from tests.jobs import make_recipe
from tests.models import make_masked_lm
from tests.pairs import make_mutual_recipe

needs_kernels = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
IS_FASTER = "distcse.models.cpu_kernels.is_faster"
SHORTCUTS = {
    "packing": "distcse.models.fast_layers.packed",
    "choice of packing": "distcse.runs.distillation.distillation_task.worth_packing",
    "last layer": "distcse.models.fast_layers.last_layer_at",
    "dropout": "distcse.models.cpu_kernels.dropout",
    "oneDNN layout": "distcse.models.cpu_kernels.onednn_reorder",
}
"""The function that each shortcut calls."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Number of calls of each shortcut. oneDNN counts as fast, on every CPU."""
    monkeypatch.setattr(IS_FASTER, lambda precision: True)
    found: Counter[str] = Counter()
    for name, path in SHORTCUTS.items():
        module, _, function = path.rpartition(".")
        original = getattr(import_module(module), function)

        def counted(*args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            found[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(path, counted)
    return found


def test_runs_use_every_shortcut(
    tmp_path: Path, tiny: Callable[..., Path], tiny_cross: Path, sentences: list[str], calls: Counter[str]
) -> None:
    varied = [sentence * (1 + number % 2) for number, sentence in enumerate(sentences[:64])]
    teachers = [tiny("minilm"), tiny_cross, tiny("roberta")]
    recipe = make_recipe(
        tmp_path,
        tiny("bert"),
        teachers,
        varied,
        "student.pooling=cls",
        "training.max_steps=2",
        "training.batch_size=8",
        "evaluation.num_heldout=16",
        "teachers.encoders.1.pooling=null",
        "teachers.encoders.2.similarity=rank",
        "teachers.encoders.2.num_references=20",
        f"objective.detection.generator={make_masked_lm(tmp_path / 'generator', tiny('bert'))}",
    )
    outcome = run(recipe)
    assert (outcome.directory / "evaluation.json").is_file()
    assert set(calls) == set(SHORTCUTS)
    calls.clear()
    short = ("mutual.cycles=1", "bi.epochs=1")
    run_mutual(make_mutual_recipe(tmp_path, {"bert": tiny("bert")}, sentences, *short), Reporter())
    assert set(calls) == set(SHORTCUTS) - {"choice of packing"}


@needs_kernels
@pytest.mark.parametrize("kind", ["bert", "distilbert", "mpnet"])
def test_a_frozen_models_layout_changes_no_vector(
    kind: str, tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IS_FASTER, lambda precision: True)
    plain = Encoder.load(tiny(kind), pooling="mean").eval()
    converted = copy.deepcopy(plain)
    use_mkldnn_linear(converted)
    assert has_linear(plain) and not has_linear(converted)
    expected = plain.encode(sentences[:50])
    np.testing.assert_allclose(converted.encode(sentences[:50]), expected, atol=2e-6)
    if kind == "bert":
        references = np.random.default_rng(0).normal(size=(50, 32)).astype(np.float32)
        fast, slow = rank_space(references, "sort", "cpu"), RankSpace(references)
        np.testing.assert_allclose(fast.similarities(expected), slow.similarities(expected), atol=1e-3)


def has_linear(model: nn.Module) -> bool:
    return any(type(part) is nn.Linear for part in model.modules())


@needs_kernels
def test_a_frozen_cross_encoders_layout_changes_no_score(
    tiny_cross: Path, sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(IS_FASTER, lambda precision: True)
    plain = CrossEncoder.load(tiny_cross)
    converted, pairs = copy.deepcopy(plain), list(zip(sentences[:20], sentences[20:40], strict=True))
    use_mkldnn_linear(converted)
    assert has_linear(plain) and not has_linear(converted)
    np.testing.assert_allclose(converted.score(pairs), plain.score(pairs), atol=1e-6)


def test_slow_and_unsupported_kernels_are_not_used(
    tiny: Callable[..., Path], sentences: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Intel CPUs, oneDNN may be slower than MKL in fp32; without AVX-512, its bf16 operator raises."""
    monkeypatch.setattr("distcse.models.cpu_kernels.fp32_speedup", lambda: 0.8)
    monkeypatch.setattr("distcse.models.cpu_kernels.onednn_supports", lambda precision: False)
    plain = Encoder.load(tiny(), pooling="mean").eval()
    use_mkldnn_linear(plain, "fp16")
    assert has_linear(plain)
    for precision in ("fp32", "bf16"):
        converted = copy.deepcopy(plain)
        use_mkldnn_linear(converted, precision)
        assert has_linear(converted)
        np.testing.assert_array_equal(
            converted.encode(sentences[:9], precision=precision), plain.encode(sentences[:9], precision=precision)
        )


@needs_kernels
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-6), ("bf16", 1e-2)])
def test_teachers_are_converted_in_their_precision(
    precision: Literal["fp32", "bf16"], tolerance: float, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    converted = kind_of(TeacherSection(backbone=str(tiny()), pooling="mean", precision=precision)).open_embedder()
    assert isinstance(converted, Encoder) and has_linear(converted) != is_faster(precision)
    plain, found = Encoder.load(tiny(), pooling="mean"), converted.encode(sentences[:50], precision=precision)
    np.testing.assert_allclose(found, plain.encode(sentences[:50], precision=precision), atol=tolerance)
    assert (np.abs(found - plain.encode(sentences[:50])).max() > 1e-4) == (precision == "bf16")


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
