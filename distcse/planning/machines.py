"""Rates and memory of machines: GPUs from their data sheets, CPUs from built-in or measured constants; clusters of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from distcse.errors import CommandLineError

GIB = 2**30
NOT_MEASURED = "from the data sheet, not measured"

# Fractions of the data sheet's peak rates, printed in every plan. With them, recorded steps of BERT-base on an H100 are forecast
# at 0.86 to 0.91 of what was measured (`benchmarks/results`, row 1; docs/how-to/plan-costs.md), and assumed for other GPUs.
# Element-wise kernels, most of which convert types or are small, reach half of the bandwidth. The share of links is assumed.
MATMUL_SHARE = 0.6
BANDWIDTH_SHARE = 0.5
LINK_SHARE = 0.8
COMPILED_TRAFFIC = 0.65
"""Memory traffic of passes through compiled layers, as a fraction of that of others: it fits steps of BERT-base on an H100."""
GPU_LAUNCH = 43e-6
"""Seconds for the host to launch one operation on a GPU from Python, autograd and autocast included: eager steps of BERT-base
took the virtual machine of an H100 41 to 53 ms."""
STEP_HOST = 0.5e-3
"""Seconds of a step for which the host is busy besides its launches: collation, mixing of lists, dropout's seeds; on a CPU.
A step that is recorded as a graph takes the host only this long."""
_FORWARD_HOST_SHARE = 0.3
"""Operator calls of a forward pass without gradient, as a fraction of a training step's."""


@dataclass(frozen=True)
class Factors:
    """Measured time of a pass over the time that the machine's rates predict; 1 is an exact prediction."""

    first: float
    """For the first layer, with embeddings and pooling."""
    further: float
    """For further layers."""
    host: float
    """Seconds for a CPU to launch one layer, whatever the batch."""


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
    source: str
    """Where the rates come from, for the plan's assumptions."""
    launch: float = 0.0
    """Seconds for the host to launch one operation on a GPU."""
    host_memory: float = 128 * GIB
    """Host memory in bytes per worker."""
    optimizer: float = 0.0
    """Bytes per second of AdamW and gradient clipping; 0 means `bandwidth`."""
    process: float = 0.45 * GIB
    """Bytes of a process after its imports."""
    factors: Mapping[str, Factors] = field(default_factory=dict)
    """By `factor_key`; empty without a calibration."""
    host_matmul: float = 1.4e11
    """FLOP/s of the host thread that serves similarity lists."""
    table_read: float = 8e8
    """Bytes per second at which rows of an embedding table are gathered, converted to fp32 and normalized."""
    sort: float = 7e7
    """Numbers per second that one thread ranks."""
    tokenise: float = 12_000.0
    """Sentences per second that one thread tokenizes."""
    disk: float = 2e8
    """Bytes per second written and synced."""

    def rate(self, precision: str) -> float:
        """Return the FLOP/s in a precision; fp16 counts as bf16, and a precision without hardware units as fp32."""
        others = {"fp16": self.matmul.get("bf16")}
        return self.matmul.get(precision) or others.get(precision) or self.matmul["fp32"]

    def factors_of(self, training: bool, precision: str, dropout: bool, width: int) -> tuple[Factors, bool]:
        """Return the factors of a pass, and whether they were measured for this width rather than the nearest one or assumed."""
        kind, _, _ = factor_key(training, precision, dropout, width).rpartition("/")
        widths = [int(key.rpartition("/")[2]) for key in self.factors if key.startswith(f"{kind}/")]
        if widths:
            nearest = min(widths, key=lambda other: abs(other - width))
            return self.factors[f"{kind}/{nearest}"], nearest == width
        return Factors(1.0, 1.0, _CPU_LAYER_HOST * (1.0 if training else _FORWARD_HOST_SHARE)), False


def factor_key(training: bool, precision: str, dropout: bool, width: int) -> str:
    """Return the key of a kind of pass: `train/fp32/dropout/384`."""
    return "/".join(["train" if training else "forward", precision, "dropout" if dropout else "plain", str(width)])


