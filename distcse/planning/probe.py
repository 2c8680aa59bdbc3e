"""What this machine does: measured in a process of its own, with the allocator that training processes have.

Read by `calibration.py`, which writes a request on standard input and takes the answer from standard output.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

_BUDGET = 1024
"""Tokens of a measured pass."""
_DEEPEST = 4
"""Layers that are measured of a deeper backbone: they are all alike."""
_SECONDS = 0.5
"""Spent on each measurement, at least."""


def main() -> int:
    """Answer the request on standard input."""
    json.dump(_measure(json.load(sys.stdin)), sys.stdout)
    return 0


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    import torch

    threads = int(request["threads"])
    torch.set_num_threads(threads)
    device = torch.device(request["device"])
    timed = _Clock(device, threads)
    from transformers import BertModel  # noqa: F401

    import distcse.experiments.distillation.run  # noqa: F401  (a process that trains has all of it in memory)

    process = anonymous_bytes()
    found: dict[str, Any] = {
        "process": process,
        "matmul": {p: _matmul(timed, device, p, request["width"], request["inner"]) for p in request["precisions"]},
        "bandwidth": _bandwidth(timed, device),
        "optimiser": _optimiser(timed, device),
    }
    found["passes"] = [_passes(timed, device, asked) for asked in request["passes"]]
    found["table_read"], found["disk"] = _table(timed, Path(request["folder"]), request["width"])
    found["sort"] = _sort(timed)
    found["host_matmul"] = _host_matmul(timed)
    found["busy"] = timed.busy
    return found


class _Clock:
    """Seconds of a piece of work: the median of several. One thread is timed by the CPU it used, so that what else the machine
    does counts little; several threads and GPUs by the wall."""

    def __init__(self, device: Any, threads: int) -> None:
        self._device = device
        self._by_cpu = device.type == "cpu" and threads == 1
        self._cpu = self._wall = 0.0

    @property
    def busy(self) -> float:
        """Share of the time in which this process did not run, though it could: others did."""
        return max(0.0, 1.0 - self._cpu / self._wall) if self._wall and self._by_cpu else 0.0

    def __call__(self, work: Callable[[], Any], least: int = 3) -> float:
        work()
        self._wait()
        times: list[float] = []
        began = time.perf_counter()
        while len(times) < least or time.perf_counter() - began < _SECONDS:
            cpu, wall = time.process_time(), time.perf_counter()
            work()
            self._wait()
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            self._cpu += cpu
            self._wall += wall
            times.append(cpu if self._by_cpu else wall)
        return statistics.median(times)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            import torch

            torch.cuda.synchronize()


def anonymous_bytes() -> int:
    """Memory of this process that is no file's, now; files that are mapped can be given back at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _half(precision: str, device: Any) -> Any:
    import torch

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, kinds[precision]) if precision in kinds else nullcontext()


def _matmul(timed: _Clock, device: Any, precision: str, width: int, inner: int) -> float:
    """FLOP/s of the backbone's own widest map."""
    import torch

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    rows, weights = (
        torch.randn(_BUDGET, width, device=device).to(kind),
        torch.randn(width, inner, device=device).to(kind),
    )
    return 2.0 * _BUDGET * width * inner / timed(lambda: rows @ weights)


def _bandwidth(timed: _Clock, device: Any) -> float:
    """Bytes a second, read and written."""
    import torch

    numbers = torch.ones(32 * 2**20, device=device)
    other = torch.empty_like(numbers)
    return 2 * numbers.nbytes / timed(lambda: other.copy_(numbers))


