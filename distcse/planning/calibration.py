"""Measures this machine's rates for a recipe's passes and caches them for later plans."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from distcse import host
from distcse.device import cpu_name, cpu_speed, default_device, gpu_module, has_gpu, local_speed
from distcse.errors import WorkFailedError
from distcse.planning.machines import Factors, Machine, builtin_cpu, factor_key, find_data_sheet
from distcse.planning.passes import Pass
from distcse.planning.shapes import Shape, folder_of
from distcse.storage import bytes_checksum, write_text_atomic
from distcse.trainer import allocator

_FORMAT = 2
_FOLDER = "calibration"
_LONGER = 64
_SHORTER = 16
_TRUSTED = (0.1, 10.0)
"""An attention factor outside this range is measurement noise: attention is under 1 % of a pass of short sentences."""


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


def describe_machine(threads: int) -> dict[str, Any]:
    """Return what determines this machine's rates: hardware, threads and library versions."""
    gpu = local_speed().name if has_gpu() else None
    return {
        "cpu": cpu_name(),
        "cpus": host.cpus(),
        "memory": host.memory(),
        "gpu": gpu,
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
    description = describe_machine(threads)
    device = default_device()
    folder = cache / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    by_key = {kind.key: kind for kind in kinds}
    first = kinds[0].shape
    request = {
        "threads": threads,
        "device": device,
        "width": first.width,
        "inner": first.inner,
        "precisions": sorted({"fp32", "bf16", *(kind.precision for kind in kinds)}),
        "folder": str(folder),
        "passes": [_pass_request(kind) for kind in by_key.values()],
    }
    answer = {**_probe(request), "kind": "gpu" if description["gpu"] else "cpu"}
    file = _calibration_file(cache, description)
    earlier = _read(file) or {}
    measured = {
        key: asdict(_fit_factors(kind, found, answer))
        for (key, kind), found in zip(by_key.items(), answer["passes"], strict=True)
    }
    content = {
        "format": _FORMAT,
        "machine": description,
        "measured": time.strftime("%Y-%m-%d %H:%M:%S"),
        **{name: answer[name] for name in _RATES},
        "device": device,
        "busy": answer["busy"],
        "factors": {**earlier.get("factors", {}), **measured},
    }
    write_text_atomic(file, json.dumps(content, indent=2))
    return file


_RATES = ("process", "matmul", "bandwidth", "optimizer", "table_read", "disk", "sort", "host_matmul")


def this_machine(cache: Path, threads: int) -> Machine:
    """Return this machine with `threads` threads: with its measured rates, or with built-in ones if it was never calibrated."""
    description = describe_machine(threads)
    uncalibrated = builtin_cpu(threads, host.memory(), cpu_speed().speedups["bf16"])
    if description["gpu"]:
        uncalibrated = replace(_local_gpu(), host_memory=host.memory(), threads=threads)
    content = _read(_calibration_file(cache, description))
    if content is None:
        return uncalibrated
    rates = {name: content[name] for name in _RATES if name not in ("host_matmul", "sort", "table_read")}
    busy = f", while others used {content['busy']:.0%} of its time" if content["busy"] > 0.1 else ""
    return replace(
        uncalibrated,
        name=f"{description['gpu'] or description['cpu']}, {threads} thread{'s' if threads > 1 else ''}",
        source=f"measured here on {content['measured']}{busy}",
        factors={key: Factors(**found) for key, found in content["factors"].items()},
        host_matmul=content["host_matmul"],
        sort=content["sort"],
        table_read=content["table_read"],
        **rates,
    )


def _local_gpu() -> Machine:
    _, total = gpu_module(default_device()).mem_get_info()
    return find_data_sheet(local_speed().name, float(total))


def _pass_request(kind: PassKind) -> dict[str, Any]:
    positions = 512
    longer = min(positions, max(_LONGER, kind.max_length))
    folder = folder_of(kind.shape.name)
    return {
        "folder": str(folder) if folder else None,
        "config": {
            "model_type": "bert",
            "hidden_size": kind.shape.width,
            "intermediate_size": kind.shape.inner,
            "num_attention_heads": kind.shape.heads,
            "num_hidden_layers": kind.shape.layers,
            "vocab_size": kind.shape.vocabulary,
        },
        "layers": kind.shape.layers,
        "training": kind.training,
        "precision": kind.precision,
        "dropout": kind.dropout,
        "lengths": [_SHORTER, longer],
        "max_length": kind.max_length,
    }


def _probe(request: dict[str, Any]) -> dict[str, Any]:
    threads = str(request["threads"])
    environment = {**os.environ, **allocator.MALLOC_ENV, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    done = subprocess.run(
        [sys.executable, "-m", "distcse.planning.probe"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise WorkFailedError(f"the measuring process ended with status {done.returncode}: {lines[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _fit_factors(kind: PassKind, found: dict[str, Any], rates: dict[str, Any]) -> Factors:
    """Fit the factors by which the measured passes take longer than the machine's rates predict.

    Passes at two lengths and one of 4 tokens give three equations for three unknowns: linear maps, attention, host.
    """
    layers = found["measured_layers"]
    rate, bandwidth, device = rates["matmul"][kind.precision], rates["bandwidth"], rates["kind"]

    def parts(texts: float, length: float) -> tuple[float, float, float]:
        shape = replace(kind.shape.with_depth(layers), single_token=False)
        return Pass(shape, texts, length, kind.training, kind.precision, kind.dropout).parts(rate, bandwidth, device)

    texts, length, seconds = found["embedding"]
    embedding = seconds / parts(texts, length)[2]
    equations, taken = [], []
    for texts, length, seconds in found["times"]:
        linear, attention, embedded = parts(texts, length)
        equations.append([linear, attention, layers])
        taken.append(seconds - embedding * embedded)
    linear, attention, _ = parts(1, 4)
    equations.append([linear, attention, layers])
    taken.append(found["tiny"])
    solved = _solve(np.array(equations), np.array(taken))
    return Factors(float(solved[0]), float(solved[1]), float(embedding), float(solved[2]))


def _solve(equations: Any, taken: Any) -> Any:
    """Solve for non-negative (linear, attention, host); linear and attention share a factor if attention's is only noise."""
    from scipy.optimize import nnls

    weights = 1 / taken  # relative errors, so that the tiny pass counts as much as the others
    solved, _ = nnls(equations * weights[:, None], taken * weights)
    if _TRUSTED[0] <= solved[1] <= _TRUSTED[1]:
        return solved
    joint_equations = np.stack([equations[:, 0] + equations[:, 1], equations[:, 2]], axis=1)
    joint, _ = nnls(joint_equations * weights[:, None], taken * weights)
    return np.array([joint[0], joint[0], joint[1]])


def _calibration_file(cache: Path, description: dict[str, Any]) -> Path:
    key = bytes_checksum(json.dumps([_FORMAT, description]).encode(), size_bytes=8)
    return cache / _FOLDER / f"{key}.json"


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):  # missing or truncated: measure again
        return None
    return content if content.get("format") == _FORMAT else None
