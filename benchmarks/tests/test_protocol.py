"""The benchmarks' protocol and the table of the rows, on durations that are made up: no test asserts a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.protocol import (
    Duration,
    Effort,
    Figure,
    Report,
    Rounds,
    counted,
    interleave,
    judged,
    moved,
    of_ratio,
    read_reports,
)
from benchmarks.table import BEGIN, END, README, lines_of, rows_table, write_readme
from benchmarks.targets import ROWS, part_of

FEW = Effort(pairs=20, warmups=2, shortest=0.5)


class Machine:
    """A clock that slows down over time, on which every variant takes a made-up time."""

    def __init__(self, drift: float = 0.0) -> None:
        self.calls: list[tuple[str, int]] = []
        self._drift = drift

    def way(self, name: str, seconds: float) -> Callable[[int], Duration]:
        def sample(repeats: int) -> Duration:
            slowness = 1 + self._drift * len(self.calls)
            self.calls.append((name, repeats))
            return Duration(2 * seconds * slowness, seconds * slowness)

        return sample


def test_every_way_is_sampled_once_a_round_in_changing_order_and_repeated_until_long_enough() -> None:
    machine = Machine()
    ways = {"short": machine.way("short", 0.01), "a": machine.way("a", 1.0), "long": machine.way("long", 3.0)}
    rounds = interleave(ways, FEW, again="a")
    assert {name: len(found) for name, found in rounds.durations.items()} == dict.fromkeys([*ways, "a (again)"], 20)
    warmups, sampled = machine.calls[:6], machine.calls[6:]
    assert [name for name, _ in warmups] == ["short", "short", "a", "a", "long", "long"]
    orders = [tuple(name for name, _ in sampled[at : at + 4]) for at in range(0, 80, 4)]
    assert all(sorted(order) == ["a", "a", "long", "short"] for order in orders) and len(set(orders)) > 3
    assert {*sampled} == {("short", 25), ("a", 1), ("long", 1)}


def test_a_drift_of_the_machine_does_not_move_the_ratio() -> None:
    machine = Machine(drift=0.01)
    rounds = interleave({"slow": machine.way("slow", 3.0), "fast": machine.way("fast", 1.0)}, FEW, again="fast")
    ratio = rounds.ratio("slow", "fast")
    assert ratio.median == pytest.approx(3.0, rel=0.02) == rounds.ratio("slow", "fast", "wall").median
    assert max(rounds.seconds("fast")) / min(rounds.seconds("fast")) > 1.3  # which a ratio of medians would carry in


def test_a_figure_is_judged_by_the_bad_end_of_its_interval_widened_by_an_a_a_run() -> None:
    equal, unequal = [Duration(1.0, 1.0)] * 9, [Duration(1.0, 1.05)] * 9
    rounds = Rounds({"ours": equal, "ours (again)": unequal, "theirs": [Duration(2.0, 2.62)] * 9})
    figure = of_ratio(2, "fp32", rounds, "theirs", "ours", "made up")
    assert figure.value == figure.low == figure.high == figure.minima == pytest.approx(2.62)
    assert figure.other_clock == pytest.approx(2.0) and figure.noise == pytest.approx(1 - 1 / 1.05)
    assert Rounds({"ours": equal}).noise() == 0
    exact = counted(8, "sentence encodings of a second run", 1)
    for found, bound, meets in (
        *((figure, ">= 2.6", False), (figure, ">= 2.4", True), (figure, "<= 2.8", True), (figure, "<= 2.7", False)),
        *((figure, None, None), (exact, "== 1", True), (exact, "== 0", False)),
    ):
        assert judged(found, bound) is meets, bound
    with pytest.raises(ValueError, match="write '>= NUMBER'"):
        judged(figure, "about 2")


def test_what_moved_by_more_than_its_spread_is_named() -> None:
    stored = [Figure(2, "fp32", 3.0, 2.9, 3.1), Figure(15, "BERT-base", 4.0, 3.9, 4.1), counted(31, "encoded", 3000)]
    new = [Figure(2, "fp32", 2.5, 2.4, 2.6), Figure(14, "N = 128", 7.0, 6.0, 8.0), counted(31, "encoded", 3001)]
    assert moved(stored, stored) == []
    assert moved([Figure(2, "fp32", 3.05, 2.9, 3.2, noise=0.03), *stored[1:]], stored) == []
    assert moved(new, stored) == [
        "row 2, fp32: 3 [2.9, 3.1] -> 2.5 [2.4, 2.6]",
        "row 31, encoded: 3000 -> 3001",
        "row 15, BERT-base: 4 [3.9, 4.1] -> not measured",
    ]


def test_the_targets_are_34_rows_whose_bounds_can_be_read() -> None:
    assert [row.number for row in ROWS] == list(range(1, 35)) and part_of(2, "fp32").must == ">= 2.6"
    for row in ROWS:
        assert (row.cpu or row.gpu) and len({part.name for part in row.cpu}) == len(row.cpu)
        for part in (*row.cpu, *row.gpu):
            for bound in (part.must, part.moon):
                assert judged(Figure(1, "any", 1.0, 0.9, 1.1), bound) in (None, True, False)


MACHINE = {"cpu": "made up", "cores": 2, "kernels": [], "threads": 1, "torch": "2"}
STEP = Report(
    "step",
    MACHINE,
    {},
    [
        Figure(2, "fp32", 3.3, 3.25, 3.4, pairs=15, setting="N = 64", other_clock=3.6),
        Figure(3, "bf16", 5.0, 4.9, 5.1),
        Figure(15, "BERT-base", 3.1, 2.9, 3.2),
        counted(31, "sentences encoded a score", 2984),
    ],
)


def test_the_table_holds_every_row_judged_unless_its_bound_is_for_another_kernel() -> None:
    nothing, text = rows_table([]), rows_table([STEP])
    assert all(f"\n| {row.number} | {row.title} |" in nothing for row in ROWS)
    assert "not measured yet" in nothing and "not built: packed tokens" in nothing and "yes" not in nothing
    assert "3.3x [3.25, 3.4] (other clock 3.6) (N = 64) | yes, and the moon |" in text
    assert "| 5x [4.9, 5.1] | no AMX here |" in text and "| 3.1x [2.9, 3.2] | no |" in text
    assert "2,984 sentences | yes |" in text
    assert rows_table([Report("step", MACHINE, {}, STEP.figures, trial=True)]) == nothing
    assert any("row  2" in line for line in lines_of(STEP))
    faster = {**MACHINE, "cpu": "another", "kernels": ["AMX"]}
    text = rows_table([Report("step", faster, {}, [Figure(3, "bf16", 7.0, 6.9, 7.1)]), STEP])
    assert "Measured on: A: another, 2 cores, 1 thread (AMX), torch 2; B: made up, 2 cores, 1 thread, torch 2." in text
    assert "| A: 7x [6.9, 7.1]<br>B: 5x [4.9, 5.1] | A: yes, and the moon<br>B: no AMX here |" in text


def test_the_readme_shows_what_is_stored(tmp_path: Path) -> None:
    table = rows_table(read_reports(README.parent / "results"))
    assert f"{BEGIN}\n{table}\n{END}" in README.read_text(encoding="utf-8"), "run: python -m benchmarks.table"
    file = tmp_path / "README.md"
    file.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n", encoding="utf-8")
    write_readme([], file)
    assert file.read_text(encoding="utf-8") == f"before\n{BEGIN}\n{rows_table([])}\n{END}\nafter\n"
    file.write_text("no marks", encoding="utf-8")
    with pytest.raises(ValueError, match="no markers for the table"):
        write_readme([], file)
