"""Private names of torch, transformers and DeepSpeed: each exists, does what its wrapper says, and is used by no other module."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.utils.logging import enable_progress_bar

import distcse
from distcse.compat import create_optimizer_state, require_no_compiler, without_noise
from distcse.compat.torch import (
    assert_async,
    foreach_norm,
    fused_adamw_,
    has_onednn_linear,
    onednn_linear,
    onednn_reorder,
    onednn_supports,
)
from distcse.models import CrossEncoder, Encoder
from distcse.models.detection import build_detector
from distcse.recipe import DetectionSection, StudentSection
from tests.models import make_masked_lm

PRIVATE = re.compile(
    r"torch\.(\w+\.)*_[a-z]\w*|_attn_implementation|__compatible_ops__|_overloadpacket|\._schema|\._cdata|_lazy_init_hp|torch\.ops\.|\._fingerprint|\._actions|\._option_string_actions"
)


def test_no_other_module_uses_private_names() -> None:
    package = Path(distcse.__file__).parent
    files = [file for file in package.rglob("*.py") if "compat" not in file.parts and "cluster" not in file.parts]
    found = {
        f"{file.relative_to(package)}: {match[0]}" for file in files for match in PRIVATE.finditer(file.read_text())
    }
    assert len(files) > 100 and not found


def test_it_imports_no_library() -> None:
    code = """
import sys
import distcse.compat
assert not {"torch", "transformers", "deepspeed", "datasets", "model2vec"} & {*sys.modules}
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_assert_async_and_foreach_norm() -> None:
    assert_async(torch.tensor(True), "")
    with pytest.raises(RuntimeError, match="unequal rows"):
        assert_async(torch.tensor(False), "unequal rows")
    norms = foreach_norm([torch.tensor([3.0, 4.0]), torch.zeros(2, 2)])
    assert torch.equal(torch.stack(norms), torch.tensor([5.0, 0.0]))


def test_fused_adamw_counts_updates_once_and_divides_gradients() -> None:
    torch.manual_seed(0)
    weights, gradients = [torch.randn(3, 4), torch.randn(5)], [torch.randn(3, 4), torch.randn(5)]
    expected = [weight.clone().requires_grad_() for weight in weights]
    reference = torch.optim.AdamW(expected, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.01)
    moments = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    for update in (1.0, 2.0):
        for parameter, gradient in zip(expected, gradients, strict=True):
            parameter.grad = gradient / 2
        reference.step()
        settings: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.01, "epsilon": 1e-8}
        copies = [gradient.clone() for gradient in gradients]
        fused_adamw_(weights, copies, *moments, torch.tensor(update), **settings, grad_divisor=torch.tensor(2.0))
    for weight, parameter in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, parameter.detach())


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
def test_onednn_linear() -> None:
    torch.manual_seed(0)
    rows, weight, bias = torch.randn(2, 5, 8), torch.randn(3, 8), torch.randn(3)
    assert has_onednn_linear()
    reordered = onednn_reorder(weight)
    for added in (bias, None):
        torch.testing.assert_close(
            onednn_linear(rows, reordered, added), torch.nn.functional.linear(rows, weight, added), atol=1e-5, rtol=0
        )
    names = [f"_is_mkldnn_{precision}_supported" for precision in ("bf16", "fp16")]
    assert all(hasattr(torch.ops.mkldnn, name) for name in names)
    assert isinstance(onednn_supports("bf16"), bool) and not onednn_supports("fp64")


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """Records of transformers' loggers that would reach the terminal."""
    library, records = logging.getLogger("transformers"), list[logging.LogRecord]()
    monkeypatch.setattr(library, "level", logging.WARNING)
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    library.addHandler(handler)
    enable_progress_bar()
    yield records
    library.removeHandler(handler)


def test_without_noise(
    tiny: Callable[..., Path], tmp_path: Path, reports: list[logging.LogRecord], capfd: pytest.CaptureFixture[str]
) -> None:
    def load_and_save() -> None:
        AutoModelForSequenceClassification.from_pretrained(tiny()).save_pretrained(tmp_path)

    load_and_save()
    assert len(reports) == 1, "the head's missing weights are reported by another logger"
    assert "Writing model" in capfd.readouterr().err
    enable_progress_bar()
    with without_noise():
        load_and_save()
    assert len(reports) == 1 and not capfd.readouterr().err
    load_and_save()
    assert len(reports) == 2, "warnings are shown again"


def test_models_with_other_heads_are_loaded_and_saved_in_silence(
    tiny: Callable[..., Path],
    tmp_path: Path,
    reports: list[logging.LogRecord],
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    with without_noise():
        source = make_masked_lm(tmp_path / "masked", tiny())
    enable_progress_bar()
    student = StudentSection(backbone=str(source))
    encoder = Encoder.from_section(student)
    encoder.save(tmp_path / "saved")
    CrossEncoder.fresh(source, 16).save(tmp_path / "cross")
    build_detector(DetectionSection(generator=str(source)), encoder, Encoder.from_section(student), "fp32")
    output = capfd.readouterr()
    assert not reports and not caplog.records and not output.err and not output.out


def test_names_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training with every ZeRO stage is in test_student.py; this names what moved."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    deepspeed = pytest.importorskip("deepspeed", reason="deepspeed is not installed")
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    assert hasattr(stage_1_and_2.DeepSpeedZeroOptimizer, "_lazy_init_hp_params_optimizer_state")
    for module, name in (
        (stage_1_and_2, "single_partition_of_fp32_groups"),
        (stage3, "fp32_partitioned_groups_flat"),
    ):
        assert f"self.{name}" in Path(str(module.__file__)).read_text()
    monkeypatch.setattr(deepspeed.ops, "__compatible_ops__", dict(deepspeed.ops.__compatible_ops__))
    require_no_compiler(deepspeed)
    assert deepspeed.ops.__compatible_ops__ == {}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_state_is_created_for_all_partitions(stage: int) -> None:
    class Optimizer:
        def __init__(self) -> None:
            self.single_partition_of_fp32_groups = [torch.ones(2), torch.ones(3)]
            self.fp32_partitioned_groups_flat = [torch.ones(4)]
            self.optimizer: Any = type("Inner", (), {"state": {}})()
            self.lazily_created = 0

        def _lazy_init_hp_params_optimizer_state(self) -> None:
            self.lazily_created += 1

    def state_of(flat: Tensor) -> dict[str, Tensor]:
        return {"exp_avg": torch.zeros_like(flat)}

    optimizer = Optimizer()
    create_optimizer_state(optimizer, stage, state_of)
    sizes = [state["exp_avg"].numel() for state in optimizer.optimizer.state.values()]
    assert (sizes, optimizer.lazily_created) == (([2, 3], 1) if stage < 3 else ([4], 0))
