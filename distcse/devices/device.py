"""The device of this process's models, and the precision that it is fast at."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from distcse.compat.torch import onednn_supports
from distcse.devices import host
from distcse.errors import EncoderSettingError

HALF_PRECISIONS: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}

MIN_SPEEDUP = 1.2
"""A half precision counts as fast from this speedup over fp32 on; below, its rounding is not worth it."""

_NATIVE_BF16 = (8, 0)
"""Lowest compute capability of NVIDIA GPUs with bf16 units (Ampere)."""
SMALL, LARGE = (128, 384, 384), (256, 384, 1536)
"""Rows, inputs and outputs of the timed matrix products: MiniLM's attention and feed-forward layers, 38 and 302 MFLOP."""
_ALLOCATED_PART = 0.95
"""Part of a GPU's share that PyTorch may allocate. CUDA's context and libraries take half a GiB more."""
_MIN_SCREENED_SPEEDUP = 0.5
"""Below this speedup of the small product, the large one is not timed: without bf16 units it can take half a second."""


@dataclass(frozen=True)
class DeviceSpeed:
    """Speed of a device's half precisions, relative to fp32."""

    name: str
    """Name in messages: `AMD EPYC 7763 (AVX2)`, `NVIDIA A100-SXM4-40GB`."""
    kind: Literal["cpu", "gpu"]
    native: frozenset[str]
    """Half precisions (`bf16`, `fp16`) that PyTorch and the device support natively."""
    speedups: Mapping[str, float]
    """Time of an fp32 matrix product divided by its time in a half precision, for the measured precisions."""

    def is_fast_at(self, precision: str) -> bool:
        """Whether a half precision is native and, if it was measured, at least `MIN_SPEEDUP` times as fast as fp32."""
        return precision in self.native and self.speedups.get(precision, MIN_SPEEDUP) >= MIN_SPEEDUP

    def describe(self, precision: str = "bf16") -> str:
        """Describe the device and its speedup in a half precision."""
        if precision in self.speedups:
            return f"{self.name}: {precision} products {self.speedups[precision]:.2g}x as fast as fp32"
        return f"{self.name}: {'has' if precision in self.native else 'no'} {precision} units"


def default_device() -> str:
    """Return the type of this process's GPUs by PyTorch's name, `cuda` for NVIDIA's and AMD's; `cpu` if it sees none.

    It sees none while they are hidden from it (`distcse.devices.host.hide_gpus`).
    """
    if host.hides_gpus():
        return "cpu"
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and is_gpu(found) else "cpu"


def is_gpu(device: torch.device | str) -> bool:
    """Return whether a device has a separate queue and memory, so that the host must not wait for it in a step.

    Apple's `mps` counts as a CPU: distcse trains and encodes on the CPU there.
    """
    return torch.device(device).type not in ("cpu", "mps", "meta")


def has_gpu() -> bool:
    """Return whether this process sees a GPU."""
    return default_device() != "cpu"


def gpu_count() -> int:
    """Return how many GPUs this process sees."""
    return torch.accelerator.device_count() if has_gpu() else 0


def gpu_module(device: torch.device | str) -> Any:
    """Return PyTorch's module of a GPU's type, with its streams, events and graphs: `torch.cuda` for `cuda:1`."""
    return torch.get_device_module(torch.device(device))


def limit_memory(share: float) -> None:
    """Limit PyTorch's memory on this process's GPU to a share of it; the next allocation beyond raises OutOfMemoryError."""
    if (device := default_device()) != "cpu":
        gpu_module(device).set_per_process_memory_fraction(_ALLOCATED_PART * share)


def use_available_cpus() -> None:
    """Limit PyTorch's threads to the CPUs that this process may use.

    PyTorch starts a thread per CPU of the machine; in a container with a quota of 2 of 64 CPUs, these block each other.
    A user's OMP_NUM_THREADS is respected.
    """
    if "OMP_NUM_THREADS" not in os.environ and (cpus := host.cpus()) < torch.get_num_threads():
        torch.set_num_threads(cpus)


def local_speed() -> DeviceSpeed:
    """Return the speed of the device of this process's models."""
    return speed_of(default_device())


def speed_of(device: str) -> DeviceSpeed:
    """Return the speed of a device by PyTorch's name: `cpu`, `cuda`, `cuda:1`."""
    found = torch.device(device)
    if not is_gpu(found):
        return cpu_speed()
    return gpu_speed(gpu_module(found).current_device() if found.index is None else found.index)