def _optimiser(timed: _Clock, device: Any) -> float:
    """Bytes a second of clipping and AdamW: 40 for each parameter."""
    import torch

    parameters = [torch.nn.Parameter(torch.randn(1000, 1000, device=device)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimiser = torch.optim.AdamW(parameters, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()

    return 40.0 * sum(parameter.numel() for parameter in parameters) / timed(update)


def _passes(timed: _Clock, device: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a pass at two lengths, without layers, and of hardly any tokens; memory of the longer training step."""
    import torch

    layers = min(asked["layers"], _DEEPEST)
    whole = _backbone(asked, layers).to(device)
    times = []
    for length in asked["lengths"]:
        texts = max(1, _BUDGET // length)
        times.append([texts, length, timed(_step(whole, texts, length, device, asked))])
    texts, length = max(1, _BUDGET // asked["lengths"][-1]), asked["lengths"][-1]
    tiny = timed(_step(whole, 1, 4, device, asked))
    without = _backbone(asked, 0).to(device)
    return {
        **asked,
        "measured_layers": layers,
        "times": times,
        "embedding": [texts, length, timed(_step(without, texts, length, device, asked))],
        "tiny": tiny - timed(_step(without, 1, 4, device, asked)),
        "threads": torch.get_num_threads(),
    }


def _backbone(asked: dict[str, Any], layers: int) -> Any:
    from transformers import AutoConfig, AutoModel

    from distcse.models.fast.dropout import fast_dropout
    from distcse.models.layers import keep_layers
    from distcse.models.loading import attention_of, set_dropout

    config = AutoConfig.from_pretrained(asked["folder"]) if asked["folder"] else AutoConfig.for_model(**asked["config"])
    set_dropout(config, 0.1 if asked["dropout"] else 0.0)
    model: Any = AutoModel.from_config(config, attn_implementation=attention_of(asked["max_length"]) or "sdpa")
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    keep_layers(model, range(layers))
    fast_dropout(model)
    return model.train(asked["training"])


def _step(model: Any, texts: int, length: int, device: Any, asked: dict[str, Any]) -> Callable[[], None]:
    import torch

    ids = torch.randint(1, model.config.vocab_size, (texts, length), device=device)
    mask = torch.ones_like(ids)

    def train() -> None:
        with _half(asked["precision"], device):
            output = model(input_ids=ids, attention_mask=mask).last_hidden_state
        output.float().mean().backward()
        model.zero_grad(set_to_none=True)

    def forward() -> None:
        with torch.no_grad(), _half(asked["precision"], device):
            model(input_ids=ids, attention_mask=mask)

    return train if asked["training"] else forward


def _table(timed: _Clock, folder: Path, width: int) -> tuple[float, float]:
    """(bytes a second of rows gathered at random, widened and normalised; bytes a second written and flushed)."""
    import numpy as np

    from distcse.teachers.table import EmbeddingTable, TableIdentity

    rows = 32 * 2**20 // (2 * width)
    with TemporaryDirectory(dir=folder) as beside:
        identity = TableIdentity("probe", "probe", rows, None, None, "", "fp32", rows)
        table = EmbeddingTable.locate(Path(beside), identity)
        vectors = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
        began = time.perf_counter()
        table.write_shard(0, vectors)
        written = 2 * rows * width / (time.perf_counter() - began)
        ids = np.random.default_rng(1).integers(0, rows, 8 * 128)
        return 2 * len(ids) * width / timed(lambda: table.vectors(ids)), written


def _sort(timed: _Clock) -> float:
    """Numbers a second that are ranked."""
    import numpy as np

    from distcse.rank_space.space import rank_vectors

    numbers = np.random.default_rng(0).standard_normal((16, 10_000), dtype=np.float32)
    return numbers.size / timed(lambda: rank_vectors(numbers))


def _host_matmul(timed: _Clock) -> float:
    """FLOP/s of NumPy on the lists of one step."""
    import numpy as np

    vectors = np.random.default_rng(0).standard_normal((4, 128, 384), dtype=np.float32)
    flops = 2.0 * 4 * 128 * 128 * 384
    return flops / timed(lambda: np.matmul(vectors, vectors.transpose(0, 2, 1)))


if __name__ == "__main__":
    sys.exit(main())
