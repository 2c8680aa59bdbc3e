"""What an embedding pass needs besides speed, tried with Ray Data: ids of rows, a killed driver, damaged files, a stopped actor.

    python -m benchmarks.ray_data_limits [--only ids resume damage hang]

No model is loaded: a made-up embedder returns vectors after a wait. Each try prints what happened, as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distcse.data import Corpus
from distcse.ray_backend.cluster import cluster
from distcse.recipe.corpus import CorpusSection

ROWS, BLOCK, WIDTH = 8192, 1024, 64
_NO_PROGRESS_S = 20.0
_CALL_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TRIES, default=list(TRIES))
    parser.add_argument("--part", choices=("first", "second"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part is not None:
        with cluster(cpus=4):  # the checkpoints' filter is a second actor with a CPU: with two, nothing is read
            embed(options.folder, wait_s=_CALL_S, checkpoints=options.folder / "checkpoints")
        return
    for name in options.only:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({name: TRIES[name](Path(folder))}), flush=True)


def ids(folder: Path) -> dict[str, Any]:
    """Read text of which one line has a line separator, and number the rows."""
    import ray.data
    from ray.data.expressions import monotonically_increasing_id

    lines = [f"sentence {row}" for row in range(ROWS)]
    lines[1] += "\u2028and more"
    file = folder / "rows.txt"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    ours = Corpus.prepare(CorpusSection(path=str(file)), folder / "cache")
    with cluster(cpus=2):
        _quiet()
        text = ray.data.read_text(str(file)).materialize()
        numbered = ray.data.range(ROWS, override_num_blocks=4).with_column("number", monotonically_increasing_id())
        rows = {row["id"]: row["number"] for row in numbered.take_all()}
        return {
            "columns of read_text": text.columns(),
            "rows": text.count(),
            "rows of our corpus": len(ours),
            "rows whose monotonically_increasing_id is not their row": sum(n != row for row, n in rows.items()),
        }


def resume(folder: Path) -> dict[str, Any]:
    """Kill the driver while it embeds, and begin the pass again with Ray Data's checkpoints."""
    command = [sys.executable, "-m", "benchmarks.ray_data_limits", "--folder", str(folder), "--part"]
    first = subprocess.Popen([*command, "first"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _wait_for(lambda: len(list((folder / "vectors").glob("*.parquet"))) >= 3 or first.poll() is not None)
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(2 * _CALL_S)  # its actor completes a call
    before = {file.name: _rows(file) for file in (folder / "vectors").glob("*.parquet")}
    calls = _calls(folder)
    subprocess.run([*command, "second"], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = {file.name: _rows(file) for file in (folder / "vectors").glob("*.parquet")}
    return {
        "rows of each file at the kill": list(before.values()),
        "rows embedded by the killed driver": sum(calls),
        "rows embedded by the second": sum(_calls(folder)) - sum(calls),
        "files of the first that are kept": len(before.keys() & after.keys()),
        "rows of each file in the end": sorted(after.values()),
        "rows in the end": sum(after.values()),
    }


def damage(folder: Path) -> dict[str, Any]:
    """Change a byte in the middle of each written file, and read them; then read without one of them."""
    import ray.data

    with cluster(cpus=2):
        embed(folder, wait_s=0.0)
        before, files = _read(folder), sorted((folder / "vectors").glob("*.parquet"))
        assert before == _read(folder)
        for file in files:
            content = bytearray(file.read_bytes())
            content[len(content) // 2] ^= 1
            file.write_bytes(content)
        try:
            lost = before - _read(folder)
            outcome = f"{len({row // BLOCK for row, _ in lost})} files read as other ids or vectors, without an error"
        except (OSError, ray.exceptions.RayError) as error:
            outcome = f"refused: {' '.join(str(error).split())[:200]}"
        files[0].unlink()
        left = ray.data.read_parquet(str(folder / "vectors")).count()
    return {"changed files": len(files), "outcome": outcome, "rows read without a file": left, "rows": ROWS}


def hang(folder: Path) -> dict[str, Any]:
    """Stop the actor's process in the middle of the pass."""
    import ray.data
    from ray.data.exceptions import ExecutionTimeoutError

    with cluster(cpus=2):
        context = ray.data.DataContext.get_current()
        default, context.execution_no_progress_timeout_s = context.execution_no_progress_timeout_s, _NO_PROGRESS_S
        began = time.monotonic()
        try:
            embed(folder, wait_s=0.0, stops_at=2)
            ended = "the pass completed"
        except (ExecutionTimeoutError, ray.exceptions.RayError) as error:
            ended = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        seconds = round(time.monotonic() - began, 1)
    kept = sum(_rows(file) for file in (folder / "vectors").glob("*.parquet"))
    return {"default limit, s": default, "ended": ended, "after, s": seconds, "rows stored": kept, "rows": ROWS}


TRIES: dict[str, Callable[[Path], dict[str, Any]]] = {"ids": ids, "damage": damage, "hang": hang, "resume": resume}


class MadeUpEmbedder:
    """Waits for each batch, and returns vectors that its rows determine.

    Args:
        folder: Gets a file for each call.
        wait_s: Seconds of a call.
        stops_at: The call at which the process stops itself.
    """

    def __init__(self, folder: Path, wait_s: float, stops_at: int | None) -> None:
        self._folder, self._wait_s, self._stops_at, self._calls = folder, wait_s, stops_at, 0

    def __call__(self, batch: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        self._calls += 1
        if self._calls == self._stops_at:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(self._wait_s)
        rows = batch["id"]
        (self._folder / f"call-{time.time_ns()}").write_text(str(len(rows)))
        return {"id": rows, "vector": _vectors_of(rows)}


def embed(folder: Path, wait_s: float, stops_at: int | None = None, checkpoints: Path | None = None) -> None:
    import ray.data
    from ray.data.checkpoint import CheckpointConfig

    _quiet()
    context = ray.data.DataContext.get_current()
    if checkpoints is not None:
        context.checkpoint_config = CheckpointConfig("id", str(checkpoints), delete_checkpoint_on_success=False)
    (folder / "calls").mkdir(exist_ok=True)
    read = ray.data.range(ROWS, override_num_blocks=ROWS // BLOCK)
    made = read.map_batches(
        MadeUpEmbedder,
        fn_constructor_args=(folder / "calls", wait_s, stops_at),
        batch_size=BLOCK,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=1,
    )
    made.write_parquet(str(folder / "vectors"))


def _quiet() -> None:
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False


def _vectors_of(rows: NDArray[np.int64]) -> NDArray[np.float16]:
    draw = np.random.default_rng(int(rows[0]))
    return draw.standard_normal((len(rows), WIDTH)).astype(np.float16)


def _read(folder: Path) -> set[tuple[int, bytes]]:
    """Return the ids and vectors of all files."""
    import ray.data

    batches = ray.data.read_parquet(str(folder / "vectors")).iter_batches(batch_format="numpy")
    return {
        (int(row), np.asarray(vector).tobytes())
        for batch in batches
        for row, vector in zip(batch["id"], batch["vector"], strict=True)
    }


def _rows(file: Path) -> int:
    """Return the number of a file's rows; 0 if its writer was killed before its end."""
    import pyarrow
    import pyarrow.parquet

    try:
        return int(pyarrow.parquet.read_metadata(file).num_rows)
    except pyarrow.ArrowInvalid:
        return 0


def _calls(folder: Path) -> list[int]:
    return [int(file.read_text()) for file in (folder / "calls").iterdir()]


def _wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
