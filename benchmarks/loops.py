"""Rows 24 and 25: what Ray Train and DeepSpeed add to a step.

    python -m benchmarks.loops --data ../shared/data [--quick] [--rows 24 25]

The steps are one function, in separate processes that work alternately (stepping.py). The A/A run is of two bare processes: how
fortunate one is with its memory is part of the noise.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.material import MINILM, list_recipe, prepared, stand_in
from benchmarks.options import Options, script
from benchmarks.protocol import Effort, Figure, Report, Rounds, interleave, machine, of_ratio, of_spread, spread_of
from benchmarks.protocol.pairing import AGAIN
from benchmarks.stepping import bare, ray_worker
from distcse.cluster.cluster import cluster
from tests.wikipedia import wiki_file

SIMCSE: dict[str, Any] = {"tau1": 0.05, "consistency": None, "rank": None}


def measure(options: Options) -> Report:
    """Both rows; all ways are sampled in the same rounds."""
    effort = Effort(pairs=options.pairs, shortest=0.0 if options.quick else 0.5, warmups=1 if options.quick else 2)
    with tempfile.TemporaryDirectory() as folder, cluster(cpus=2):
        found = loops(Path(folder), options, effort)
    return Report("loops", machine(), {"pairs": options.pairs, "threads": 1}, found, options.quick)


def loops(folder: Path, options: Options, effort: Effort) -> list[Figure]:
    """A bare loop, a Ray Train worker and DeepSpeed's stages, the same step in all."""
    found: list[Figure] = []
    tiny = str(stand_in(folder / "model", "tiny"))
    sizes = {"tiny model": tiny} if options.quick else {"MiniLM": MINILM, "tiny model": tiny}
    for name, student in sizes.items():
        recipe = list_recipe(folder / name, wiki_file(options.data), student, [], SIMCSE, 32, 96)
        spec, _ = prepared(recipe)
        with ExitStack() as stack:
            steppers = {way: stack.enter_context(bare(spec)) for way in ("bare", f"bare{AGAIN}")}
            for stage in (0, 1, 2):
                engine = bare(spec, engine="deepspeed", zero_stage=stage)
                steppers[f"stage {stage}"] = stack.enter_context(engine)
            steppers["ray"] = stack.enter_context(ray_worker(spec, folder / "ray"))
            ways = {way: stepper.sample for way, stepper in steppers.items()}
            enough = effort.at_least(25) if name == "MiniLM" else effort
            rounds = interleave(ways, enough)
            reports = steppers["ray"].report_seconds
        at = f"{name}, 2N = 64"
        if name == "MiniLM":
            report = float(np.median(reports))
            found.append(of_ratio(24, "MiniLM, no report", rounds, "ray", "bare", at))
            every = rounds.of(lambda s: (125 * s["ray"] + report) / (125 * s["bare"]), "wall")  # noqa: B023
            found.append(of_spread(24, "MiniLM, a report every 125 steps", every, at, rounds.noise("wall")))
            found.append(of_spread(24, "one report", spread_of([1000 * seconds for seconds in reports]), at))
            found += [of_ratio(25, f"MiniLM, stage {n}", rounds, f"stage {n}", "bare", at) for n in (0, 1, 2)]
        else:
            found.append(_added(24, "tiny model, added", rounds, "ray", at))
            found += [_added(25, f"tiny model, stage {n}, added", rounds, f"stage {n}", at) for n in (0, 1, 2)]
    return found


def _added(row: int, part: str, rounds: Rounds, way: str, at: str) -> Figure:
    return of_spread(row, part, rounds.of(lambda s: 1000 * (s[way] - s["bare"]), "wall"), at)


if __name__ == "__main__":
    script("benchmarks.loops", __doc__, measure)
