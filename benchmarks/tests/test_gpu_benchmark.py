"""The GPU benchmark runs to its end on the simulated GPU, and imports only what a bare GPU image has."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu
from benchmarks.protocol import Figure, Report, counted, machine
from distcse.events import StepReport

ROOT = Path(__file__).parents[2]
_WITHOUT = """
import importlib.abc, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"ray", "deepspeed", "datasets", "pyarrow"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import benchmarks.gpu
"""


@pytest.mark.slow
def test_it_imports_neither_ray_nor_deepspeed_datasets_or_pyarrow() -> None:
    done = subprocess.run([sys.executable, "-c", _WITHOUT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_it_measures_all_its_rows_on_a_simulated_gpu() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "sim", "--tiny", "--budget", "3600"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = {int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("  row ")}
    assert rows >= {1, 2, 3, 4, 5, 6, 7, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 23, 31, 33}


@pytest.mark.slow
def test_two_workers_recorded_steps_learn_what_eager_ones_do() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu_workers", "--device", "sim", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("losses apart by 0.0e+00") == 2 and "eager / recorded" in done.stdout


def test_a_step_of_train_is_timed_after_all_shapes_were_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 1 to 150 take 2 s each, as if they recorded graphs, and the others 1 s."""
    now = [0.0]
    monkeypatch.setattr(gpu, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = gpu.ReportClock()
    for step in range(10, 301, 10):
        now[0] = step + min(step, 150)
        clock(StepReport(step, 300, {}, lr=0.0, seconds=0.0, teacher_wait_s=0.0))
    assert clock.step_and_fixed_seconds(300) == (1.0, 150.0)


def test_an_interrupted_benchmark_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU may be taken back at any moment."""

    def first(bench: gpu.Bench) -> Iterator[Figure]:
        yield counted(15, "fused step, BERT-base", 1.0, "here")

    def second(bench: gpu.Bench) -> Iterator[Figure]:
        yield counted(14, "N = 128", 2.0, "here")
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu, "PARTS", {(15,): first, (14,): second})
    options = Namespace(tiny=False, call_by_call=False, rows=None, budget=60.0, out=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        gpu.measure("cpu", options)
    (file,) = tmp_path.rglob("gpu.json")
    report = Report.read(file)
    assert [figure.row for figure in report.figures] == [15, 14]
    assert report.not_run["row 14, N = 1024"] == "not run" and "row 14, N = 128" not in report.not_run


def test_chosen_rows_replace_theirs_and_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are kept from a report of the same settings only."""
    values = iter([1.0, 2.0, 3.0, 4.0])

    def part(row: int, name: str) -> Callable[[gpu.Bench], Iterator[Figure]]:
        return lambda bench: iter([counted(row, name, next(values), "here")])

    monkeypatch.setattr(gpu, "PARTS", {(15,): part(15, "fused step, BERT-base"), (14,): part(14, "N = 128")})

    def measured(rows: list[int] | None, call_by_call: bool = False) -> dict[int, float]:
        options = Namespace(tiny=False, call_by_call=call_by_call, rows=rows, budget=60.0, out=tmp_path)
        gpu.measure("cpu", options)
        (file,) = tmp_path.rglob("gpu.json")
        return {figure.row: figure.value for figure in Report.read(file).figures}

    assert measured(None) == {15: 1.0, 14: 2.0}
    assert measured([14]) == {15: 1.0, 14: 3.0}
    here = machine()
    monkeypatch.setattr(gpu, "machine", lambda: {**here, "torch": "another version"})
    assert measured([14]) == {14: 4.0}
