"""Measures this machine's rates in a separate process, with the memory allocator of training processes.

`calibration.py` starts it, writes a JSON request to its standard input and reads the JSON answer from its standard output.
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
"""Most layers to measure of a backbone; all of its layers are equal."""
_SECONDS = 0.5
"""Least time for each measurement."""


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

    import distcse.experiments.distillation.experiment  # noqa: F401  (as in a training process)

    process = anonymous_bytes()
    found: dict[str, Any] = {
        "process": process,
        "matmul": {p: _matmul(timed, device, p, request["width"], request["inner"]) for p in request["precisions"]},
        "bandwidth": _bandwidth(timed, device),
        "optimizer": _optimizer(timed, device),
    }
    found["passes"] = [_passes(timed, device, spec) for spec in request["passes"]]
    found["table_read"], found["disk"] = _table(timed, Path(request["folder"]), request["width"])
    found["sort"] = _sort(timed)
    found["host_matmul"] = _host_matmul(timed)
    found["busy"] = timed.busy
    return found


class _Clock:
    """Times a function: the median of several calls.

    One CPU thread is timed by its CPU time, which other load on the machine hardly changes; threads and GPUs by wall time.
    """

    def __init__(self, device: Any, threads: int) -> None:
        self._device = device
        self._by_cpu = device.type == "cpu" and threads == 1
        self._cpu = self._wall = 0.0

    @property
    def busy(self) -> float:
        """Fraction of the time in which other processes used this one's CPU; 0 if timed by wall time."""
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
        from distcse.device import gpu_module, is_gpu

        if is_gpu(self._device):
            gpu_module(self._device).synchronize()


def anonymous_bytes() -> int:
    """Return this process's resident memory without mapped files, whose pages the kernel can drop at any time."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def _half(precision: str, device: Any) -> Any:
    import torch

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return torch.autocast(device.type, kinds[precision]) if precision in kinds else nullcontext()


def _matmul(timed: _Clock, device: Any, precision: str, width: int, inner: int) -> float:
    """Measure the FLOP/s of the backbone's widest linear map."""
    import torch

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    rows, weights = (
        torch.randn(_BUDGET, width, device=device).to(kind),
        torch.randn(width, inner, device=device).to(kind),
    )
    return 2.0 * _BUDGET * width * inner / timed(lambda: rows @ weights)


def _bandwidth(timed: _Clock, device: Any) -> float:
    """Measure the bytes per second of a copy, read and written."""
    import torch

    numbers = torch.ones(32 * 2**20, device=device)
    other = torch.empty_like(numbers)
    return 2 * numbers.nbytes / timed(lambda: other.copy_(numbers))


def _optimizer(timed: _Clock, device: Any) -> float:
    """Measure the bytes per second of clipping and AdamW, at 40 bytes per parameter."""
    import torch

    parameters = [torch.nn.Parameter(torch.randn(1000, 1000, device=device)) for _ in range(16)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return 40.0 * sum(parameter.numel() for parameter in parameters) / timed(update)


def _passes(timed: _Clock, device: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Measure the seconds of a pass at two lengths, of one without layers, and of one with 4 tokens."""
    import torch

    layers = min(spec["layers"], _DEEPEST)
    model = _backbone(spec, layers).to(device)
    times = []
    for length in spec["lengths"]:
        texts = max(1, _BUDGET // length)
        times.append([texts, length, timed(_step(model, texts, length, device, spec))])
    texts, length = max(1, _BUDGET // spec["lengths"][-1]), spec["lengths"][-1]
    tiny = timed(_step(model, 1, 4, device, spec))
    embeddings_only = _backbone(spec, 0).to(device)
    return {
        **spec,
        "measured_layers": layers,
        "times": times,
        "embedding": [texts, length, timed(_step(embeddings_only, texts, length, device, spec))],
        "tiny": tiny - timed(_step(embeddings_only, 1, 4, device, spec)),
        "threads": torch.get_num_threads(),
    }


def _backbone(spec: dict[str, Any], layers: int) -> Any:
    from transformers import AutoConfig, AutoModel

    from distcse.models.fast.dropout import fast_dropout
    from distcse.models.layers import keep_layers
    from distcse.models.loading import attention_of, set_dropout

    config = AutoConfig.from_pretrained(spec["folder"]) if spec["folder"] else AutoConfig.for_model(**spec["config"])
    set_dropout(config, 0.1 if spec["dropout"] else 0.0)
    model: Any = AutoModel.from_config(config, attn_implementation=attention_of(spec["max_length"]) or "sdpa")
    if getattr(model, "pooler", None) is not None:
        model.pooler = None
    keep_layers(model, range(layers))
    fast_dropout(model)
    return model.train(spec["training"])


def _step(model: Any, texts: int, length: int, device: Any, spec: dict[str, Any]) -> Callable[[], None]:
    import torch

    ids = torch.randint(1, model.config.vocab_size, (texts, length), device=device)
    mask = torch.ones_like(ids)

    def train() -> None:
        with _half(spec["precision"], device):
            output = model(input_ids=ids, attention_mask=mask).last_hidden_state
        output.float().mean().backward()
        model.zero_grad(set_to_none=True)

    def forward() -> None:
        with torch.no_grad(), _half(spec["precision"], device):
            model(input_ids=ids, attention_mask=mask)

    return train if spec["training"] else forward


def _table(timed: _Clock, parent: Path, width: int) -> tuple[float, float]:
    """Measure bytes per second of random rows read from a table as normalized fp32, and of a shard written and synced."""
    import numpy as np

    from distcse.teachers.table import EmbeddingTable, TableIdentity

    rows = 32 * 2**20 // (2 * width)
    with TemporaryDirectory(dir=parent) as folder:
        identity = TableIdentity("probe", "probe", rows, None, None, "", "fp32", rows)
        table = EmbeddingTable.locate(Path(folder), identity)
        vectors = np.random.default_rng(0).standard_normal((rows, width), dtype=np.float32)
        began = time.perf_counter()
        table.write_shard(0, vectors)
        written = 2 * rows * width / (time.perf_counter() - began)
        ids = np.random.default_rng(1).integers(0, rows, 8 * 128)
        return 2 * len(ids) * width / timed(lambda: table.vectors(ids)), written


def _sort(timed: _Clock) -> float:
    """Measure the numbers per second that one thread ranks."""
    import numpy as np

    from distcse.rank_space.space import rank_vectors

    numbers = np.random.default_rng(0).standard_normal((16, 10_000), dtype=np.float32)
    return numbers.size / timed(lambda: rank_vectors(numbers))


def _host_matmul(timed: _Clock) -> float:
    """Measure the FLOP/s of NumPy on one step's similarity lists."""
    import numpy as np

    vectors = np.random.default_rng(0).standard_normal((4, 128, 384), dtype=np.float32)
    flops = 2.0 * 4 * 128 * 128 * 384
    return flops / timed(lambda: np.matmul(vectors, vectors.transpose(0, 2, 1)))


if __name__ == "__main__":
    sys.exit(main())
