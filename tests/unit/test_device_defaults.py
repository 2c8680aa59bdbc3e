"""What a run does on a GPU by default: precisions, widths, recorded steps, shared dev scores, memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from distcse.devices.device import DeviceSpeed, auto_precision
from distcse.errors import OutOfMemoryError
from distcse.events import Event, StageProgress
from distcse.models import Encoder
from distcse.models.folder import overflows_fp16
from distcse.models.loading import halve_matrices
from distcse.preflight.precision import Role, report_precisions
from distcse.recipe import Recipe, TrainingSection
from distcse.runs.directory import RunDirectory
from distcse.runs.distillation.distillation_task import BatchLoader
from distcse.teachers.kinds.base import frozen_weight_dtype
from distcse.training.engines.deepspeed_engine import deepspeed_config
from distcse.training.out_of_memory import OutOfMemoryAdvice
from tests.failures import fails_with
from tests.gpusim import simulated
from tests.jobs import make_spec, train

MakeRecipe = Callable[..., Recipe]

H100 = DeviceSpeed("NVIDIA H100", "gpu", frozenset({"bf16", "fp16"}), {})
V100 = DeviceSpeed("NVIDIA V100", "gpu", frozenset({"fp16"}), {})
AMX = DeviceSpeed("Xeon (AMX)", "cpu", frozenset({"bf16", "fp16"}), {"bf16": 6.0, "fp16": 5.0})
AVX2 = DeviceSpeed("EPYC (AVX2)", "cpu", frozenset(), {"bf16": 0.02, "fp16": 0.02})


@pytest.mark.parametrize(
    ("devices", "trained", "teacher", "overflowing"),
    [
        ([H100], "bf16", "fp16", "bf16"),
        ([V100], "fp32", "fp16", "fp32"),
        ([H100, V100], "fp32", "fp16", "fp32"),
        ([AMX], "bf16", "bf16", "bf16"),
        ([AVX2], "fp32", "fp32", "fp32"),
        ([H100, AMX], "bf16", "bf16", "bf16"),
        ([], "fp32", "fp32", "fp32"),
    ],
)
def test_teachers_are_fp16_and_students_bf16_on_gpus(
    devices: list[DeviceSpeed], trained: str, teacher: str, overflowing: str
) -> None:
    assert auto_precision(devices) == trained
    assert auto_precision(devices, is_teacher=True) == teacher
    assert auto_precision(devices, is_teacher=True, overflows_fp16=True) == overflowing


def test_one_line_names_what_a_gpu_does() -> None:
    roles = [
        Role("student", "training.precision", "auto", [H100]),
        Role("teacher 0", "teachers.encoders.0.precision", "auto", [H100], is_teacher=True),
    ]
    events: list[Event] = []
    report_precisions(roles, events.append)
    (line,) = (event.note for event in events if isinstance(event, StageProgress))
    assert line.startswith(
        "bf16: student; fp16: teacher 0 (NVIDIA H100: has bf16 units); on GPUs widths in multiples of 8"
    )


def test_families_that_overflow_fp16_are_known(tiny: Callable[..., Path]) -> None:
    assert overflows_fp16(tiny("t5")) and not overflows_fp16(tiny("bert"))


def test_matrices_alone_are_halved(tiny: Callable[..., Path]) -> None:
    assert frozen_weight_dtype("fp16", "cuda") == torch.float16 and frozen_weight_dtype("fp16", "cpu") == torch.float32
    encoder = Encoder.load(tiny("bert"), pooling="mean")
    halve_matrices(encoder, torch.float16)
    types = {name.split(".")[-2]: weight.dtype for name, weight in encoder.named_parameters()}
    assert types["query"] == types["dense"] == torch.float16
    assert types["LayerNorm"] == types["word_embeddings"] == torch.float32


@pytest.mark.parametrize(("max_length", "widths"), [(16, {8, 16}), (13, {8, 13})])
def test_widths_on_a_gpu_are_multiples_of_8(max_length: int, widths: set[int], recipe_with: MakeRecipe) -> None:
    spec, _ = make_spec(recipe_with(f"student.max_length={max_length}"))
    loader = BatchLoader(spec, 0, 1)
    on_cpu = [loader.batch(step, torch.device("cpu"), max_length).streams[0][0] for step in range(8)]
    with simulated():
        on_gpu = [loader.batch(step, torch.device("gpu"), max_length).streams[0][0] for step in range(8)]
        assert {tokens.ids.shape[1] for tokens in on_gpu} <= widths
        for narrow, wide in zip(on_cpu, on_gpu, strict=True):
            length = narrow.ids.shape[1]
            assert torch.equal(wide.ids.cpu()[:, :length], narrow.ids) and torch.equal(
                wide.mask.cpu()[:, :length], narrow.mask
            )
            assert not wide.mask.cpu()[:, length:].any()


def test_widths_are_kept_where_the_loss_counts_padding(recipe_with: MakeRecipe) -> None:
    overrides = (
        "objective.rank=null",
        "objective.consistency=null",
        "objective.detection={generator: unread, reduction: all}",
    )
    spec, _ = make_spec(recipe_with(*overrides))
    loader = BatchLoader(spec, 0, 1)
    narrow = loader.batch(0, torch.device("cpu"), 16).streams[0][0]
    with simulated():
        assert loader.batch(0, torch.device("gpu"), 16).streams[0][0].ids.shape == narrow.ids.shape


def test_a_step_without_memory_says_how_to_continue(recipe_with: MakeRecipe) -> None:
    """The checkpoint is kept, and the run continues with the gradient cache that the message names."""
    spec, tables = make_spec(recipe_with("training.max_steps=8", "evaluation.eval_steps=2"))
    with simulated() as gpu:
        with (
            gpu.out_of_memory(at="distcse/training/engines", after=300, times=1000),
            fails_with(OutOfMemoryError, "16 of 16 rows", "training.batch_size=8") as failure,
        ):
            train(spec, tables)
        assert "training.grad_cache_chunk=8" in str(failure.value) and "--resume" in str(failure.value)
        _, recipe = RunDirectory.reopen(spec.run.path, ["training.grad_cache_chunk=8"])
        assert isinstance(recipe, Recipe)
        result = train(type(spec)(**{**vars(spec), "recipe": recipe}), tables)
    assert result.state.finished and (spec.run.path / "checkpoints").is_dir()


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"batch_size": 12, "grad_cache_chunk": 6}, "training.grad_cache_chunk=3"),
        ({"batch_size": 12, "grad_cache_chunk": 1}, "start a new run with training.batch_size=6"),
        ({"batch_size": 12, "workers": 3}, "training.workers=6"),
        ({"batch_size": 12, "precision": "fp32"}, "training.precision=bf16"),
        ({"batch_size": 12, "dropout_rng_streams": 2}, "training.dropout_rng_streams=null training.grad_cache_chunk=6"),
        ({"batch_size": 12}, "39.55 GiB allowed"),
    ],
)
def test_the_ways_out_fit_the_recipe(section: dict[str, Any], named: str) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        activations = torch.zeros(3)
        kept.append(weakref.ref(activations))
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 8.50 MiB is free. "
            "39.55 GiB allowed; Of the allocated memory 38.00 GiB is allocated by PyTorch."
        )

    advice = OutOfMemoryAdvice(TrainingSection(**section), "training")
    with fails_with(OutOfMemoryError, named, "Tried to allocate 2.00 GiB") as failure, advice:
        fail()
    assert failure.value.__suppress_context__ and kept[0]() is None, "the error keeps the step's tensors alive"


@pytest.mark.parametrize(
    ("stage", "own", "expected"),
    [(0, {}, {}), (1, {}, {"overlap_comm": True}), (2, {"overlap_comm": False}, {"overlap_comm": False})],
)
def test_deepspeed_sums_gradients_of_a_gpu_during_the_backward_pass_from_stage_1(
    stage: int, own: dict[str, Any], expected: dict[str, Any]
) -> None:
    section = TrainingSection(
        zero_stage=stage, engine="deepspeed", precision="bf16", deepspeed={"zero_optimization": own} if own else None
    )
    with simulated():
        assert deepspeed_config(section, 16)["zero_optimization"] == {**expected, "stage": stage}
    assert deepspeed_config(section, 16)["zero_optimization"] == {**own, "stage": stage}
