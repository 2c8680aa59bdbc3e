"""This machine's constants: measured for a recipe's own passes, kept in the cache, found there by later plans."""

from __future__ import annotations

import hashlib
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
from distcse.device import cpu_name, cpu_speed
from distcse.errors import WorkFailedError
from distcse.files import write_text_atomic
from distcse.planning.machines import Factors, Machine, builtin_cpu, factor_key, sheet_of
from distcse.planning.passes import Pass
from distcse.planning.shapes import Shape, folder_of
from distcse.trainer import allocator

_FORMAT = 1
_FOLDER = "calibration"
_LONGER = 64
_SHORTER = 16
_TRUSTED = (0.1, 10.0)
"""Factors outside are noise: attention is under 1% of a pass of short sentences."""


@dataclass(frozen=True)
class Kind:
    """One kind of pass that a recipe makes."""

    shape: Shape
    training: bool
    precision: str
    dropout: bool
    max_length: int

    @property
    def key(self) -> str:
        """What its factors are kept under."""
        return factor_key(self.training, self.precision, self.dropout, self.shape.width)


def here(threads: int) -> dict[str, Any]:
    """What decides this machine's rates."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
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


def calibrate(kinds: list[Kind], cache: Path, threads: int) -> Path:
    """Measure these passes and what else a plan wants, in a process of its own; kinds measured before stay known.

    Returns:
        The file that holds the constants.

    Raises:
        RunError: The process failed, with its last line.
    """
    description = here(threads)
    device = "cuda" if description["gpu"] else "cpu"
    folder = cache / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    asked = {kind.key: kind for kind in kinds}
    first = kinds[0].shape
    request = {
        "threads": threads,
        "device": device,
        "width": first.width,
        "inner": first.inner,
        "precisions": sorted({"fp32", "bf16", *(kind.precision for kind in kinds)}),
        "folder": str(folder),
        "passes": [_asked(kind) for kind in asked.values()],
    }
    answer = _probe(request)
    file = _file(cache, description)
    earlier = _read(file) or {}
    measured = {
        key: asdict(_factors(kind, found, answer))
        for (key, kind), found in zip(asked.items(), answer["passes"], strict=True)
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


_RATES = ("process", "matmul", "bandwidth", "optimiser", "table_read", "disk", "sort", "host_matmul")


def this_machine(cache: Path, threads: int) -> Machine:
    """This machine as it was measured, with so many threads; with built-in constants where it was not."""
    description = here(threads)
    plain = builtin_cpu(threads, host.memory(), cpu_speed().speedups["bf16"])
    if description["gpu"]:
        plain = replace(_gpu_here(), host_memory=host.memory(), threads=threads)
    content = _read(_file(cache, description))
    if content is None:
        return plain
    rates = {name: content[name] for name in _RATES if name not in ("host_matmul", "sort", "table_read")}
    busy = f", while others used {content['busy']:.0%} of its time" if content["busy"] > 0.1 else ""
    return replace(
        plain,
        name=f"{description['gpu'] or description['cpu']}, {threads} thread{'s' if threads > 1 else ''}",
        told_by=f"measured here on {content['measured']}{busy}",
        factors={key: Factors(**found) for key, found in content["factors"].items()},
        host_matmul=content["host_matmul"],
        sort=content["sort"],
        table_read=content["table_read"],
        **rates,
    )


def _gpu_here() -> Machine:
    import torch

    return sheet_of(torch.cuda.get_device_name(0), float(torch.cuda.get_device_properties(0).total_memory))


def _asked(kind: Kind) -> dict[str, Any]:
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
    environment = {**os.environ, **allocator.FAST, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    done = subprocess.run(
        [sys.executable, "-m", "distcse.planning.probe"],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        env=environment,
    )
    if done.returncode:
        told = done.stderr.strip().splitlines() or ["it said nothing"]
        raise WorkFailedError(f"the measuring process ended with status {done.returncode}: {told[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def _factors(kind: Kind, found: dict[str, Any], rates: dict[str, Any]) -> Factors:
    """The factors by which the measured passes take longer than at the machine's rates.

    A pass at two lengths and one of hardly any tokens: three equations for linear maps, attention and the host.
    """
    layers = found["measured_layers"]
    rate, bandwidth = rates["matmul"][kind.precision], rates["bandwidth"]

    def parts(texts: float, length: float) -> tuple[float, float, float]:
        shape = replace(kind.shape.with_depth(layers), at_one=False)
        return Pass(shape, texts, length, kind.training, kind.precision, kind.dropout).parts(rate, bandwidth)

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
    solved = _solved(np.array(equations), np.array(taken))
    return Factors(float(solved[0]), float(solved[1]), float(embedding), float(solved[2]))


def _solved(equations: Any, taken: Any) -> Any:
    """Non-negative (linear, attention, host); one factor for both where noise drowns attention's share."""
    from scipy.optimize import nnls

    weights = 1 / taken  # as exact for the tiny pass as for the others
    solved, _ = nnls(equations * weights[:, None], taken * weights)
    if _TRUSTED[0] <= solved[1] <= _TRUSTED[1]:
        return solved
    together = np.stack([equations[:, 0] + equations[:, 1], equations[:, 2]], axis=1)
    both, _ = nnls(together * weights[:, None], taken * weights)
    return np.array([both[0], both[0], both[1]])


def _file(cache: Path, description: dict[str, Any]) -> Path:
    key = hashlib.blake2b(json.dumps([_FORMAT, description]).encode(), digest_size=8).hexdigest()
    return cache / _FOLDER / f"{key}.json"


def _read(file: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):  # none, or half of one: measured again
        return None
    return content if content.get("format") == _FORMAT else None
