"""The benchmarks' protocol on durations that are made up: no test asserts a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.protocol import (
    Duration,
    Effort,
    Figure,
    Report,
    Rounds,
    Spread,
    counted,
    interleave,
    judged,
    moved,
    of_ratio,
    read_reports,
    spread_of,
    timed,
)
from benchmarks.targets import ROWS, part_of

FEW = Effort(pairs=20, warmups=2, shortest=0.5)


class Machine:
    """A clock that slows down over time, on which every variant takes a made-up time."""

    def __init__(self, drift: float = 0.0) -> None:
        self.calls: list[str] = []
        self.repeats: list[tuple[str, int]] = []
        self._drift = drift

    def way(self, name: str, seconds: float) -> Callable[[int], Duration]:
        def sample(repeats: int) -> Duration:
            slowness = 1 + self._drift * len(self.calls)
            self.calls.append(name)
            self.repeats.append((name, repeats))
            return Duration(2 * seconds * slowness, seconds * slowness)

        return sample


def test_every_way_is_sampled_once_a_round_in_changing_order() -> None:
    machine = Machine()
    rounds = interleave({name: machine.way(name, 1.0) for name in "abc"}, FEW, again="a")
    assert {name: len(found) for name, found in rounds.durations.items()} == dict.fromkeys(
        ["a", "b", "c", "a (again)"], 20
    )
    sampled = machine.calls[6:]
    orders = [tuple(sampled[at : at + 4]) for at in range(0, 80, 4)]
    assert all(sorted(order) == ["a", "a", "b", "c"] for order in orders)
    assert len(set(orders)) > 3
    assert machine.calls[:6] == ["a", "a", "b", "b", "c", "c"]


def test_short_calls_are_repeated_until_a_sample_is_long_enough() -> None:
    machine = Machine()
    interleave({"short": machine.way("short", 0.01), "long": machine.way("long", 3.0)}, FEW)
    assert {repeats for name, repeats in machine.repeats[4:] if name == "short"} == {25}
    assert {repeats for name, repeats in machine.repeats[4:] if name == "long"} == {1}


def test_a_drift_of_the_machine_does_not_move_the_ratio() -> None:
    machine = Machine(drift=0.01)
    rounds = interleave({"slow": machine.way("slow", 3.0), "fast": machine.way("fast", 1.0)}, FEW, again="fast")
    ratio = rounds.ratio("slow", "fast")
    assert ratio.median == pytest.approx(3.0, rel=0.02)
    assert max(rounds.seconds("fast")) / min(rounds.seconds("fast")) > 1.3  # which a ratio of medians would carry in
    assert rounds.ratio("slow", "fast", "wall").median == pytest.approx(ratio.median)


def test_the_interval_holds_the_median_and_narrows_with_more_pairs() -> None:
    generator = np.random.default_rng(1)
    few, many = (spread_of(generator.normal(2.0, 0.2, pairs).tolist()) for pairs in (15, 1500))
    for spread in (few, many):
        assert spread.low <= spread.median <= spread.high
    assert many.high - many.low < (few.high - few.low) / 4
    assert many.low < 2.0 < many.high
    assert spread_of([1.5]) == Spread(1.5, 1.5, 1.5, 1)
    assert spread_of([1.0, 2.0, 30.0]).median == 2.0
    for nothing in ([], [1.0, float("nan")]):
        with pytest.raises(ValueError, match="a median needs one"):
            spread_of(nothing)


def test_an_a_a_run_widens_what_is_judged() -> None:
    equal = [Duration(1.0, 1.0)] * 9
    unequal = [Duration(1.0, 1.05)] * 9
    rounds = Rounds({"ours": equal, "ours (again)": unequal, "theirs": [Duration(2.0, 2.62)] * 9})
    figure = of_ratio(2, "fp32", rounds, "theirs", "ours", "made up")
    assert figure.value == figure.low == figure.high == pytest.approx(2.62)
    assert figure.other_clock == pytest.approx(2.0)
    assert figure.minima == pytest.approx(2.62)
    assert figure.noise == pytest.approx(1 - 1 / 1.05)
    assert not judged(figure, ">= 2.6")
    assert judged(figure, ">= 2.4")
    assert judged(figure, "<= 2.8") and not judged(figure, "<= 2.7")
    assert judged(figure, None) is None
    assert Rounds({"ours": equal}).noise() == 0
    with pytest.raises(ValueError, match="write '>= NUMBER'"):
        judged(figure, "about 2")


def test_a_row_is_judged_by_the_bad_end_of_its_interval() -> None:
    figure = Figure(1, "fp32", 1.01, 0.99, 1.03)
    assert not judged(figure, "<= 1.02") and judged(figure, "<= 1.03")
    assert judged(counted(8, "sentence encodings of a second run", 0), "== 0")
    assert not judged(counted(8, "sentence encodings of a second run", 1), "== 0")


def test_what_moved_by_more_than_its_spread_is_named() -> None:
    stored = [
        Figure(2, "fp32", 3.0, 2.9, 3.1),
        Figure(3, "bf16", 5.0, 4.9, 5.1, noise=0.03),
        counted(31, "sentences encoded a score", 3000),
        Figure(15, "BERT-base", 4.0, 3.9, 4.1),
    ]
    new = [
        Figure(2, "fp32", 2.5, 2.4, 2.6),
        Figure(3, "bf16", 5.3, 5.2, 5.4),
        counted(31, "sentences encoded a score", 3001),
        Figure(14, "N = 128", 7.0, 6.0, 8.0),
    ]
    assert moved(stored, stored) == []
    lines = moved(new, stored)
    assert [line.split(",")[0] for line in lines] == ["row 2", "row 31", "row 15"]
    assert "3 [2.9, 3.1] -> 2.5 [2.4, 2.6]" in lines[0]
    assert "3000 -> 3001" in lines[1]
    assert lines[2].endswith("not measured")
    at_other_size = [Figure(2, "fp32", 9.0, 8.9, 9.1, setting="N = 8")]
    assert "not measured" in moved(at_other_size, stored[:1])[0]


def test_a_report_comes_back_from_disk_as_it_was(tmp_path: Path) -> None:
    figures = [Figure(2, "fp32", 3.0, 2.9, 3.1, 0.01, pairs=15, terms={"steps": 2.0}), counted(31, "sentences", 3000)]
    report = Report("step", {"cpu": "made up"}, {"pairs": 15}, figures, not_run={"row 3": "no AMX"})
    assert report.write(tmp_path) == tmp_path / "made-up" / "step.json"
    other = Report("step", {"cpu": "Another", "kernels": ["AMX"]}, {"pairs": 15}, figures)
    assert other.write(tmp_path) == tmp_path / "another-amx" / "step.json"
    assert read_reports(tmp_path) == [other, report]


def test_durations_of_this_process_are_of_both_clocks() -> None:
    calls = []
    found = timed(lambda: calls.append(1))(7)
    assert len(calls) == 7
    assert found.wall > 0 and found.cpu >= 0


def test_the_targets_are_34_rows_whose_bounds_can_be_read() -> None:
    assert [row.number for row in ROWS] == list(range(1, 35))
    figure = Figure(1, "any", 1.0, 0.9, 1.1)
    for row in ROWS:
        assert row.cpu or row.gpu
        for part in (*row.cpu, *row.gpu):
            for bound in (part.must, part.moon):
                assert judged(figure, bound) in (None, True, False)
        assert len({part.name for part in row.cpu}) == len(row.cpu)
    assert part_of(2, "fp32").must == ">= 2.6"
    with pytest.raises(KeyError, match="has no part"):
        part_of(2, "fp8")
