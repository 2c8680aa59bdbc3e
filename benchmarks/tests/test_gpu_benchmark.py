"""The GPU benchmark: it runs to its end on the simulated GPU, imports only what a bare GPU image has, and keeps its figures."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.protocol import Figure, Report, counted, machine
from tests.conftest import ROOT

_WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(["ray", "deepspeed", "datasets", "pyarrow"]))
import benchmarks.gpu
"""


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_it_measures_all_its_rows_on_a_simulated_gpu() -> None:
    python("-c", _WITHOUT)
    shown = python("-m", "benchmarks.gpu", "--device", "sim", "--tiny", "--budget", "3600")
    rows = {int(line.split()[1]) for line in shown.splitlines() if line.startswith("  row ")}
    assert rows >= {1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 23, 31, 33}


def test_figures_are_kept_when_it_is_interrupted_and_replaced_when_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine with a GPU may be taken back at any moment. Chosen rows replace theirs in a report of the same settings."""
    values = iter(range(1, 6))
    interrupted = True

    def part(row: int, name: str) -> Callable[[gpu.Bench], Iterator[Figure]]:
        def measure(bench: gpu.Bench) -> Iterator[Figure]:
            yield counted(row, name, next(values), "here")
            if interrupted and row == 14:
                raise KeyboardInterrupt

        return measure

    monkeypatch.setattr(gpu, "PARTS", {(15,): part(15, "fused step, BERT-base"), (14,): part(14, "N = 128")})

    def measured(rows: list[int] | None) -> Report:
        gpu.measure("cpu", Namespace(tiny=False, call_by_call=False, rows=rows, budget=60.0, out=tmp_path))
        return stored()

    def stored() -> Report:
        (file,) = tmp_path.rglob("gpu.json")
        return Report.read(file)

    def figures(report: Report) -> dict[int, float]:
        return {figure.row: figure.value for figure in report.figures}

    with pytest.raises(KeyboardInterrupt):
        measured(None)
    assert figures(stored()) == {15: 1, 14: 2}
    assert stored().not_run["row 14, N = 1024"] == "not run" and "row 14, N = 128" not in stored().not_run
    interrupted = False
    assert figures(measured([14])) == {15: 1, 14: 3}
    here = machine()
    monkeypatch.setattr(gpu, "machine", lambda: {**here, "torch": "another version"})
    assert figures(measured([14])) == {14: 4}
