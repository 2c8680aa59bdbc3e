"""What machines can do: rates of GPUs by their data sheets, of this machine as measured, and clusters of either."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distcse.errors import CommandLineError

GIB = 2**30
NOT_MEASURED = "from the data sheet, not measured"

# Shares of a data sheet's figure that a plan counts on: assumptions, stated in every plan. PyTorch's eager mode reaches
# neither peak; large matrix products on one H200 reached 0.78 to 0.81 of its sheet, small ones reach less.
MATMUL_SHARE = 0.6
BANDWIDTH_SHARE = 0.8
GPU_LAYER_HOST = 8e-4
"""Seconds in which a host issues one layer's training step: 8,670 operator calls of a twelve-layer step, at about 1.1 µs each."""
FORWARD_HOST_SHARE = 0.3
"""Of a training step's calls those of a forward pass without gradient."""


@dataclass(frozen=True)
class Factors:
    """How much longer a pass takes than its arithmetic and traffic at the machine's rates: 1 would be exact."""

    linear: float
    """Of the layers' matrices and what goes element by element with them."""
    attention: float
    """Of attention's products and what goes with them, which grow with the length."""
    embedding: float
    """Of the embeddings."""
    host: float
    """Seconds in which the host issues one layer, whatever goes through it."""


@dataclass(frozen=True)
class Machine:
    """One worker's device, with the host that feeds it."""

    name: str
    kind: str
    """`gpu` or `cpu`."""
    matmul: Mapping[str, float]
    """FLOP/s of matrix products, by precision."""
    bandwidth: float
    """Bytes a second to and from its memory."""
    memory: float
    """Bytes on the device."""
    link: float
    """Bytes a second to another device of its node, one way."""
    layer_host: float
    """Seconds in which the host issues one layer's training step."""
    told_by: str
    """Where these come from."""
    host_memory: float = 128 * GIB
    """Bytes of the host for each worker."""
    host_matmul: float = 1.4e11
    """FLOP/s of the host's thread that serves lists."""
    table_read: float = 8e8
    """Bytes a second at which rows of a table are gathered, widened and normalised."""
    sort: float = 7e7
    """Numbers a second that one thread ranks."""
    optimiser: float = 0.0
    """Bytes a second of AdamW and clipping; 0 takes `bandwidth`."""
    tokenise: float = 12_000.0
    """Sentences a second that one thread tokenises."""
    disk: float = 2e8
    """Bytes a second written and flushed."""
    process: float = 0.45 * GIB
    """Memory of a process that has imported everything and holds nothing."""
    activation_share: float = 1.0
    """Memory of a training step beyond weights and moments, over that of the activations counted."""
    factors: Mapping[str, Factors] = field(default_factory=dict)
    """By `factor_key`, where passes were measured."""
    threads: int = 1

    def rate(self, precision: str) -> float:
        """FLOP/s in a precision; fp16 is as fast as bf16, and either as fp32 where the device has no units for it."""
        return self.matmul.get(precision) or self.matmul.get(
            "bf16" if precision == "fp16" else "fp32", self.matmul["fp32"]
        )

    def factors_of(self, training: bool, precision: str, dropout: bool, width: int) -> tuple[Factors, bool]:
        """Factors of a pass, and whether they were measured for this width: else for another, or none at all."""
        key = factor_key(training, precision, dropout, width)
        if key in self.factors:
            return self.factors[key], True
        kind = key.rsplit("/", 1)[0]
        alike = {
            int(other.rsplit("/", 1)[1]): found for other, found in self.factors.items() if other.startswith(f"{kind}/")
        }
        if alike:
            return alike[min(alike, key=lambda other: abs(other - width))], False
        return Factors(1.0, 1.0, 1.0, self.layer_host * (1.0 if training else FORWARD_HOST_SHARE)), False


def factor_key(training: bool, precision: str, dropout: bool, width: int) -> str:
    """What passes of one kind are called: `train/fp32/dropout/384`."""
    return "/".join(["train" if training else "forward", precision, "dropout" if dropout else "plain", str(width)])


def _gpu(name: str, fp32: float, bf16: float, bandwidth: float, memory: int, link: float) -> Machine:
    """TFLOP/s (dense, no sparsity), GB/s, GiB, GB/s one way -> what a plan counts on."""
    matmul = {"fp32": fp32 * 1e12 * MATMUL_SHARE}
    if bf16:
        matmul["bf16"] = bf16 * 1e12 * MATMUL_SHARE
    told = f"{NOT_MEASURED}; counted on: {MATMUL_SHARE:g} of its FLOP/s, {BANDWIDTH_SHARE:g} of its GB/s"
    return Machine(
        name,
        "gpu",
        matmul,
        bandwidth * 1e9 * BANDWIDTH_SHARE,
        memory * GIB,
        link * 1e9 * BANDWIDTH_SHARE,
        GPU_LAYER_HOST,
        told,
    )


