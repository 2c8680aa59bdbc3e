"""The table of the rows, from made-up reports."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.protocol import Figure, Report, counted, read_reports
from benchmarks.table import BEGIN, END, README, lines_of, rows_table, write_readme
from benchmarks.targets import ROWS

MACHINE = {"cpu": "made up", "cores": 2, "kernels": [], "threads": 1, "torch": "2"}


def test_the_table_holds_every_row_and_says_what_is_missing() -> None:
    text = rows_table({})
    assert all(f"\n| {row.number} | {row.title} |" in text for row in ROWS)
    assert "not measured yet" in text and "not built: packed tokens" in text
    assert "yes" not in text


def test_a_figure_is_judged_in_the_table_unless_its_bound_is_for_another_kernel() -> None:
    figures = [
        Figure(2, "fp32", 3.3, 3.25, 3.4, pairs=15, setting="N = 64", other_clock=3.6),
        Figure(3, "bf16", 3.0, 2.9, 3.1),
        Figure(15, "BERT-base", 3.1, 2.9, 3.2),
        counted(31, "sentences encoded a score", 2984),
    ]
    report = Report("step", MACHINE, {}, figures)
    lines = rows_table([report]).splitlines()
    found = {line.split("|")[3].strip(): line for line in lines if "[" in line or "2,984" in line}
    assert "3.3x [3.25, 3.4] (other clock 3.6) (N = 64) | yes, and the moon |" in found["fp32"]
    assert "| no AMX here |" in found["bf16"]
    assert found["BERT-base"].endswith("| no |")
    assert "2,984 sentences | yes |" in found["sentences encoded a score"]
    assert rows_table([Report("step", MACHINE, {}, figures, trial=True)]) == rows_table([])
    assert any("row  2" in line for line in lines_of(report))


def test_the_table_tells_machines_apart() -> None:
    faster = {**MACHINE, "cpu": "another", "kernels": ["AMX"]}
    reports = [
        Report("step", faster, {}, [Figure(3, "bf16", 7.0, 6.9, 7.1), counted(31, "sentences encoded a score", 9)]),
        Report("step", MACHINE, {}, [Figure(3, "bf16", 5.0, 4.9, 5.1)]),
    ]
    text = rows_table(reports)
    assert "Measured on: A: another, 2 cores, 1 thread (AMX), torch 2; B: made up, 2 cores, 1 thread, torch 2." in text
    assert "| A: 7x [6.9, 7.1]<br>B: 5x [4.9, 5.1] | A: yes, and the moon<br>B: no AMX here |" in text
    assert "| A: 9 sentences | A: yes |" in text


def test_the_readme_shows_what_is_stored(tmp_path: Path) -> None:
    text = README.read_text(encoding="utf-8")
    table = rows_table(read_reports(README.parent / "results"))
    assert f"{BEGIN}\n{table}\n{END}" in text, "run: python -m benchmarks.table"
    file = tmp_path / "README.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_readme([], file)
    assert file.read_text(encoding="utf-8") == f"before\n{BEGIN}\n{rows_table([])}\n{END}\nafter\n"
    file.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="no markers for the table"):
        write_readme([], file)
