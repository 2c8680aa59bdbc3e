"""The table of all rows, from the reports alone: for the terminal, and for README.md between its two marks.

python -m benchmarks.table
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import STORED
from benchmarks.protocol import Figure, Report, judged, read_reports
from benchmarks.targets import ROWS, Part, Row, part_of
from distcse.storage import write_text_atomic

BEGIN, END = "<!-- rows: written by python -m benchmarks.table -->", "<!-- end of rows -->"
README = Path(__file__).parent / "README.md"
_GPU = "gpu"
JUDGED_GPU = "H200"
"""The one that bounds of GPU columns were set for."""
_SIGNS = {">=": "≥", "<=": "≤", "==": "="}


def lines_of(report: Report) -> list[str]:
    """A report as the terminal shows it."""
    gpu = report.group == _GPU
    lines = [f"{report.group} on {machine_name(report.machine)}"]
    for figure in sorted(report.figures, key=lambda figure: figure.key):
        part = part_of(figure.row, figure.part, gpu)
        meets = f"{target(part)}  {verdict(part, [figure], report.machine)}".strip() if not report.trial else "trial"
        lines.append(f"  row {figure.row:>2}  {figure.part:<52} {value(figure, part):<34} {meets}  {figure.setting}")
        if figure.terms:
            lines.append("          " + ", ".join(f"{name} {number:.4g}" for name, number in figure.terms.items()))
    lines += [f"  not run: {name}: {reason}" for name, reason in report.not_run.items()]
    return lines


def rows_table(reports: Iterable[Report]) -> str:
    """All rows as Markdown, a letter for each machine where there are several.

    A part without a figure is 'not measured yet', or 'not built' where distcse has no such thing.
    """
    kept = [report for report in reports if not report.trial]
    letters = _letters(kept)
    head = ["| # | row | part | machine | must | moon | found | meets it |", "|---|---|---|---|---|---|---|---|"]
    lines = [*_machines(kept, letters), "", *head]
    cpu = [(report, letters[report.place]) for report in kept if report.group != _GPU]
    gpu = [(report, letters[report.place]) for report in kept if report.group == _GPU]
    for row in ROWS:
        first, *others = _lines(row, row.cpu, cpu, "CPU") + _lines(row, row.gpu, gpu, JUDGED_GPU)
        lines += [f"| {row.number} | {row.title} {first}", *(f"| | {line}" for line in others)]
    return "\n".join(lines)


def write_readme(reports: Iterable[Report], file: Path = README) -> None:
    """Put the table between the marks. `ValueError` where the file has none."""
    text = file.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{file} has no markers for the table; write {BEGIN} and {END} into it")
    write_text_atomic(file, f"{before}{BEGIN}\n{rows_table(reports)}\n{END}{after}")


def target(part: Part) -> str:
    """The bounds, for people."""
    bounds = [_bound(bound) for bound in (part.must, part.moon) if bound is not None]
    return " / ".join(bounds) if bounds else "reported"


def value(figure: Figure, part: Part) -> str:
    """A figure with its interval, for people."""
    unit = f" {part.unit}" if part.unit not in ("", "x") else ("x" if part.unit == "x" else "")
    if figure.exact:
        return f"{_short(figure.value)}{unit}"
    low, high = figure.ends
    wall = ""
    if figure.other_clock is not None and abs(figure.other_clock / figure.value - 1) > 0.03:
        wall = f" (other clock {_short(figure.other_clock)})"
    return f"{_short(figure.value)}{unit} [{_short(low)}, {_short(high)}]{wall}"


def verdict(part: Part, figures: Iterable[Figure], machine: Mapping[str, Any]) -> str:
    """Whether the figures meet the bound; a bound that was set for another kernel is not applied."""
    if part.must is None:
        return "–"
    if part.only_with is not None and part.only_with not in machine.get("kernels", []):
        return f"no {part.only_with} here"
    if JUDGED_GPU not in str(machine.get("gpu", JUDGED_GPU)):
        return f"not judged: the bound is an {JUDGED_GPU}'s"
    found = [judged(figure, part.must) for figure in figures]
    if not all(found):
        return "no"
    moon = part.moon is not None and all(judged(figure, part.moon) for figure in figures)
    return "yes, and the moon" if moon else "yes"


def machine_name(machine: Mapping[str, Any]) -> str:
    """One line."""
    name = machine.get("gpu") or f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} thread"
    kernels = f" ({', '.join(machine['kernels'])})" if machine.get("kernels") and "gpu" not in machine else ""
    return f"{name}{kernels}, torch {machine['torch']}"


def _letters(reports: Iterable[Report]) -> dict[str, str]:
    """What a machine's figures begin with; a CPU held to older kernels than its own comes last."""
    places = sorted({report.place for report in reports}, key=lambda place: ("kernels" in place, place))
    return {place: f"{chr(ord('A') + number)}: " if len(places) > 1 else "" for number, place in enumerate(places)}


def _machines(reports: Iterable[Report], letters: Mapping[str, str]) -> list[str]:
    names = dict.fromkeys(f"{letters[report.place]}{machine_name(report.machine)}" for report in reports)
    return [f"Measured on: {'; '.join(names)}." if names else "Nothing is measured yet."]


def _lines(row: Row, parts: Iterable[Part], reports: Sequence[tuple[Report, str]], machine: str) -> list[str]:
    lines = []
    for part in parts:
        found, meets = _cell(row.number, part, reports)
        must, moon = (_bound(bound) if bound else "–" for bound in (part.must, part.moon))
        lines.append(f"| {part.name} | {machine} | {must} | {moon} | {found} | {meets} |")
    return lines


def _cell(number: int, part: Part, reports: Sequence[tuple[Report, str]]) -> tuple[str, str]:
    found, meets = [], []
    for report, letter in reports:
        figures = [figure for figure in report.figures if (figure.row, figure.part) == (number, part.name)]
        if figures:
            values = (value(figure, part) + (f" ({figure.setting})" if figure.setting else "") for figure in figures)
            found.append(letter + "; ".join(values))
            meets.append(letter + verdict(part, figures, report.machine))
    if found:
        return "<br>".join(found), "<br>".join(meets)
    if part.needs is not None:
        return f"not built: {part.needs}", "no" if part.must else "–"
    return "not measured yet", "–"


def _bound(bound: str) -> str:
    side, _, number = bound.partition(" ")
    return f"{_SIGNS[side]} {number}"


def _short(number: float) -> str:
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


def main() -> None:
    write_readme(read_reports(STORED))
    print(f"written: {README}")


if __name__ == "__main__":
    main()
