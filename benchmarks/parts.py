"""Rows 7, 13, 14, 15 and 33: parts of the student's step, and ways through it, against their plain ones.

    python -m benchmarks.parts --data ../shared/data [--quick] [--rows 13 14]

Two ways of a step are compared on one batch, loss and gradient, before they are timed.
"""

from __future__ import annotations

import copy
import importlib
import multiprocessing
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from benchmarks.material import MINILM, config_of, list_recipe, prepared, stand_in, table_sources
from benchmarks.options import Options, script
from benchmarks.plain import whole_last_layer
from benchmarks.protocol import (
    Duration,
    Effort,
    Figure,
    Report,
    Sampler,
    counted,
    interleave,
    machine,
    of_ratio,
    of_spread,
    timed,
)
from benchmarks.step import RANKCSE, SIMCSE, TOLERANCE
from distcse.losses import gather_views, jensen_shannon, list_mle, list_net
from distcse.runs.distillation.distillation_task import TrainSpec
from distcse.training.engines.fused_adamw import FusedAdamW
from tests.counting import LargestTensor, dispatched
from tests.training_step import TrainingStep
from tests.wikipedia import wiki_file


def measure(options: Options) -> Report:
    """All rows of this script."""
    effort = Effort(pairs=options.pairs, shortest=0.0 if options.quick else 0.5, warmups=1 if options.quick else 3)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        if options.wants(13):
            figures += last_layers(Path(folder) / "last", options, effort)
        if options.wants(33):
            figures += gradient_cache(Path(folder) / "cache", options, effort)
        if options.wants(14):
            figures += losses(effort, (16, 32) if options.quick else (128, 1024))
        if options.wants(15):
            figures += [optimizer(effort, "tiny" if options.quick else "base")]
        if options.wants(7):
            figures += [host_work(Path(folder) / "dispatch", options)]
    return Report("parts", machine(), {"pairs": options.pairs, "threads": 1}, figures, options.quick)


def last_layers(folder: Path, options: Options, effort: Effort) -> list[Figure]:
    """Row 13: a SimCSE step with all of the last layer over one with [CLS] alone, from the same weights."""
    found = []
    for name, size, n in (("MiniLM", "minilm", 32), ("base", "base", 4)):
        student = MINILM if size == "minilm" and not options.quick else None
        size, n = ("tiny", 8) if options.quick else (size, n)
        student = student or str(stand_in(folder / size, size))
        recipe = list_recipe(folder / name, wiki_file(options.data), student, [], SIMCSE, n, 3 * n)
        ways = {way: TrainingStep(prepared(recipe)[0], []) for way in ("one token", "all tokens")}
        encoder = ways["all tokens"].task.model.encoder
        encoder.forward = partial(whole_last_layer, encoder)  # type: ignore[method-assign]
        same_or_stop(ways["one token"], ways["all tokens"])
        rounds = interleave({way: timed(step) for way, step in ways.items()}, effort.at_least(25), again="one token")
        found.append(of_ratio(13, name, rounds, "all tokens", "one token", f"{size} student, N = {n}, SimCSE, fp32"))
    return found


def same_or_stop(one: TrainingStep, other: TrainingStep) -> None:
    """Compare two ways of distcse's own step on one batch without dropout; `SystemExit` where they differ."""
    results = []
    for step in (one, other):
        step.task.model.eval()
        loss = step.loss()[0]
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in step.task.model.parameters() if p.grad is not None])
        step.task.model.zero_grad(set_to_none=True)
        results.append((loss.item(), gradient))
    (mine, first), (plain, second) = results
    apart = abs(mine - plain) / abs(plain), float((first - second).norm() / second.norm())
    print(f"both ways: loss {mine:.6f}, apart by {apart[0]:.1e}; gradient by {apart[1]:.1e}", flush=True)
    if apart[0] > TOLERANCE or apart[1] > 10 * TOLERANCE:
        raise SystemExit("the two ways do not compute the same; nothing is timed")