GPUS = {
    machine.name: machine
    for machine in (
        # NVIDIA's data sheets, dense figures: FP32 (PyTorch's default for fp32 is no TF32), BF16 tensor cores, memory
        # bandwidth, and half of the two-way NVLink figure, or of PCIe's.
        _gpu("A100-40G", 19.5, 312, 1555, 40, 300),  # A100 data sheet (SXM4)
        _gpu("A100-80G", 19.5, 312, 2039, 80, 300),  # A100 data sheet (SXM4)
        _gpu("H100-80G", 66.9, 989.4, 3350, 80, 450),  # H100 data sheet (SXM5)
        _gpu("H200-141G", 66.9, 989.4, 4800, 141, 450),  # H200 data sheet (SXM5)
        _gpu("L40S-48G", 91.6, 362, 864, 48, 32),  # L40S data sheet; PCIe 4
        _gpu("L4-24G", 30.3, 121, 300, 24, 32),  # L4 data sheet; PCIe 4
        _gpu("A10-24G", 31.2, 125, 600, 24, 32),  # A10 data sheet; PCIe 4
        _gpu("V100-32G", 15.7, 0, 900, 32, 150),  # V100 data sheet (SXM2); no bf16 units
        _gpu("T4-16G", 8.1, 0, 320, 16, 16),  # T4 data sheet; PCIe 3, no bf16 units
    )
}

# Measured by `--calibrate` on an AMD EPYC (family 26, AVX-512 with bf16), one thread, PyTorch 2.13, while others used the
# machine: what a CPU that was never measured is taken for, and the host of a GPU.
_CPU_MATMUL = {"fp32": 9.5e10, "bf16": 4.1e11}
_CPU_BANDWIDTH = 3.5e10
_CPU_LAYER_HOST = 2e-3


def sheet_of(name: str, memory: float) -> Machine:
    """The data sheet of a GPU that calls itself so; the smallest known one's where there is none, which is said."""
    known = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in re.split(r"[\s-]+", name)]
    if known:
        return replace(min(known, key=lambda gpu: abs(gpu.memory - memory)), memory=memory)
    told = f"no data sheet of {name} is known, L4's stands for it: run with --calibrate"
    return replace(GPUS["L4-24G"], name=name, memory=memory, told_by=told)


def builtin_cpu(threads: int, memory: float, bf16_speedup: float | None = None) -> Machine:
    """A CPU that nobody measured.

    Args:
        threads: Of a worker.
        memory: Bytes.
        bf16_speedup: What bf16 products gain over fp32 ones on it; None takes what the constants' CPU gained.
    """
    matmul = dict(_CPU_MATMUL)
    if bf16_speedup is not None:
        matmul["bf16"] = bf16_speedup * matmul["fp32"]
    return Machine(
        name=f"cpu, {threads} thread{'s' if threads > 1 else ''}",
        kind="cpu",
        matmul={precision: rate * threads for precision, rate in matmul.items()},
        bandwidth=_CPU_BANDWIDTH * min(threads, 2),
        memory=memory,
        link=2e9,
        layer_host=_CPU_LAYER_HOST,
        told_by="built-in constants of another CPU, not of this one: run with --calibrate on the machine itself",
        host_memory=memory,
        threads=threads,
    )


@dataclass(frozen=True)
class Cluster:
    """Nodes of like devices."""

    told: str
    """As the user wrote it."""
    nodes: int
    per_node: int
    """Devices of a node: GPUs, or places for a CPU worker."""
    machine: Machine
    network: float
    """Bytes a second in and out of a node, one way."""

    @property
    def devices(self) -> int:
        """Of all nodes."""
        return self.nodes * self.per_node


_FORM = re.compile(r"^(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][A-Za-z0-9-]*)$")


def parse_cluster(text: str) -> tuple[int, int, str]:
    """`2x8xH100-80G`: (2 nodes, 8 devices each, H100-80G); `8xL4-24G`: one node; `3xcpu`: three machines like this; `local`.

    Raises:
        RecipeError: Another form, an unknown GPU, or one that comes with several memories.
    """
    found = _FORM.match(text)
    if found is None:
        raise CommandLineError(
            f"--cluster {text!r} is not of the form 8xA100-40G, 2x8xH100-80G (nodes x GPUs), 2xcpu or local"
        )
    first, second, name = found.groups()
    counts = [int(count) for count in (first, second) if count is not None]
    if 0 in counts:
        raise CommandLineError(f"--cluster {text!r} has 0 machines; write at least 1")
    if name == "local":
        if counts:
            raise CommandLineError(
                f"--cluster {text!r}: local is this machine, once; write {counts[0]}xcpu for more like it"
            )
        return 1, 1, name
    if name == "cpu":
        return counts[0] if counts else 1, counts[1] if len(counts) > 1 else 1, name
    known = [gpu for gpu in GPUS if gpu.lower() == name.lower()] or [
        gpu for gpu in GPUS if gpu.lower().startswith(f"{name.lower()}-")
    ]
    if len(known) != 1:
        raise CommandLineError(
            f"--cluster: {name} is {'one of' if known else 'unknown; known are'} {', '.join(known or GPUS)}, cpu and local"
        )
    nodes, per_node = (counts[0], counts[1]) if len(counts) > 1 else (1, counts[0] if counts else 1)
    return nodes, per_node, known[0]