@cache
def cpu_speed() -> DeviceSpeed:
    """Return the speed of this machine's CPU, timed for some milliseconds once per process."""
    name = f"{cpu_name()} ({torch.backends.cpu.get_cpu_capability()})"
    native = frozenset(precision for precision in HALF_PRECISIONS if onednn_supports(precision))
    speedups = {precision: _measured_speedup(dtype) for precision, dtype in HALF_PRECISIONS.items()}
    return DeviceSpeed(name, "cpu", native, speedups)


def gpu_speed(number: int) -> DeviceSpeed:
    """Return the speed of a GPU by its compute capability; nothing runs on it."""
    module = gpu_module(default_device())
    native = {"fp16", "bf16"} if module.get_device_capability(number) >= _NATIVE_BF16 else {"fp16"}
    return DeviceSpeed(module.get_device_name(number), "gpu", frozenset(native), {})


def to_device(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device, without blocking the host for copies to a GPU.

    A copy from pageable memory waits for all work queued on the GPU. A copy from pinned memory does not; PyTorch keeps
    that memory until the copy is done.
    """
    if not is_gpu(device) or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context: autocast for `bf16` or `fp16`, nothing for `fp32`."""
    if precision == "fp32":
        return nullcontext()
    if precision not in HALF_PRECISIONS:
        raise EncoderSettingError(f"precision is {precision!r}; allowed: fp32, {', '.join(HALF_PRECISIONS)}")
    return torch.autocast(device.type, HALF_PRECISIONS[precision])


class HostCopies:
    """Copies of a device's tensors in the host's memory. The host waits once for all of them, when it reads them.

    Tensors from a GPU are copied to pinned memory behind the work queued before them. A copy to pageable memory would wait
    for that work, for each tensor.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._copies: list[Tensor] = []
        self._end = gpu_module(device).Event() if is_gpu(device) else None

    def add(self, tensor: Tensor) -> None:
        """Start the copy of a tensor."""
        self._copies.append(tensor.to("cpu", non_blocking=self._end is not None))
        if self._end is not None:
            self._end.record(gpu_module(self._device).current_stream(self._device))

    def wait(self) -> list[Tensor]:
        """Wait until all copies are complete, and return them in the order in which they were added."""
        if self._end is not None and self._copies:
            self._end.synchronize()
        return self._copies


def speedup(baseline: Callable[[], object], other: Callable[[], object], rounds: int = 5) -> float:
    """Measure how many times as fast as `baseline` another function is."""
    first, second = thread_seconds([baseline, other], rounds)
    return first / second


def thread_seconds(functions: Sequence[Callable[[], object]], rounds: int = 5) -> list[float]:
    """Measure each function: the minimum of interleaved calls.

    Measures the CPU time of one thread, because wall times depend on the machine's load.
    """
    best = [float("inf")] * len(functions)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for function in functions:
            function()  # warm-up: creates oneDNN's kernel
        for _ in range(rounds):
            for number, function in enumerate(functions):
                start = time.thread_time()
                function()
                best[number] = min(best[number], time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return best


def _measured_speedup(dtype: torch.dtype) -> float:
    """Measure the speedup of matrix products in another type over fp32.

    Operands are ones: random numbers would advance the generator of the run's dropout.
    """
    screened = speedup(product(SMALL), product(SMALL, dtype), rounds=1)
    return screened if screened < _MIN_SCREENED_SPEEDUP else speedup(product(LARGE), product(LARGE, dtype))


def product(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> Callable[[], Tensor]:
    """Return a function that multiplies matrices with these rows, inputs and outputs."""
    rows, inputs, outputs = shape
    hidden, weight = torch.ones(rows, inputs, dtype=dtype), torch.ones(outputs, inputs, dtype=dtype)
    return lambda: torch.nn.functional.linear(hidden, weight)


def cpu_name() -> str:
    """Return the CPU's model name."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()


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
    """Whether training steps are recorded as CUDA graphs."""
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
    """Return the precision that `precision: auto` selects: a half precision that every device is fast at, else fp32."""
    for precision in ("fp16", "bf16"):
        if precision == "fp16" and overflows_fp16:
            continue
        if devices and all(precision in _considered(device, is_teacher) for device in devices):
            return precision
    return "fp32"


def describe_gpu_defaults() -> str:
    """Describe in one line what a GPU does by default, apart from precisions and graphs."""
    return f"widths in multiples of {GPU.width_multiple}, losses and lists in fp32 without TF32"


def _considered(device: DeviceSpeed, is_teacher: bool) -> list[str]:
    defaults = BY_KIND[device.kind]
    precisions = defaults.teacher_precisions if is_teacher else defaults.trained_precisions
    return [precision for precision in precisions if device.is_fast_at(precision)]
