"""Memory of a mutual distillation's processes in addition to their model, and the time until they can train, by number of pairs.

Each part runs in a separate process: the driver (reads the pairs, makes fingerprints and labels of eight groups, compares with
test sentences), the tokenization, a trainer of each formulation (20 batches), and a scorer (one slice of 100,000 pairs).

With `--words`, all sentences of all pairs are different, which needs the most memory for a number of pairs. Without it, there are
at most as many sentences as the corpus has.

python -m benchmarks.million_pairs --data ../shared/data [--pairs 1000000 4000000] [--words 4] [--parts driver bi-tokens bi]
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.material import MINILM
from distcse.evaluation import Contamination
from distcse.models import CrossEncoder, Encoder, resolve_model
from distcse.recipe import MutualRecipe, read_recipe
from distcse.report.history import read_cycles
from distcse.runs.lease import Lease
from distcse.runs.mutual.label_exchange import LabelExchange
from distcse.runs.mutual.pair_task import PairTask, PairTokens
from distcse.runs.mutual.pairs import read_pairs
from distcse.runs.mutual.phase_store import GroupContext, Phase, PhaseStore
from distcse.runs.mutual.phase_trainer import PairScorer
from distcse.storage import open_store
from distcse.text import Pairs, PairTokenTable, TokenTable
from tests.wikipedia import wiki_file

GROUPS, MIB = 8, 1024
PARTS = ("driver", "bi-tokens", "cross-tokens", "bi", "cross", "scorer")
_POLL_S = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--pairs", type=int, nargs="+", default=[1_000_000, 4_000_000])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--orders", type=int, choices=(1, 2), default=2, help="orders of a pair that the cross-encoder reads"
    )
    parser.add_argument(
        "--words", type=int, help="cut sentences to their first words and number them; default: leave them"
    )
    parser.add_argument("--folder", type=Path, help="where to keep pairs and tokens; default: a temporary folder")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measured(options.parts[0], options.folder, options.pairs[0])), flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        for number in options.pairs:
            folder = (options.folder or Path(temporary)) / str(number)
            if not (folder / "recipe.yaml").exists():
                write_inputs(folder, number, options.data, options.orders, options.words)
            for part in options.parts:
                command = [sys.executable, "-m", "benchmarks.million_pairs", "--data", str(options.data), "--inside"]
                subprocess.run([*command, "--folder", str(folder), "--parts", part, "--pairs", str(number)], check=True)


def write_inputs(folder: Path, number: int, data: Path, orders: int, words: int | None) -> None:
    """Write random pairs of the Wikipedia sentences, and a recipe of eight groups that reads them.

    Args:
        folder: Where to write them.
        number: Number of pairs.
        data: The data folder.
        orders: 2 if the cross-encoder reads both orders of a pair.
        words: Words that are left of each sentence, with a number that makes it different. None: sentences as they are.
    """
    folder.mkdir(parents=True)
    with gzip.open(wiki_file(data), "rt", encoding="utf-8") as file:
        sentences = [" ".join(line.split()) for line in file]
    draw = np.random.default_rng(0)
    with (folder / "pairs.tsv").open("w", encoding="utf-8") as out:
        out.write("sentence1\tsentence2\n")
        for row, other in enumerate(draw.integers(0, len(sentences), number).tolist()):
            pair = [sentences[row % len(sentences)], sentences[other]]
            if words is not None:
                pair = [f"{' '.join(sentence.split()[:words])} {2 * row + side}" for side, sentence in enumerate(pair)]
            out.write("\t".join(pair) + "\n")
    groups = [
        {"name": f"group{n}", "backbone": MINILM, "pooling": "mean", "max_length": 32, "layers": [0]}
        for n in range(GROUPS)
    ]
    document = {
        "name": "pairs",
        "pairs": {"path": str(folder / "pairs.tsv")},
        "groups": groups,
        "bi": {"engine": "torch", "precision": "fp32"},
        "cross": {"engine": "torch", "precision": "fp32", "both_orders": orders == 2},
        "mutual": {"cycles": 1, "precision": "fp32"},
        "evaluation": {"dev": "none", "final_suites": [], "precision": "fp32"},
        "storage": {"runs": str(folder), "cache": str(folder / "cache")},
        "ray": False,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(document))


def measured(part: str, folder: Path, number: int) -> dict[str, Any]:
    """Run a part in this process, and return its seconds and its largest memory above that at the start, in MiB."""
    torch.set_num_threads(1)
    recipe = read_recipe(str(folder / "recipe.yaml"), [])
    assert isinstance(recipe, MutualRecipe)
    prepare = {
        "driver": drive,
        "bi-tokens": tokenize_bi,
        "cross-tokens": tokenize_cross,
        "bi": train_bi,
        "cross": train_cross,
        "scorer": score,
    }
    work = prepare[part](recipe, folder)
    began = time.perf_counter()
    with Memory() as memory:
        notes = work()
    return {"part": part, "pairs": number, "seconds": round(time.perf_counter() - began, 1), **memory.grown, **notes}


class Memory:
    """Context manager: how much this process's memory grows in the block, at most.

    `own` is the process's own, and `mapped` the pages of mapped files, which the kernel takes back when it needs them.
    """

    def __enter__(self) -> Memory:
        self._before, self._largest, self._ended = self._now(), self._now(), threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._watcher.join()

    @property
    def grown(self) -> dict[str, int]:
        """MiB: `own_mib` and `mapped_mib`."""
        return {f"{name}_mib": round((self._largest[name] - self._before[name]) / MIB) for name in self._before}

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            for name, size in self._now().items():
                self._largest[name] = max(self._largest[name], size)

    @staticmethod
    def _now() -> dict[str, int]:
        """KiB."""
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {"own": int(lines["RssAnon"].split()[0]), "mapped": int(lines["RssFile"].split()[0])}


Work = Callable[[], dict[str, Any]]


def drive(recipe: MutualRecipe, folder: Path) -> Work:
    """The driver: pairs, labels of a phase, contamination, and the report's agreement."""

    def work() -> dict[str, Any]:
        began = time.perf_counter()
        pairs = read_pairs(recipe, open_store(folder / "pairs"))
        read = time.perf_counter()
        pairs = Pairs.open_verified(open_store(folder / "pairs"))
        store = PhaseStore(open_store(folder, Lease.acquire(open_store(folder))))
        exchange = LabelExchange(recipe, store, threading.Event())
        base = np.random.default_rng(0).random(len(pairs), dtype=np.float32)
        for n, group in enumerate(recipe.groups):
            exchange.post(group.name, Phase(0), np.sqrt(base + np.float32(n)), None)
        combined = time.perf_counter()
        Contamination.measure(pairs.distinct(), [["A sentence of a test set."]])
        compared = time.perf_counter()
        read_cycles(folder, [group.name for group in recipe.groups], [])
        times = (began, read, combined, compared, time.perf_counter())
        names = ("read_s", "labels_s", "contamination_s", "report_s")
        return {name: round(b - a, 1) for name, a, b in zip(names, times, times[1:], strict=False)}

    return work


