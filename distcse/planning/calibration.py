"""Measures this machine's rates and a recipe's passes, in a separate process like a worker's, and caches them.

`python -m distcse.planning.calibration` is that process: it reads a JSON request and writes a JSON answer.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from distcse import host
from distcse.device import cpu_name, cpu_speed, default_device, gpu_module, has_gpu, is_gpu, local_speed
from distcse.errors import WorkFailedError
from distcse.models.loading import LONG_TEXT
from distcse.planning.machines import Factors, Machine, builtin_cpu, factor_key, find_data_sheet
from distcse.planning.passes import Pass
from distcse.planning.shapes import Shape
from distcse.storage import bytes_checksum, write_text_atomic
from distcse.trainer import allocator

_FORMAT = 3
_RATES = ("process", "matmul", "bandwidth", "optimizer")
_BUDGET = 1024
"""Tokens of a measured pass."""
_DEEPEST = 4
"""Most layers to measure of a backbone; all of its layers are equal."""
_SECONDS = 0.5
"""Least time for each measurement."""


@dataclass(frozen=True)
class PassKind:
    """A kind of forward or training pass that a recipe makes."""

    shape: Shape
    training: bool
    precision: str
    dropout: bool
    max_length: int

    @property
    def key(self) -> str:
        """The key of its factors in the calibration file."""
        return factor_key(self.training, self.precision, self.dropout, self.shape.width)

    @property
    def sizes(self) -> list[tuple[int, int, int]]:
        """(layers, texts, length) of the measured passes: of several layers, of one, and with hardly any tokens."""
        layers, length = min(self.shape.layers, _DEEPEST), max(16, self.max_length)
        return [(layers, _BUDGET // length or 1, length), (1, _BUDGET // length or 1, length), (layers, 1, 4)]

    def passed(self, layers: int, texts: int, length: int, device: str) -> Pass:
        """Return the pass of this kind over N texts, through its first layers."""
        shape = replace(self.shape, layers=layers, max_length=self.max_length)
        return Pass(shape, texts, length, self.training, self.precision, self.dropout, device)


def describe_machine(threads: int) -> dict[str, Any]:
    """Return what determines this machine's rates: hardware, threads and library versions."""
    return {
        "cpu": cpu_name(),
        "cpus": host.cpus(),
        "memory": host.memory(),
        "gpu": local_speed().name if has_gpu() else None,
        "threads": threads,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def calibrate(kinds: list[PassKind], cache: Path, threads: int) -> Path:
    """Measure the given kinds of passes and this machine's rates in a separate process.

    Factors of other kinds that were measured before stay in the file.

    Args:
        kinds: Passes to measure; not empty. The first one's shape sets the sizes for the rates.
        cache: The recipe's cache folder.
        threads: Threads of one worker.

    Returns:
        The file with the rates and factors.

    Raises:
        WorkFailedError: The measuring process failed; the message ends with its last line.
    """
    description, by_key = describe_machine(threads), {kind.key: kind for kind in kinds}
    count = str(threads)
    done = subprocess.run(
        [sys.executable, "-m", "distcse.planning.calibration"],
        input=_requests().dump_json((list(by_key.values()), threads, str(default_device()))),
        capture_output=True,
        env={**os.environ, **allocator.MALLOC_ENV, "OMP_NUM_THREADS": count, "OPENBLAS_NUM_THREADS": count},
    )
    if done.returncode:
        lines = done.stderr.decode().strip().splitlines() or ["it printed nothing"]
        raise WorkFailedError(f"the measuring process ended with status {done.returncode}: {lines[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    device = "gpu" if description["gpu"] else "cpu"
    measured = {
        key: asdict(fit_factors(kind, seconds, answer, device))
        for (key, kind), seconds in zip(by_key.items(), answer["passes"], strict=True)
    }
    file = calibration_file(cache, description)
    content = {
        "format": _FORMAT,
        "machine": description,
        "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
        **{name: answer[name] for name in _RATES},
        "busy": answer["busy"],
        "factors": {**(_read(file) or {}).get("factors", {}), **measured},
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(file, json.dumps(content, indent=2))
    return file


def this_machine(cache: Path, threads: int) -> Machine:
    """Return this machine with `threads` threads: with its measured rates, or with built-in ones if it was never calibrated."""
    description = describe_machine(threads)
    found = builtin_cpu(threads, host.memory(), cpu_speed().speedups["bf16"])
    if description["gpu"]:
        _, total = gpu_module(default_device()).mem_get_info()
        found = replace(find_data_sheet(description["gpu"], float(total)), host_memory=host.memory())
    content = _read(calibration_file(cache, description))
    if content is None:
        return found
    busy = f", while others used {content['busy']:.0%} of its time" if content["busy"] > 0.1 else ""
    return replace(
        found,
        name=f"{description['gpu'] or description['cpu']}, {threads} thread{'s' if threads > 1 else ''}",
        source=f"measured here on {content['measured']}{busy}",
        factors={key: Factors(**factors) for key, factors in content["factors"].items()},
        **{name: content[name] for name in _RATES},
    )


def fit_factors(kind: PassKind, seconds: list[float], rates: dict[str, Any], device: str) -> Factors:
    """Fit the factors by which the measured passes take longer than the machine's rates predict.

    Non-negative least squares of relative errors, so that the smallest pass counts as much as the others.

    Args:
        kind: The kind of pass.
        seconds: Of the passes of `kind.sizes`.
        rates: `matmul` by precision, and `bandwidth`.
        device: `cpu` or `gpu`.
    """
    from scipy.optimize import nnls

    passes = [(kind.passed(*size, device), size[0]) for size in kind.sizes]
    rate, bandwidth = rates["matmul"][kind.precision], rates["bandwidth"]
    predicted = np.array([[*work.parts(rate, bandwidth), layers] for work, layers in passes])
    return Factors(*map(float, nnls(predicted / np.array(seconds)[:, None], np.ones(3))[0]))


def anonymous_bytes() -> int:
    """Return this process's resident memory without mapped files, whose pages the kernel can drop at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


class _Clock:
    """Times a function: the median of several calls.

    One CPU thread is timed by its CPU time, which other load on the machine hardly changes; threads and GPUs by wall time.
    """

    def __init__(self, device: str, threads: int) -> None:
        self.device, self._by_cpu = device, not is_gpu(device) and threads == 1
        self._cpu = self._wall = 0.0

    @property
    def busy(self) -> float:
        """Fraction of the time in which other processes used this one's CPU; 0 if timed by wall time."""
        return max(0.0, 1.0 - self._cpu / self._wall) if self._wall and self._by_cpu else 0.0

    def __call__(self, work: Callable[[], Any]) -> float:
        times: list[float] = []
        began = 0.0
        while len(times) < 4 or time.perf_counter() - began < _SECONDS:
            cpu, wall = time.process_time(), time.perf_counter()
            began = began or wall
            work()
            if is_gpu(self.device):
                gpu_module(self.device).synchronize()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            self._cpu, self._wall = self._cpu + cpu, self._wall + wall
            times.append(cpu if self._by_cpu else wall)
        return statistics.median(times[1:])


def _requests() -> TypeAdapter[tuple[list[PassKind], int, str]]:
    """Return the reader and writer of `_measure`'s arguments."""
    return TypeAdapter(tuple[list[PassKind], int, str])


def _measure(kinds: list[PassKind], threads: int, device: str) -> dict[str, Any]:
    import torch

    import distcse.experiments.distillation.experiment  # noqa: F401  (as in a training process)

    torch.set_num_threads(threads)
    timed, first = _Clock(device, threads), kinds[0].shape
    process, matmul, dtypes = (
        anonymous_bytes(),
        {},
        {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16},
    )
    for precision in sorted({"fp32", "bf16", *(kind.precision for kind in kinds)}):
        rows = torch.randn(_BUDGET, first.width, device=device).to(dtypes[precision])
        weight = torch.randn(first.width, first.inner, device=device).to(dtypes[precision])
        seconds = timed(partial(torch.matmul, rows, weight))
        matmul[precision] = 2.0 * _BUDGET * first.width * first.inner / seconds
    numbers = torch.ones(32 * 2**20, device=device)
    other = torch.empty_like(numbers)
    bandwidth = 2 * numbers.nbytes / timed(lambda: other.copy_(numbers))
    parameter = torch.nn.Parameter(numbers[: 2**24])
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        optimizer.step()

    moved = 40.0 * parameter.numel() / timed(update)
    passes = [[timed(_pass(kind, *size, device, dtypes)) for size in kind.sizes] for kind in kinds]
    rates = {"process": process, "matmul": matmul, "bandwidth": bandwidth, "optimizer": moved}
    return {**rates, "passes": passes, "busy": timed.busy}


def _pass(kind: PassKind, layers: int, texts: int, length: int, device: str, dtypes: Any) -> Callable[[], None]:
    import torch

    from distcse.models.loading import set_shortcuts

    attention = "eager" if not is_gpu(device) and kind.max_length < LONG_TEXT else "sdpa"
    blueprint = kind.shape.blueprint
    encoder = blueprint.build(range(layers), attention=attention, dropout=0.1 * kind.dropout).to(device)
    encoder.backbone.pooler = None  # type: ignore[assignment]
    set_shortcuts(encoder.backbone, blueprint.is_fast)
    encoder.train(kind.training)
    ids = torch.randint(1, kind.shape.vocabulary, (texts, length), device=device)
    mask, dtype = torch.ones_like(ids), dtypes[kind.precision]

    def run() -> None:
        with torch.set_grad_enabled(kind.training):
            half = torch.autocast(torch.device(device).type, dtype)
            with half if dtype != torch.float32 else nullcontext():
                vectors = encoder(ids, mask)
            if kind.training:
                vectors.mean().backward()
                encoder.zero_grad(set_to_none=True)

    return run


def calibration_file(cache: Path, description: dict[str, Any]) -> Path:
    """Return the file of a machine's calibration; `description` is that of `describe_machine`."""
    key = bytes_checksum(json.dumps([_FORMAT, description]).encode(), size_bytes=8)
    return cache / "calibration" / f"{key}.json"


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):  # missing or truncated: measure again
        return None
    return content if content.get("format") == _FORMAT else None


if __name__ == "__main__":
    json.dump(_measure(*_requests().validate_json(sys.stdin.buffer.read())), sys.stdout)
