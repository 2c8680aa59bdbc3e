"""Rates and memory of GPUs, from their data sheets, and of this machine's CPU; clusters of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from distcse.devices import host
from distcse.errors import ArgumentError

NETWORK = 100e9 / 8
"""Bytes per second in and out of a node: 100 Gbit."""
_MATMUL_SHARE, _BANDWIDTH_SHARE, _LINK_SHARE = 0.6, 0.5, 0.8
"""Fractions of the data sheet's rates that an H100 reached in steps of BERT-base; that of links is assumed."""


@dataclass(frozen=True)
class Machine:
    """One worker's device and its share of the host."""

    name: str
    kind: str
    """`gpu` or `cpu`."""
    matmul: Mapping[str, float]
    """FLOP/s of matrix products, by precision."""
    bandwidth: float
    """Bytes per second to and from its memory."""
    memory: float
    """Bytes on the device."""
    link: float
    """Bytes per second to another device of its node, one way."""

    @property
    def source(self) -> str:
        """Where the rates come from, for the plan's assumptions."""
        sheet = (
            f"the data sheet, {_MATMUL_SHARE:g} of its FLOP/s and {_BANDWIDTH_SHARE:g} of its GB/s, as an H100 reached"
        )
        return sheet if self.kind == "gpu" else "matrix products timed here for some milliseconds"

    def rate(self, precision: str) -> float:
        """Return the FLOP/s in a precision; fp16 counts as bf16, and a precision without hardware units as fp32."""
        return self.matmul.get("bf16" if precision == "fp16" else precision) or self.matmul["fp32"]


def _gpu(name: str, fp32: float, bf16: float, bandwidth: float, memory: int, link: float) -> Machine:
    """Return a GPU's assumed rates from its data sheet: dense TFLOP/s, memory GB/s, GiB, link GB/s one way."""
    matmul = {key: value * 1e12 * _MATMUL_SHARE for key, value in (("fp32", fp32), ("bf16", bf16)) if value}
    return Machine(name, "gpu", matmul, 1e9 * _BANDWIDTH_SHARE * bandwidth, memory * 2.0**30, 1e9 * _LINK_SHARE * link)


GPUS = {
    machine.name: machine
    for machine in (
        # NVIDIA's data sheets, dense figures: FP32 (PyTorch does not use TF32 by default), BF16 tensor cores, memory
        # bandwidth, and half of the two-way NVLink or PCIe bandwidth.
        _gpu("A100-40G", 19.5, 312, 1555, 40, 300),
        _gpu("A100-80G", 19.5, 312, 2039, 80, 300),
        _gpu("H100-80G", 66.9, 989.4, 3350, 80, 450),
        _gpu("H200-141G", 66.9, 989.4, 4800, 141, 450),
        _gpu("L40S-48G", 91.6, 362, 864, 48, 32),
        _gpu("L4-24G", 30.3, 121, 300, 24, 32),
        _gpu("A10-24G", 31.2, 125, 600, 24, 32),
        _gpu("V100-32G", 15.7, 0, 900, 32, 150),
        _gpu("T4-16G", 8.1, 0, 320, 16, 16),
    )
}


@cache
def this_machine(threads: int) -> Machine:
    """Return this machine's device for a worker of `threads` threads: its GPU, or its CPU with a rate timed on one thread."""
    # Not above: `parse_cluster` answers before PyTorch is imported.
    from distcse.devices.device import (
        LARGE,
        cpu_name,
        cpu_speed,
        default_device,
        gpu_module,
        has_gpu,
        local_speed,
        product,
        thread_seconds,
    )

    if not has_gpu():
        rate = threads * 2.0 * math.prod(LARGE) / thread_seconds([product(LARGE)])[0]
        matmul = {"fp32": rate, "bf16": rate * cpu_speed().speedups["bf16"]}
        name = f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"
        return Machine(name, "cpu", matmul, 3.5e10 * min(threads, 2), host.memory(), 2e9)
    name, (_, total) = local_speed().name, gpu_module(default_device()).mem_get_info()
    words = re.split(r"[\s-]+", name)
    known = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in words]
    nearest = min(known or [GPUS["L4-24G"]], key=lambda gpu: abs(gpu.memory - total))
    called = nearest.name if known else f"{name}, planned as an L4"
    return replace(nearest, name=called, memory=float(total))


@dataclass(frozen=True)
class PlannedCluster:
    """Nodes with equal devices."""

    spec: str
    """The value of `--cluster`."""
    nodes: int
    per_node: int
    """Devices per node: GPUs, or CPU workers."""
    machine: Machine

    @property
    def devices(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.per_node


Form = tuple[int, int, str]
"""(nodes, devices per node, kind of device), from `parse_cluster`."""
_FORM = re.compile(r"^(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][A-Za-z0-9-]*)$")


def parse_cluster(text: str) -> Form:
    """Parse the value of `--cluster` into (nodes, devices per node, kind of device).

    `2x8xH100-80G` is (2, 8, "H100-80G"), `8xL4-24G` one node, `3xcpu` three machines like this one, `local` this machine.
    """
    found = _FORM.match(text)
    if found is None:
        raise ArgumentError(
            f"--cluster {text!r} is not of the form 8xA100-40G, 2x8xH100-80G (nodes x GPUs), 2xcpu or local"
        )
    *given, name = found.groups()
    counts = [int(count) for count in given if count is not None]
    if 0 in counts:
        raise ArgumentError(f"--cluster {text!r} has 0 machines; write at least 1")
    if name == "local" and counts:
        raise ArgumentError(f"--cluster {text!r}: local is this one machine; write {counts[0]}xcpu for several like it")
    if name in ("local", "cpu"):
        nodes, per_node = (*counts, 1, 1)[:2]
        return nodes, per_node, name
    known = [gpu for gpu in GPUS if gpu.lower() == name.lower()] or [
        gpu for gpu in GPUS if gpu.lower().startswith(f"{name.lower()}-")
    ]
    if len(known) != 1:
        raise ArgumentError(
            f"--cluster: {name} is {'ambiguous' if known else 'unknown'}; write one of {', '.join(known or GPUS)}, cpu and local"
        )
    nodes, per_node = (counts[0], counts[1]) if len(counts) > 1 else (1, counts[0] if counts else 1)
    return nodes, per_node, known[0]