def _gpu(name: str, fp32: float, bf16: float, bandwidth: float, memory: int, link: float) -> Machine:
    """Return a GPU's assumed rates from its data sheet: dense TFLOP/s, memory GB/s, GiB, link GB/s one way."""
    matmul = {"fp32": fp32 * 1e12 * MATMUL_SHARE}
    if bf16:
        matmul["bf16"] = bf16 * 1e12 * MATMUL_SHARE
    source = (
        f"{NOT_MEASURED}; assumed, as an H100 reached: {MATMUL_SHARE:g} of its FLOP/s, {BANDWIDTH_SHARE:g} of its GB/s, "
        f"{GPU_LAUNCH * 1e6:g} µs of the host per launch"
    )
    rates = 1e9 * BANDWIDTH_SHARE * bandwidth, 1e9 * LINK_SHARE * link
    return Machine(name, "gpu", matmul, rates[0], memory * GIB, rates[1], source, GPU_LAUNCH)


GPUS = {
    machine.name: machine
    for machine in (
        # NVIDIA's data sheets, dense figures: FP32 (PyTorch does not use TF32 by default), BF16 tensor cores, memory
        # bandwidth, and half of the two-way NVLink or PCIe bandwidth.
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

# Measured by `--calibrate` on an AMD EPYC (family 26, AVX-512 with bf16), one thread, PyTorch 2.13, on a shared machine.
# Used for a CPU that was never calibrated, and for the host of a GPU.
_CPU_MATMUL = {"fp32": 9.5e10, "bf16": 4.1e11}
_CPU_BANDWIDTH = 3.5e10
_CPU_LAYER_HOST = 2e-3


def find_data_sheet(name: str, memory: float) -> Machine:
    """Return the data-sheet rates of a GPU; those of the L4 if it is unknown, which `source` states.

    Args:
        name: The GPU's name as CUDA reports it.
        memory: Bytes.
    """
    known = [gpu for gpu in GPUS.values() if gpu.name.partition("-")[0] in re.split(r"[\s-]+", name)]
    if known:
        return replace(min(known, key=lambda gpu: abs(gpu.memory - memory)), memory=memory)
    source = f"no data sheet of {name} is known, L4's is assumed: run with --calibrate"
    return replace(GPUS["L4-24G"], name=name, memory=memory, source=source)


def builtin_cpu(threads: int, memory: float, bf16_speedup: float | None = None) -> Machine:
    """Return a CPU with built-in rates, for a machine that was never calibrated.

    Args:
        threads: Threads of a worker.
        memory: Bytes.
        bf16_speedup: Speed of bf16 matrix products over fp32 ones; None takes the ratio of the CPU with the built-in rates.
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
        source="built-in constants of another CPU, not of this one: run with --calibrate on the machine itself",
        host_memory=memory,
    )


@dataclass(frozen=True)
class Cluster:
    """Nodes with equal devices."""

    spec: str
    """The value of `--cluster`."""
    nodes: int
    per_node: int
    """Devices per node: GPUs, or CPU workers."""
    machine: Machine
    network: float
    """Bytes per second in and out of a node, one way."""

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

    Raises:
        CommandLineError: The form is wrong, or the GPU is unknown or comes with several memory sizes.
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
                f"--cluster {text!r}: local is this one machine; write {counts[0]}xcpu for several like it"
            )
        return 1, 1, name
    if name == "cpu":
        return counts[0] if counts else 1, counts[1] if len(counts) > 1 else 1, name
    known = [gpu for gpu in GPUS if gpu.lower() == name.lower()] or [
        gpu for gpu in GPUS if gpu.lower().startswith(f"{name.lower()}-")
    ]
    if len(known) != 1:
        raise CommandLineError(
            f"--cluster: {name} is {'ambiguous' if known else 'unknown'}; write one of {', '.join(known or GPUS)}, cpu and local"
        )
    nodes, per_node = (counts[0], counts[1]) if len(counts) > 1 else (1, counts[0] if counts else 1)
    return nodes, per_node, known[0]