def tokenize_bi(recipe: MutualRecipe, folder: Path) -> Work:
    """The tokenization of the sentences, once for all groups."""
    encoder = Encoder.from_section(recipe.groups[0])

    def work() -> dict[str, Any]:
        sentences = Pairs.open(open_store(folder / "pairs")).sentences
        table = TokenTable.prepare(sentences, encoder.tokenizer, encoder.max_length, open_store(folder / "cache"))
        (folder / "bi.txt").write_text(str(table.store))
        return {"sentences": len(table)}

    return work


def tokenize_cross(recipe: MutualRecipe, folder: Path) -> Work:
    """The tokenization of the pairs, once for all groups."""
    tokenizer, section = Encoder.from_section(recipe.groups[0]).tokenizer, recipe.cross

    def work() -> dict[str, Any]:
        pairs = Pairs.open(open_store(folder / "pairs"))
        table = PairTokenTable.prepare(
            pairs, tokenizer, section.max_length, section.both_orders, open_store(folder / "cache")
        )
        (folder / "cross.txt").write_text(str(table.store))
        return {"rows": len(table)}

    return work


def train_bi(recipe: MutualRecipe, folder: Path) -> Work:
    """A trainer of bi-encoders."""
    encoder = Encoder.from_section(recipe.groups[0])

    def work() -> dict[str, Any]:
        table = TokenTable.open(open_store((folder / "bi.txt").read_text()))
        return _batches(
            recipe, folder, encoder, PairTokens.bi(encoder, Pairs.open(open_store(folder / "pairs")), table)
        )

    return work


def train_cross(recipe: MutualRecipe, folder: Path) -> Work:
    """A trainer of cross-encoders."""
    encoder = CrossEncoder.fresh(resolve_model(MINILM), recipe.cross.max_length, [0])

    def work() -> dict[str, Any]:
        table = PairTokenTable.open(open_store((folder / "cross.txt").read_text()))
        return _batches(recipe, folder, encoder, PairTokens.cross(encoder, table))

    return work


def _batches(recipe: MutualRecipe, folder: Path, encoder: Encoder | CrossEncoder, tokens: PairTokens) -> dict[str, Any]:
    """Prepare 20 batches at the start of an epoch and 20 at its end."""
    began = time.perf_counter()
    stored = PhaseStore(open_store(folder)).stored_labels(Phase(0))
    assert stored is not None
    section = recipe.bi if isinstance(encoder, Encoder) else recipe.cross
    task = PairTask(encoder, tokens, stored.read(), section, None, 10**9, 0)
    cpu, first = torch.device("cpu"), 0.0
    for step in (*range(20), *range(task.steps - 20, task.steps)):
        task.prepare_batch(step, cpu)
        first = first or time.perf_counter() - began
    return {"first_batch_s": round(first, 2)}


def score(recipe: MutualRecipe, folder: Path) -> Work:
    """A scorer, which scores one part of the pairs: a slice of them."""
    scorer = PairScorer(GroupContext(recipe, 0, open_store(folder, Lease.acquire(open_store(folder))), {}))
    scorer._model(Phase(0))  # what loading a model leaves behind is not of the pairs

    def work() -> dict[str, Any]:
        pairs = len(Pairs.open(open_store(folder / "pairs")))
        return {"scored": len(scorer.score(Phase(0), 0, max(1, pairs // 100_000)))}

    return work


if __name__ == "__main__":
    main()
