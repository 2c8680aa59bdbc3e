"""Reports on disk, and what moved between two of them."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.protocol.figures import Figure
from distcse.storage import write_text_atomic


@dataclass(frozen=True)
class Report:
    """What one script found.

    Attributes:
        group: The script.
        machine: Where.
        settings: How long it looked.
        figures: What it found.
        trial: A run that only shows that the code works: none of its figures counts.
        not_run: Rows or parts that it could not measure here, each with the reason.
    """

    group: str
    machine: dict[str, Any]
    settings: dict[str, Any]
    figures: list[Figure]
    trial: bool = False
    not_run: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Folder of the machine's reports."""
        name = self.machine.get("gpu") or " ".join([self.machine["cpu"], *self.machine.get("kernels", [])])
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")

    def write(self, folder: Path) -> Path:
        """`<machine>/<group>.json` in a folder."""
        file = folder / self.place / f"{self.group}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")
        return file

    @classmethod
    def read(cls, file: Path) -> Report:
        """What `write` wrote."""
        content = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{**content, "figures": [Figure(**figure) for figure in content["figures"]]})


def read_reports(folder: Path) -> list[Report]:
    """Of all machines, one machine's after the other's."""
    return [Report.read(file) for file in sorted(folder.glob("*/*.json"))]


def machine() -> dict[str, Any]:
    """What ratios depend on, of work on the CPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = _of_each(lines, "model name")
    # Lent machines have one name for several generations, whose kernels run at twice one another's rates.
    generation = [
        f"{key.removeprefix('cpu ')} {_of_each(lines, key)[0]}"
        for key in ("cpu family", "model")
        if _of_each(lines, key)
    ]
    kernels = {"AMX": "_is_amx_tile_supported", "AVX-512 bf16": "_is_avx512_bf16_supported"}
    # PyTorch's kernels can be held to an older instruction set than the CPU's (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA).
    older = torch.backends.cpu.get_cpu_capability() == "AVX2"
    return {
        "cpu": f"{names[0]}, {' '.join(generation)}" if names else platform.machine(),
        "cores": len(names),
        "kernels": ["AVX2 kernels"]
        if older
        else [name for name, asked in kernels.items() if getattr(torch.cpu, asked, lambda: False)()],
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _of_each(lines: Sequence[str], key: str) -> list[str]:
    """What /proc/cpuinfo says of each processor."""
    parted = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in parted if name.strip() == key]


def moved(new: Iterable[Figure], stored: Iterable[Figure]) -> list[str]:
    """A line for every figure whose change is larger than the spread of both, for every changed count, and for what is gone."""
    before, now = {figure.key: figure for figure in stored}, {figure.key: figure for figure in new}
    lines = []
    for key, figure in now.items():
        old = before.get(key)
        if old is None:
            continue
        low, high = figure.ends
        old_low, old_high = old.ends
        apart = figure.value != old.value if figure.exact else low > old_high or high < old_low
        if apart:
            lines.append(f"{_name(key)}: {_told(old)} -> {_told(figure)}")
    return [*lines, *(f"{_name(key)}: {_told(before[key])} -> not measured" for key in before if key not in now)]


def _name(key: tuple[int, str, str]) -> str:
    row, part, setting = key
    return f"row {row}, {part}" + (f" ({setting})" if setting else "")


def _told(figure: Figure) -> str:
    if figure.exact:
        return f"{figure.value:g}"
    low, high = figure.ends
    return f"{figure.value:.4g} [{low:.4g}, {high:.4g}]"
