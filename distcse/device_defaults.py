"""What a run does on a GPU and on a CPU where its recipe leaves the choice to the device, with the reasons, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from distcse.device import DeviceSpeed, is_gpu


@dataclass(frozen=True)
class DeviceDefaults:
    """The choices for one kind of device."""

    trained_precisions: tuple[str, ...]
    """Half precisions that `precision: auto` considers for trained models, labels and evaluation, the first preferred."""
    teacher_precisions: tuple[str, ...]
    """Half precisions that `precision: auto` considers for teachers, the first preferred."""
    width_multiple: int
    """Batches are padded to a multiple of this many tokens."""
    records_steps: bool
    """Whether `cuda_graphs: auto` records training steps as CUDA graphs."""
    overlaps_reduction: bool
    """Whether workers sum gradients in buckets during the backward pass; otherwise at its end, in one collective."""
    shards_dev_scores: bool
    """Whether each worker encodes its share of a dev score's sentences; otherwise all of them."""
    frozen_batch_tokens: int
    """Tokens per forward pass of a frozen model, with padding."""
    frozen_min_fill: float
    """Smallest share of these tokens at which a batch ends with its longest texts, and so has no padding."""


CPU = DeviceDefaults(
    trained_precisions=("bf16",),
    # bf16 changes cosines by up to 2.6e-3, but no CPU that PyTorch supports is as fast in fp16.
    teacher_precisions=("bf16",),
    # Time is proportional to tokens, and training skips padding.
    width_multiple=1,
    records_steps=False,
    # All cores compute the backward pass, so that nothing can overlap it. One collective also sends embedding rows.
    overlaps_reduction=False,
    # Other batches round differently, and scores must not depend on the number of workers.
    shards_dev_scores=False,
    # Time is proportional to tokens and to padding, and a batch's activations must stay in the caches: MiniLM's passes of 4,096
    # tokens took 1.05 (AVX2) to 1.17 times (AVX-512) as long as those of 2,048.
    frozen_batch_tokens=2048,
    frozen_min_fill=0.25,
)
GPU = DeviceDefaults(
    # fp16 would need loss scaling. TF32 is not used: what stays fp32 are losses, cosines and ranks, and a model whose recipe
    # says fp32. TF32 would change lists by 3e-4, as much as fp16, which is twice as fast.
    trained_precisions=("bf16",),
    # fp16 changes cosines by up to 3.3e-4, bf16 by 2.6e-3 (`halve_matrices`), at the same speed.
    teacher_precisions=("fp16", "bf16"),
    # Matrix units compute tiles of 8 half-precision numbers, and attention kernels need rows that are aligned to them.
    width_multiple=8,
    # A step of BERT-base launches thousands of kernels, which takes the host longer than the GPU.
    records_steps=True,
    overlaps_reduction=True,
    shards_dev_scores=True,
    # With an H100, the host took about a millisecond to launch a layer's forward pass (benchmarks/results), in which the GPU
    # computes a layer of BERT-base for tens of thousands of tokens. Smaller passes, or batches that end early, leave it idle.
    # The memory does not decide: a pass that does not fit is halved.
    frozen_batch_tokens=65_536,
    frozen_min_fill=1.0,
)
BY_KIND = {"cpu": CPU, "gpu": GPU}


def defaults_of(device: torch.device | str) -> DeviceDefaults:
    """Return the choices for a device by PyTorch's name."""
    return GPU if is_gpu(device) else CPU


def auto_precision(devices: Sequence[DeviceSpeed], *, is_teacher: bool = False, overflows_fp16: bool = False) -> str:
    """Return the precision that `precision: auto` selects: a half precision that every device is fast at, else fp32.

    Args:
        devices: The devices that may compute, all in the same precision; none selects fp32.
        is_teacher: Whether the model is a teacher.
        overflows_fp16: Whether the model's numbers exceed fp16's range.
    """
    for precision in ("fp16", "bf16"):
        if precision == "fp16" and overflows_fp16:
            continue
        if devices and all(precision in _considered(device, is_teacher) for device in devices):
            return precision
    return "fp32"


def describe_gpu_defaults() -> str:
    """Describe in one line what a GPU does by default, apart from precisions and graphs."""
    return (
        f"widths in multiples of {GPU.width_multiple}, gradients of eager steps summed during the backward pass, losses and "
        "lists in fp32 without TF32"
    )


def _considered(device: DeviceSpeed, is_teacher: bool) -> list[str]:
    defaults = BY_KIND[device.kind]
    precisions = defaults.teacher_precisions if is_teacher else defaults.trained_precisions
    return [precision for precision in precisions if device.is_fast_at(precision)]
