"""The device that models of this process run on, and which arithmetic it is fast at."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from distcse import host

HALF_PRECISIONS: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

MIN_SPEEDUP = 1.2
"""A half precision counts as fast from this ratio of times on: below it, rounding buys nothing."""

_NATIVE_BF16 = (8, 0)
"""Lowest compute capability of an NVIDIA GPU with bf16 units (Ampere)."""
SMALL, LARGE = (128, 384, 384), (256, 384, 1536)
"""Rows, inputs and outputs of the timed products: MiniLM's attention and feed-forward maps, 38 and 302 MFLOP."""
_HOPELESS = 0.5
"""Ratio of the small product below which the large one is not timed: without bf16 units that can take half a second."""


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device gains by half precision."""

    name: str
    """For people: `AMD EPYC 7763 (AVX2)`, `NVIDIA A100-SXM4-40GB`."""
    kind: Literal["cpu", "gpu"]
    native: frozenset[str]
    """Half precisions (`bf16`, `fp16`) that PyTorch and the device say they support."""
    speedups: Mapping[str, float]
    """Time of an fp32 matrix product over that of the same product in a half precision, where it was measured."""

    def is_fast_at(self, precision: str) -> bool:
        """Whether a half precision is supported and, where it was measured, at least `MIN_SPEEDUP` times as fast as fp32."""
        return precision in self.native and self.speedups.get(precision, MIN_SPEEDUP) >= MIN_SPEEDUP

    @property
    def precision(self) -> Literal["fp32", "bf16"]:
        """What `precision: auto` chooses for this device alone."""
        return "bf16" if self.is_fast_at("bf16") else "fp32"

    def describe(self, precision: str = "bf16") -> str:
        """The device and what a half precision gains on it."""
        if precision in self.speedups:
            return f"{self.name}: {precision} products {self.speedups[precision]:.2g}x as fast as fp32"
        return f"{self.name}: {'has' if precision in self.native else 'no'} {precision} units"


def default_device() -> str:
    """`cuda` where this process sees a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def use_available_cpus() -> None:
    """Lower this process's threads to the CPUs it may use.

    PyTorch starts a thread for every CPU of the machine: in a container with a quota of two of sixty-four CPUs, they block one
    another. A set OMP_NUM_THREADS is kept.
    """
    if "OMP_NUM_THREADS" not in os.environ and (cpus := host.cpus()) < torch.get_num_threads():
        torch.set_num_threads(cpus)


def local_speed() -> DeviceSpeed:
    """The speed of the device that models of this process run on."""
    return speed_of(default_device())


def speed_of(device: str) -> DeviceSpeed:
    """The speed of a device by PyTorch's name: `cpu`, `cuda`, `cuda:1`."""
    found = torch.device(device)
    if found.type != "cuda":
        return cpu_speed()
    return gpu_speed(torch.cuda.current_device() if found.index is None else found.index)


@cache
def cpu_speed() -> DeviceSpeed:
    """This machine's CPU: what oneDNN supports on it, and matrix products timed for some milliseconds (once a process)."""
    name = f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"
    native = frozenset(precision for precision in HALF_PRECISIONS if onednn_supports(precision))
    speedups = {precision: _measured_speedup(dtype) for precision, dtype in HALF_PRECISIONS.items()}
    return DeviceSpeed(name, "cpu", native, speedups)


def gpu_speed(number: int) -> DeviceSpeed:
    """One of this machine's GPUs, by what its compute capability says; nothing is run on it."""
    native = {"fp16", "bf16"} if torch.cuda.get_device_capability(number) >= _NATIVE_BF16 else {"fp16"}
    return DeviceSpeed(torch.cuda.get_device_name(number), "gpu", frozenset(native), {})


def to_device(numbers: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device; on its way to a GPU the host does not wait.

    A plain copy of pageable memory makes the host wait for all work queued on the GPU. A copy of page-locked memory does not, and
    PyTorch keeps that memory until the copy is done.
    """
    if torch.device(device).type != "cuda" or numbers.device.type != "cpu":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def speedup(plain: Callable[[], object], other: Callable[[], object], rounds: int = 5) -> float:
    """How many times as fast as `plain` another way is: minima of interleaved calls, by the CPU time of one thread.

    CPU time, because a busy machine changes the wall clock's ratio and not this one.
    """
    ways, best = (plain, other), [float("inf"), float("inf")]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for way in ways:
            way()  # makes oneDNN's kernel
        for _ in range(rounds):
            for number, way in enumerate(ways):
                begin = time.thread_time()
                way()
                best[number] = min(best[number], time.thread_time() - begin)
    finally:
        torch.set_num_threads(threads)
    return best[0] / best[1]


def onednn_supports(precision: str) -> bool:
    """Whether oneDNN has products of a half precision on this CPU: PyTorch's own question before it hands it one."""
    if not torch.backends.mkldnn.is_available():
        return False
    ask = getattr(torch.ops.mkldnn, f"_is_mkldnn_{precision}_supported", None)
    return ask is not None and bool(ask())


def _measured_speedup(dtype: torch.dtype) -> float:
    """What fp32 products gain by another type.

    The operands are ones: random numbers would move the generator that a run's dropout is drawn from.
    """
    screened = speedup(_product(SMALL, torch.float32), _product(SMALL, dtype), rounds=1)
    return screened if screened < _HOPELESS else speedup(_product(LARGE, torch.float32), _product(LARGE, dtype))


def _product(shape: tuple[int, int, int], dtype: torch.dtype) -> Callable[[], Tensor]:
    rows, inputs, outputs = shape
    hidden, weight = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    return lambda: torch.nn.functional.linear(hidden, weight)


def cpu_name() -> str:
    """The CPU's model name, as the system reports it."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    named = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return named or platform.processor() or platform.machine()
