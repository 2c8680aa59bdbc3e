"""The rows with a GPU column, on one CUDA device: one command, under eight minutes, no Ray, no data, no downloads.

    python -m benchmarks.gpu                        a report in benchmarks/results/
    python -m benchmarks.gpu --device cpu --tiny    whether this script works; none of its figures counts

Random weights of BERT-base's and -large's shape, random ids of real lengths (lengths.json: 20,000 sentences of Wikipedia, cut at
32). CUDA events over blocks of steps, the ways interleaved. What distcse has no GPU code for yet is named and not run. Exit
status 2: no CUDA device here.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel

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
)
from benchmarks.reference_style import FrozenTeacher, PublicLoop, live_lists, rankcse_loss, rankencoder
from benchmarks.targets import ROWS
from distcse.data import Tokens
from distcse.experiments.distillation.model import Batch, StudentModel, StudentOutput
from distcse.losses import TeacherOutputs, build_objective, gather_views, jensen_shannon, list_net, mix_lists
from distcse.losses import list_mle as our_list_mle
from distcse.models import Encoder, build_projection
from distcse.models.batching import by_length
from distcse.models.loading import load_backbone
from distcse.models.precision import arithmetic, frozen_weight_dtype
from distcse.rank_space import DeviceRankSpace, pair_similarities
from distcse.rank_space.device import histogram_ranks, products, sorted_ranks
from distcse.recipe import LoopSection, ObjectiveSection
from distcse.recipe.section import Precision
from distcse.trainer.cuda_graphs import CudaGraphs, CudaGraphStep
from distcse.trainer.engines import TorchEngine
from distcse.trainer.engines.fused_adamw import FusedAdamW
from distcse.trainer.task import StepInputs
from distcse.trainer.trainer import training_step

SHAPES = {"base": (12, 768, 12), "large": (24, 1024, 16), "tiny": (2, 64, 4)}
LENGTHS = Path(__file__).with_name("lengths.json")
RANKCSE: dict[str, Any] = {"tau1": 0.05, "rank": {"form": "list_net", "tau2": 0.05, "tau3": 0.025}}
RANKENCODER: dict[str, Any] = {
    "tau1": 0.05,
    "consistency": None,
    "rank": None,
    "rank_regression": {"weight": 0.05, "lower": 0.5, "upper": 0.9999},
}
SIMCSE: dict[str, Any] = {"tau1": 0.05, "consistency": None, "rank": None}
PEAK = 790e12
"""bf16 operations a second of an H200, what others measured (performance.md §1): the unit of MFU here."""
SENTENCES, EPOCHS = 1_000_000, 4
BUDGET = 7.5 * 60
"""Seconds; rows that would begin later are named as not run."""


class Bench:
    """One device, its models and its sentences.

    Args:
        device: Where.
        tiny: Two layers in place of base and large.
        call_by_call: Steps are not recorded as CUDA graphs.
    """

    def __init__(self, device: torch.device, tiny: bool, call_by_call: bool = False) -> None:
        self.device, self.tiny = device, tiny
        self.records = device.type == "cuda" and not call_by_call
        self.n = 16 if tiny else 128
        self.effort = Effort(pairs=2, warmups=1, shortest=0.0) if tiny else Effort(pairs=5, warmups=2, shortest=0.0)
        self.steps = 2 if tiny else 40
        self.draw = np.random.default_rng(0)
        counts = json.loads(LENGTHS.read_text())["truncated_32"]
        self._lengths = np.array([int(length) for length in counts]), np.array(list(counts.values()), dtype=np.float64)

    def shape(self, name: str) -> tuple[int, int, int]:
        return SHAPES["tiny" if self.tiny else name]

    def model(self, name: str, seed: int = 0) -> nn.Module:
        """A BERT of a shape with random weights."""
        layers, width, heads = self.shape(name)
        torch.manual_seed(seed)
        config = BertConfig(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width
        )
        return BertModel(config, add_pooling_layer=False).to(self.device)

    def lengths(self, count: int) -> np.ndarray:
        """Lengths of `count` random sentences."""
        values, weights = self._lengths
        return self.draw.choice(values, count, p=weights / weights.sum())

    def batch(self, count: int, width: int = 32) -> tuple[Tensor, Tensor]:
        """(B, 32) random ids and mask, as a random batch of real sentences is: padded to the cap."""
        lengths = torch.from_numpy(self.lengths(count))
        mask = (torch.arange(width)[None, :] < lengths[:, None]).long()
        ids = torch.randint(999, 30000, (count, width)) * mask
        return ids.to(self.device), mask.to(self.device)

    def sampler(self, call: Callable[[], object], steps: int | None = None) -> Sampler:
        """Seconds of a call by CUDA events; by the clock where there is no CUDA."""
        count = steps or self.steps

        def sample(repeats: int) -> Duration:
            if self.device.type != "cuda":
                begun = time.perf_counter()
                for _ in range(count * repeats):
                    call()
                seconds = (time.perf_counter() - begun) / (count * repeats)
                return Duration(seconds, seconds)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            host = time.perf_counter()
            begin.record()
            for _ in range(count * repeats):
                call()
            end.record()
            issued = time.perf_counter() - host
            torch.cuda.synchronize()
            # "wall" is the device's time, "cpu" what the host needed to hand the work over.
            return Duration(begin.elapsed_time(end) / 1000 / (count * repeats), issued / (count * repeats))

        return sample

    def autocast(self, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if dtype is None else torch.autocast(self.device.type, dtype)


class Student:
    """distcse's own model, engine and step on this device, with teachers' vectors that lie there too.

    Args:
        bench: Where.
        shape: Of the student.
        objective: Its terms.
        precision: Of the engine.
        n: Sentences of a batch; left out, the bench's.
        graphs: Steps are recorded as CUDA graphs where there is CUDA.
    """

    def __init__(
        self,
        bench: Bench,
        shape: str,
        objective: dict[str, Any],
        precision: Precision,
        n: int | None = None,
        graphs: bool = False,
    ) -> None:
        self.teacher_lists: Callable[[slice], Tensor] | None = None
        """Maps rows of the eight batches to the teachers' lists; None for SimCSE."""
        encoder = Encoder(bench.model(shape, seed=1), None, "cls", 32)
        self.model = StudentModel(encoder, build_projection("tanh_mlp", encoder.dimension))
        self.engine = TorchEngine(self.model, LoopSection(precision=precision), None)
        self.objective = build_objective(ObjectiveSection.model_validate(objective))
        self.batches = [bench.batch(n or bench.n) for _ in range(8)]
        self.step, self.parts = 0, 1
        recorded = graphs and bench.records
        self._take = CudaGraphStep(training_step, CudaGraphs()) if recorded else training_step

    def __call__(self) -> Tensor:
        """One step; its loss, on the device."""
        self.model.train()
        terms = self._take(self.engine, self, self.prepare_batch(self.step, self.engine.device), 3e-5)
        self.step += 1
        return terms["loss"]

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs:
        """See `TrainingTask`."""
        ids, mask = self.batches[step % 8]
        streams = zip(ids.chunk(self.parts), mask.chunk(self.parts), strict=True)
        batch = Batch([(Tokens(*tokens), 8 * step + number) for number, tokens in enumerate(streams)])
        here = step % 8
        lists = self.teacher_lists(slice(here * len(ids), (here + 1) * len(ids))) if self.teacher_lists else None
        return StepInputs(batch, TeacherOutputs(lists))

    def compute_loss(self, inputs: TeacherOutputs, output: StudentOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """See `TrainingTask`."""
        return self.objective(gather_views(output.z1, output.z2), inputs)

    def loss_of_next(self) -> Tensor:
        """The next step's loss, without an update."""
        inputs = self.prepare_batch(self.step, self.engine.device)
        return self.compute_loss(inputs.loss_inputs, self.engine.forward(inputs.model_inputs))[0]


class PublicStudent(PublicLoop):
    """The reference style's student on this device, over the batches of ours, with its weights."""

    def __init__(self, bench: Bench, student: Student) -> None:
        self._bench, self._batches = bench, student.batches
        self.model = copy.deepcopy(student.model.encoder.backbone)
        self.projection = copy.deepcopy(student.model.projection)
        super().__init__([self.model], [*self.model.parameters(), *self.projection.parameters()], lr=3e-5)

    def tokens(self) -> tuple[Tensor, Tensor]:
        """Ids and mask of the step's batch, each sentence twice."""
        ids, mask = self._batches[self.step % 8]
        return ids.repeat_interleave(2, 0), mask.repeat_interleave(2, 0)

    def views(self, ids: Tensor, mask: Tensor, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """(N, d) of either dropout noise, under autocast where it is given a type."""
        with self._bench.autocast(dtype):
            hidden = self.model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
            views = self.projection(hidden).float().view(len(ids) // 2, 2, -1)
        return views[:, 0], views[:, 1]


class Reference(PublicStudent):
    """The reference style's RankCSE step."""

    def __init__(
        self, bench: Bench, student: Student, shapes: tuple[str, str], dtype: torch.dtype | None, half_teachers: bool
    ) -> None:
        super().__init__(bench, student)
        self._dtype = dtype
        kinds = zip(shapes, (2, 3), (1.0, 2.0), strict=True)
        self.teachers = [FrozenTeacher(self._bench.model(s, seed).eval(), "cls", alpha) for s, seed, alpha in kinds]
        self._teacher_dtype = dtype if half_teachers else None

    def loss(self) -> Tensor:
        """The step's loss, without an update."""
        ids, mask = self.tokens()
        with self._bench.autocast(self._teacher_dtype):
            lists = live_lists(self.teachers, ids, mask).float()
        return rankcse_loss(*self.views(ids, mask, self._dtype), lists, 0.05, 0.05, 0.025)


def cosines_of(reference: Reference, half: bool = True) -> Callable[[slice], Tensor]:
    """Lists of some rows of the eight batches, from the teachers' unit vectors, as a cache would hold them."""
    tables = []
    for teacher in reference.teachers:
        vectors = unit_vectors(teacher.model, reference._batches)
        tables.append(vectors.half() if half else vectors)
    # On the device once: as Python numbers they would be copied there in every step, and the host would wait.
    weights = torch.tensor([1.0, 2.0], dtype=torch.float64, device=tables[0].device)

    def lists(rows: slice) -> Tensor:
        found = [table[rows].float() for table in tables]
        return mix_lists(torch.stack([vectors @ vectors.T for vectors in found]), weights)

    return lists


@torch.no_grad()
def unit_vectors(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[CLS] vectors of all batches, of length 1."""
    vectors = [model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0] for ids, mask in batches]
    return torch.nn.functional.normalize(torch.cat(vectors), dim=1)


def steps(bench: Bench) -> Iterator[Figure]:
    """Rows 1 to 3, 5, 6 and the host's time of 7; ours are CUDA graphs, compared with the same steps in eager mode."""
    student = Student(bench, "base", RANKCSE, "bf16", graphs=True)
    by_call = Student(bench, "base", RANKCSE, "bf16")
    by_call.batches = student.batches
    live = Reference(bench, student, ("base", "large"), torch.bfloat16, half_teachers=True)
    verbatim = Reference(bench, student, ("base", "large"), None, half_teachers=False)
    verbatim.teachers = live.teachers
    check(bench, live)
    student.teacher_lists = by_call.teacher_lists = cosines_of(live)
    simcse = Student(bench, "base", SIMCSE, "bf16", graphs=True)
    equal_steps(student, by_call)
    ways = {"ours": student, "by call": by_call, "SimCSE": simcse, "live": live, "verbatim": verbatim}
    few = {"live": bench.steps // 4 or 1, "verbatim": bench.steps // 8 or 1}
    samplers = {name: bench.sampler(way, few.get(name)) for name, way in ways.items()}  # type: ignore[arg-type]
    rounds = interleave(samplers, bench.effort, again="ours")
    steps_are = "recorded steps" if bench.records else "steps call by call"
    at = f"base, N = {bench.n}, {steps_are}; batches and teachers' vectors on the device, where distcse brings them from the host"
    yield of_ratio(1, "bf16", rounds, "ours", "SimCSE", at, "wall")
    yield of_ratio(2, "bf16, live teachers under autocast", rounds, "live", "ours", at, "wall")
    yield of_ratio(3, "bf16", rounds, "verbatim", "ours", at, "wall")
    host = rounds.of(lambda s: 1000 * s["ours"], "cpu")
    call_by_call = {
        "by call, host ms": 1000 * rounds.of(lambda s: s["by call"], "cpu").median,
        "by call / ours": rounds.ratio("by call", "ours", "wall").median,
    }
    yield of_spread(7, "host time a step", host, at, **call_by_call)
    tokens, (layers, width, _) = int(sum(mask.sum() for _, mask in student.batches)) / 8, bench.shape("base")
    work = 2 * 3 * tokens * layers * (24 * width**2 + 4 * (tokens / bench.n) * width)
    mfu = rounds.of(lambda s: 100 * work / s["ours"] / PEAK, "wall")
    yield of_spread(6, "MFU base, N = 128", mfu, at, rounds.noise("wall"))
    rates, updates = encode_rates(bench), SENTENCES // bench.n * EPOCHS
    once = SENTENCES * sum(1 / rate for rate in rates.values())
    scores = updates / 125 * 3000 / encode_rate(bench, "base", 3000, "fp32")
    run = rounds.of(lambda s: (updates * s["ours"] + once + scores) / 60, "wall")
    terms = {
        "step ms": 1000 * rounds.of(lambda s: s["ours"], "wall").median,
        "teacher pass s": once,
        "dev scores s": scores,
    }
    yield of_spread(5, "minutes", run, at, rounds.noise("wall"), **terms)


def equal_steps(recorded: Student, by_call: Student) -> None:
    """Eight steps of each, from the same weights and under the same noise; `RuntimeError` where they do not learn the same."""
    both = [torch.stack([step() for _ in range(8)]) for step in (recorded, by_call)]
    apart = float((both[0] / both[1] - 1).abs().max())
    print(f"recorded steps against steps call by call: losses apart by {apart:.1e}", flush=True)
    if not apart < 1e-2:
        raise RuntimeError(f"recorded steps do not learn what others do: losses are apart by {apart:.1e}; not timed")


def check(bench: Bench, reference: Reference) -> None:
    """Losses of both steps on one batch, float32, without dropout, live lists; `RuntimeError` where they differ."""
    student = Student(bench, "base", RANKCSE, "fp32")
    student.batches = reference._batches
    student.model.encoder.backbone.load_state_dict(reference.model.state_dict())
    student.model.projection.load_state_dict(reference.projection.state_dict())
    dtypes = reference._dtype, reference._teacher_dtype
    reference._dtype = reference._teacher_dtype = None
    student.teacher_lists = cosines_of(reference, half=False)
    student.model.eval()
    reference.model.eval()
    mine, theirs = student.loss_of_next().item(), reference.loss().item()
    reference._dtype, reference._teacher_dtype = dtypes
    print(f"against the reference style: loss {mine:.6f}, apart by {abs(mine / theirs - 1):.1e}", flush=True)
    if abs(mine / theirs - 1) > 1e-5:
        raise RuntimeError("the two steps do not compute the same; not timed")


def large(bench: Bench) -> Iterator[Figure]:
    """Row 6's second part."""
    student = Student(bench, "large", SIMCSE, "bf16", graphs=True)
    rounds = interleave({"ours": bench.sampler(student, bench.steps // 2 or 1)}, bench.effort, again="ours")
    tokens, (layers, width, _) = int(sum(mask.sum() for _, mask in student.batches)) / 8, bench.shape("large")
    work = 2 * 3 * tokens * layers * (24 * width**2 + 4 * (tokens / bench.n) * width)
    mfu = rounds.of(lambda s: 100 * work / s["ours"] / PEAK, "wall")
    yield of_spread(6, "MFU large, N = 128", mfu, f"N = {bench.n}, SimCSE", rounds.noise("wall"))


def last_layers(bench: Bench) -> Iterator[Figure]:
    """Row 13: all of the last layer over [CLS] alone."""
    ways = {name: Student(bench, "base", SIMCSE, "bf16") for name in ("one token", "all tokens")}
    encoder = ways["all tokens"].model.encoder
    encoder.forward = partial(whole_last_layer, encoder)  # type: ignore[method-assign]
    rounds = interleave({name: bench.sampler(way) for name, way in ways.items()}, bench.effort, again="one token")
    yield of_ratio(13, "base", rounds, "all tokens", "one token", f"N = {bench.n}, SimCSE, bf16", "wall")


def gradient_cache(bench: Bench) -> Iterator[Figure]:
    """Row 33: eight chunks against one pass over the batch."""
    ways = {name: Student(bench, "base", SIMCSE, "bf16") for name in ("plain", "chunks")}
    ways["chunks"].model.grad_cache = True
    ways["chunks"].parts = 8
    rounds = interleave({name: bench.sampler(way) for name, way in ways.items()}, bench.effort, again="plain")
    yield of_ratio(33, "cost", rounds, "chunks", "plain", f"base, N = {bench.n}, eight chunks", "wall")


def dispatch(bench: Bench) -> Iterator[Figure]:
    """Rows 7 and 34."""
    if bench.device.type != "cuda":
        return
    for way, records in (("recorded", True), ("call by call", False)):
        if bench.records or not records:
            yield from profiled(Student(bench, "base", SIMCSE, "bf16", graphs=records), way)


def profiled(student: Student, way: str) -> Iterator[Figure]:
    """The device's share of the time, and waits, of ten steps."""
    for _ in range(5):
        student()
    torch.cuda.synchronize()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    count = 10
    with torch.profiler.profile(activities=kinds) as seen:
        begun = time.perf_counter()
        for _ in range(count):
            student()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begun
    events = seen.key_averages()
    on_device = torch.autograd.DeviceType.CUDA  # events of operations count the time of their kernels a second time
    kernels = [e for e in events if e.device_type == on_device and not e.is_user_annotation]
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    waits = sum(e.count for e in events if e.key in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"))
    yield Figure(7, "busy share", *(100 * busy / wall,) * 3, setting=f"{way}, under the profiler")
    yield counted(34, "synchronisations a step", waits / count, way)


def losses(bench: Bench) -> Iterator[Figure]:
    """Row 14, eager."""
    for n in (128, 1024):
        size = n // 8 if bench.tiny else n
        z1, z2 = (torch.randn(size, 768, device=bench.device, requires_grad=True) for _ in range(2))
        lists = torch.rand(size, size, device=bench.device)

        def terms(z1: Tensor = z1, z2: Tensor = z2, lists: Tensor = lists) -> object:
            views = gather_views(z1, z2)
            loss = jensen_shannon(views.similarities / 0.05, views.reverse / 0.05).mean()
            loss = loss + list_net(views.similarities, lists, 0.05, 0.025).mean()
            return torch.autograd.grad(loss + our_list_mle(views.similarities, lists, 0.05).mean(), (z1, z2))

        rounds = interleave({"losses": bench.sampler(terms)}, bench.effort)
        yield of_spread(14, f"N = {n}", rounds.of(lambda s: 1000 * s["losses"], "wall"), "768 wide, eager")


def optimiser(bench: Bench) -> Iterator[Figure]:
    """Row 15."""
    parameters = dict(bench.model("base").named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    fused = FusedAdamW(parameters, LoopSection())
    rounds = interleave({"fused": bench.sampler(lambda: fused.step(3e-5))}, bench.effort)
    yield of_spread(15, "fused step, BERT-base", rounds.of(lambda s: 1000 * s["fused"], "wall"), "base")


def encode_rates(bench: Bench) -> dict[str, float]:
    """Sentences a second of both teachers in fp16."""
    return {name: encode_rate(bench, name, 16_384, "fp16") for name in ("base", "large")}


def encode_rate(bench: Bench, shape: str, count: int, precision: Precision) -> float:
    """Sentences a second of a frozen model, sorted by length, batches of 16,384 tokens; dev scores are made in fp32."""
    model = bench.model(shape).eval()
    model = model.half() if precision == "fp16" else model
    batches = sorted_batches(bench, 256 if bench.tiny else count)
    sampler = bench.sampler(lambda: through(model, batches), 1)
    sampler(1)
    return sum(len(ids) for ids, _ in batches) / sampler(1).wall


def teacher_memory(bench: Bench) -> Iterator[Figure]:
    """Row 30: what a teacher in fp16 holds on the device between two passes."""
    if bench.device.type != "cuda":
        return
    with TemporaryDirectory() as folder:
        bench.model("base").cpu().save_pretrained(folder)
        before = torch.cuda.memory_allocated()
        kind = frozen_weight_dtype("fp16", bench.device.type)
        teacher = load_backbone(Path(folder), False, None, 32, kind).to(bench.device).eval()
        with arithmetic("fp16", bench.device):
            through(teacher, sorted_batches(bench, 4096))
        held = torch.cuda.memory_allocated() - before
    weights = 2 * sum(weight.numel() for weight in teacher.parameters())
    yield counted(30, "base, fp16: memory / weights", held / weights, f"{weights / 1e6:.0f} MB of weights")


def sorted_batches(bench: Bench, count: int, tokens: int = 16_384) -> list[tuple[Tensor, Tensor]]:
    """Sentences as distcse's frozen pass orders them."""
    lengths = bench.lengths(count)
    found = []
    for rows in by_length([[0] * int(length) for length in lengths], tokens):
        longest = int(lengths[rows].max())
        mask = (torch.arange(longest)[None, :] < torch.from_numpy(lengths[rows])[:, None]).long()
        found.append(((torch.randint(999, 30000, mask.shape) * mask).to(bench.device), mask.to(bench.device)))
    return found


@torch.no_grad()
def through(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    """[CLS] vectors of all batches."""
    for ids, mask in batches:
        model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0].float().cpu()


def encoding(bench: Bench) -> Iterator[Figure]:
    """Rows 11 and 12: batches of 32 in float32 as they come sorted, batches of 256 in fp16, ours in fp16."""
    count = 128 if bench.tiny else 8192
    single = bench.model("base").eval()
    half = copy.deepcopy(single).half()
    ours = sorted_batches(bench, count)
    flat = sorted(bench.lengths(count), reverse=True)

    def in_batches(size: int) -> list[tuple[Tensor, Tensor]]:
        found = []
        for begin in range(0, count, size):
            lengths = torch.tensor(np.array(flat[begin : begin + size]))
            mask = (torch.arange(int(lengths.max()))[None, :] < lengths[:, None]).long()
            found.append(((torch.randint(999, 30000, mask.shape) * mask).to(bench.device), mask.to(bench.device)))
        return found

    small, wide = in_batches(32), in_batches(256)
    ways = {
        "default": bench.sampler(lambda: through(single, small), 1),
        "tuned": bench.sampler(lambda: through(half, wide), 1),
        "ours": bench.sampler(lambda: through(half, ours), 1),
    }
    rounds = interleave(ways, bench.effort, again="ours")
    at = f"base, {count:,} sentences, the loop of sentence-transformers without its tokenizer"
    yield of_ratio(11, "default (fp32) / fp16", rounds, "default", "ours", at, "wall")
    yield of_ratio(11, "tuned, same dtype (fp16)", rounds, "tuned", "ours", at, "wall")
    layers, width, _ = bench.shape("base")
    tokens = sum(int(mask.sum()) for _, mask in ours)
    work = tokens * layers * (24 * width**2 + 4 * tokens / count * width)
    yield of_spread(
        11, "share of the compute floor, base", rounds.of(lambda s: 100 * work / s["ours"] / PEAK, "wall"), at
    )
    filled = tokens / sum(mask.numel() for _, mask in ours)
    yield counted(12, "teacher pass", round(filled, 4), f"{count:,} sentences, 16,384 tokens a batch")


def fidelity(bench: Bench) -> Iterator[Figure]:
    """Row 10: vectors of an fp16 forward pass and store against float32."""
    model, (ids, mask) = bench.model("base").eval(), bench.batch(bench.n)
    with torch.no_grad():
        exact = model(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
        half = copy.deepcopy(model).half()(input_ids=ids, attention_mask=mask).last_hidden_state[:, 0]
    lists = []
    for vectors in (exact, half):
        stored = torch.nn.functional.normalize(vectors.float(), dim=1)
        stored = torch.nn.functional.normalize(stored.half().float(), dim=1) if vectors is half else stored
        lists.append(stored @ stored.T)
    gradients = []
    student = torch.rand(len(ids), len(ids), device=bench.device)
    for each in lists:
        cosines = student.clone().requires_grad_()
        our_list_mle(cosines, each, 0.05).mean().backward()
        assert cosines.grad is not None
        gradients.append(cosines.grad.flatten().double())
    at = "random weights of base's shape: lists far flatter than a real teacher's"
    yield counted(10, "largest difference of a cosine, fp16 forward", float((lists[0] - lists[1]).abs().max()), at)
    cosine = float(torch.cosine_similarity(*gradients, dim=0))
    yield counted(10, "cosine of the ListMLE gradients, fp16 forward", cosine, at)


class RankReference(PublicStudent):
    """The reference style's RankEncoder step: the student under autocast, its teacher live in float32."""

    def __init__(self, bench: Bench, student: Student, teacher: nn.Module, references: Tensor) -> None:
        super().__init__(bench, student)
        terms = RANKENCODER["rank_regression"]
        frozen = FrozenTeacher(teacher, "cls", 1.0)
        self._loss = rankencoder(
            frozen, references, RANKENCODER["tau1"], terms["weight"], terms["lower"], terms["upper"]
        )

    def loss(self) -> Tensor:
        """The step's loss, without an update."""
        ids, mask = self.tokens()
        return self._loss(*self.views(ids, mask, torch.bfloat16), ids, mask)


def rank_steps(bench: Bench) -> Iterator[Figure]:
    """Rows 16 and 18: ranks of each batch in the step, which waits for them."""
    n, references = (16, 500) if bench.tiny else (64, 100_000)
    ours = Student(bench, "base", RANKENCODER, "bf16", n)
    simcse = Student(bench, "base", SIMCSE, "bf16", n)
    teacher = bench.model("base", seed=2).eval()
    vectors = unit_vectors(teacher, ours.batches).cpu().numpy()
    others = torch.nn.functional.normalize(torch.randn(references, vectors.shape[1]), dim=1)
    space = DeviceRankSpace(others.numpy(), "histogram", str(bench.device))
    ours.teacher_lists = lambda rows: torch.from_numpy(space.similarities(vectors[rows])).to(bench.device)
    public = RankReference(bench, ours, teacher, others.to(bench.device))
    few = bench.steps // 8 or 1
    ways = {"ours": bench.sampler(ours), "SimCSE": bench.sampler(simcse), "public": bench.sampler(public, few)}
    rounds = interleave(ways, bench.effort, again="ours")
    at = f"base, N = {n}, n = {references:,}, histogram"
    yield of_ratio(16, "base", rounds, "ours", "SimCSE", at, "wall")
    yield of_ratio(18, "bf16", rounds, "public", "ours", at, "wall")


def rank_kernels(bench: Bench) -> Iterator[Figure]:
    """Rows 17 and 19: ranks and their products alone; pairs of different sentences, through the host's memory."""
    n, references, sentences = (16, 500, 40) if bench.tiny else (64, 100_000, 21_531)
    seen = torch.randn(n, references, device=bench.device) / 28
    ways = {
        kind: bench.sampler(lambda ranks=ranks: products(*(ranks(seen),) * 2))  # type: ignore[misc]
        for kind, ranks in (("sort", sorted_ranks), ("histogram", histogram_ranks))
    }
    rounds = interleave(ways, bench.effort, again="sort")
    by_sort = 1000 * rounds.of(lambda s: s["sort"], "wall").median
    milliseconds = rounds.of(lambda s: 1000 * s["histogram"], "wall")
    yield of_spread(17, "64 × 100k", milliseconds, "histogram", rounds.noise("wall"), **{"by sort, ms": by_sort})
    vectors, others = (
        torch.nn.functional.normalize(torch.randn(count, 768), dim=1).numpy() for count in (sentences, references)
    )
    space, first = DeviceRankSpace(others, "sort", str(bench.device)), np.arange(sentences * 6 // 7)
    scored = bench.sampler(lambda: pair_similarities(space, vectors, first, first[::-1]), 1)
    yield counted(19, "seconds", scored(1).wall, f"{len(first):,} pairs of {sentences:,} sentences, exact")


PARTS: dict[tuple[int, ...], Callable[[Bench], Iterator[Figure]]] = {
    (1, 2, 3, 5, 6): steps,
    (7, 34): dispatch,
    (13,): last_layers,
    (33,): gradient_cache,
    (14,): losses,
    (15,): optimiser,
    (11, 12): encoding,
    (10,): fidelity,
    (30,): teacher_memory,
    (16, 18): rank_steps,
    (17, 19): rank_kernels,
    (6,): large,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two layers, two samples: shows that the code works")
    parser.add_argument("--call-by-call", action="store_true", help="steps are not recorded as CUDA graphs")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing is run. `--device cpu --tiny` shows whether the script works")
        sys.exit(2)
    if options.device == "cpu" and not options.tiny:
        parser.error("a CPU takes hours at these sizes and measures nothing asked for; add --tiny")
    bench = Bench(torch.device(options.device), options.tiny, options.call_by_call)
    begun, found, not_run, failed = time.monotonic(), [], {}, []
    for rows, part in PARTS.items():
        if time.monotonic() - begun > BUDGET:
            not_run[f"rows {rows}"] = "out of time"
            continue
        try:
            for figure in part(bench):
                found.append(figure)  # those before a refusal are kept
        except RuntimeError as refused:  # what was found is kept: such a device is not had every day
            traceback.print_exc()
            not_run[f"rows {rows}"] = f"{type(refused).__name__}: {refused}".splitlines()[0]
            failed.append(f"rows {rows}")
            if not isinstance(refused, torch.cuda.OutOfMemoryError):
                print(
                    "a device on which something failed is not measured further; again with --call-by-call?", flush=True
                )
                break
        gc.collect()  # a student holds its step, and that one the student
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        print(f"rows {', '.join(map(str, rows))} after {time.monotonic() - begun:.0f} s", flush=True)
    not_run |= {
        f"row {row.number}, {part.name}": f"not built: {part.needs}" if part.needs else "not run"
        for row in ROWS
        for part in row.gpu
        if (row.number, part.name) not in {(figure.row, figure.part) for figure in found}
    }
    from benchmarks.table import lines_of

    settings = {"pairs": bench.effort.pairs, "recorded steps": bench.records}
    device = {"gpu": torch.cuda.get_device_name()} if bench.device.type == "cuda" else {}
    report = Report("gpu", {**machine(), **device}, settings, found, options.tiny, not_run)
    print("\n".join(lines_of(report)))
    if options.tiny:
        print("these are no figures: tiny models show that the code works, nothing is stored")
    else:
        print(f"written: {report.write(options.out)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