def gradient_cache(folder: Path, options: Options, effort: Effort) -> list[Figure]:
    """Row 33: what chunks cost compared with one pass, and what a step holds at two lengths of lists."""
    n, chunk, lists = (16, 4, (16, 32)) if options.quick else (64, 16, (256, 2048))
    size = "tiny" if options.quick else "minilm"
    student = str(stand_in(folder / "student", "tiny")) if options.quick else MINILM
    file = wiki_file(options.data)

    def spec(name: str, length: int, small: bool = False, **training: Any) -> TrainSpec:
        model = {"max_length": 16, **({} if options.quick else {"layers": [1, 3, 5]})} if small else {}
        sections = {"student": model, "training": training}
        return prepared(list_recipe(folder / name, file, student, [], SIMCSE, length, 2 * length, **sections))[0]

    ways = {
        "plain": TrainingStep(spec("plain", n), []),
        "chunks": TrainingStep(spec("chunks", n, grad_cache_chunk=chunk), []),
    }
    same_or_stop(ways["chunks"], ways["plain"])
    rounds = interleave({way: settled(step) for way, step in ways.items()}, effort, again="plain")
    context, memory = multiprocessing.get_context("spawn"), []
    for length in lists:
        with context.Pool(1) as pool_of_one:
            memory.append(
                pool_of_one.apply(
                    _memory_held, (spec(f"lists of {length}", length, small=True, grad_cache_chunk=2 * chunk),)
                )
            )
    at, terms = f"{size} student", {f"N = {length}, MB": each / 1e6 for length, each in zip(lists, memory, strict=True)}
    grown = memory[1] / memory[0]
    return [
        of_ratio(33, "cost", rounds, "chunks", "plain", f"{at}, N = {n}, chunks of {chunk}"),
        Figure(
            33,
            "memory, N = 2048 / N = 256",
            *(grown,) * 3,
            setting="three layers of it, SimCSE, 16 tokens",
            terms=terms,
        ),
    ]


def settled(step: TrainingStep) -> Sampler:
    """Samples a step that follows one like it: the first after a step in chunks allocates memory again that those released."""
    measured = timed(step)

    def sample(repeats: int) -> Duration:
        step()
        return measured(repeats)

    return sample


def _memory_held(spec: TrainSpec) -> int:
    """Most bytes that two steps hold beyond the imports."""
    torch.set_num_threads(1)
    importlib.import_module("transformers.models.bert.modeling_bert")
    before = psutil.Process().memory_info().rss
    step = TrainingStep(spec, [])
    for _ in range(2):
        step()
    return _highest() - before


def _highest() -> int:
    """Bytes of this process at its highest. `ru_maxrss` would not do: a process that is spawned inherits it."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def losses(effort: Effort, sizes: tuple[int, ...]) -> list[Figure]:
    """Row 14: what is computed from two views of 768 numbers and the teachers' lists."""
    found: list[Figure] = []
    for full_size, n in zip((128, 1024), sizes, strict=True):
        all_terms = terms_of(n)
        rounds = interleave({"losses": timed(all_terms)}, effort)
        milliseconds = rounds.of(lambda s: 1000 * s["losses"])
        found.append(of_spread(14, f"N = {full_size}", milliseconds, f"N = {n}, 768 wide"))
    with LargestTensor() as seen:
        terms_of(n)()
    return [*found, counted(14, "largest tensor of the losses / N²", seen.numbers / n**2, f"N = {n}, 768 wide")]


def terms_of(n: int, width: int = 768) -> Any:
    """Cosines, JS, ListNet and ListMLE of random views, forward and backward."""
    draw = torch.Generator().manual_seed(n)
    z1, z2 = (torch.randn(n, width, generator=draw).requires_grad_() for _ in range(2))
    lists = torch.rand(n, n, generator=draw)

    def all_terms() -> tuple[Tensor, ...]:
        views = gather_views(z1, z2)
        loss = jensen_shannon(views.similarities / 0.05, views.reverse / 0.05).mean()
        loss = loss + list_net(views.similarities, lists, 0.05, 0.025).mean()
        loss = loss + list_mle(views.similarities, lists, 0.05).mean()
        return torch.autograd.grad(loss, (z1, z2))

    return all_terms


def optimizer(effort: Effort, size: str) -> Figure:
    """Row 15: an update of all weights of an encoder, by AdamW as PyTorch gives it and as distcse asks for it."""
    from transformers import BertModel

    from distcse.recipe import LoopSection

    model = BertModel(config_of(size), add_pooling_layer=False)
    other = copy.deepcopy(model)
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.grad = torch.full_like(parameter, 1e-3)
    fused = FusedAdamW(dict(model.named_parameters()), LoopSection(gradient_clipping=0.0))
    default = torch.optim.AdamW(other.parameters(), lr=3e-5, weight_decay=0.0)
    ways = {"fused": timed(lambda: fused.step(3e-5)), "default": timed(default.step)}
    rounds = interleave(ways, effort.at_least(40), again="fused")
    return of_ratio(15, "BERT-base", rounds, "default", "fused", f"{size} size")


def host_work(folder: Path, options: Options) -> Figure:
    """Row 7: operations a step of a BERT-base student hands to PyTorch, whatever its batch size."""
    size = "tiny" if options.quick else "base"
    small = str(stand_in(folder / "teacher", "tiny"))
    teacher = {"backbone": small, "pooling": "cls", "max_length": 32}
    student = str(stand_in(folder / "student", size))
    spec, tables = prepared(list_recipe(folder, wiki_file(options.data), student, [teacher], RANKCSE, 4, 64))
    step = TrainingStep(spec, table_sources(spec, tables))
    step()
    return counted(7, "aten calls, BERT-base step", dispatched(step), f"{size} student")


if __name__ == "__main__":
    script("benchmarks.parts", __doc__, measure)
