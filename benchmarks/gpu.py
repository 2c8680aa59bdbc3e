"""The rows with a GPU column, on one GPU: one command, under eight minutes, no Ray, no data, no downloads.

    python -m benchmarks.gpu                        a report in benchmarks/results/
    python -m benchmarks.gpu --device sim --tiny    whether it works, on a simulated GPU (tests/gpusim); no figure counts
    python -m benchmarks.gpu --device cpu --tiny    the same on a CPU

Random weights of BERT-base's and -large's shape, and sentences of random words with real lengths (lengths.json: 20,000 sentences
of Wikipedia, cut at 32). Events of the device over blocks of steps, the ways interleaved. What distcse has no GPU code for yet is
named and not run; a row that fails is named too, and what was found is stored. Exit status 2: no GPU here.

Besides PyTorch, NumPy and transformers (with its tokenizers and safetensors) it needs the wheels pydantic, pydantic-core,
annotated-types, typing-inspection and PyYAML, and neither Ray nor DeepSpeed, datasets or pyarrow; row 11 sentence-transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordPiece
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, BertModel, PreTrainedTokenizerFast
from transformers.utils import is_flash_attn_2_available

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
from benchmarks.reference_style import (
    FrozenTeacher,
    PublicLoop,
    ReplacedTokens,
    contrastive,
    encode,
    live_lists,
    rankcse_loss,
    rankencoder,
    score_cross,
)
from benchmarks.table import lines_of
from benchmarks.targets import ROWS
from distcse.devices.device import default_device, gpu_module, is_gpu, to_device
from distcse.events import Event, Reporter, StepReport
from distcse.losses import TeacherOutputs, build_objective, gather_views, jensen_shannon, list_net, mix_lists
from distcse.losses import list_mle as our_list_mle
from distcse.models import CrossEncoder, Encoder, build_projection
from distcse.models.detection import EditDetector, Vocabulary
from distcse.models.folder import ModelFolder
from distcse.models.loading import halve_matrices, load_backbone
from distcse.rank_space import DeviceRankSpace, pair_similarities
from distcse.rank_space.space import products, sorted_ranks
from distcse.recipe import DetectionSection, LoopSection, ObjectiveSection
from distcse.recipe.section import Precision
from distcse.runs.distillation.student_model import Batch, StudentModel, StudentOutput
from distcse.runs.mutual.pair_task import PairTask, PairTokens
from distcse.storage import open_store
from distcse.teachers.kinds.base import frozen_weight_dtype
from distcse.text.collate import Tokens
from distcse.training.checkpoints import CheckpointStore
from distcse.training.compiled_step import CompiledStep
from distcse.training.cuda_graphs import CudaGraphs, CudaGraphStep, GraphMode
from distcse.training.engines import TorchEngine
from distcse.training.engines.fused_adamw import FusedAdamW
from distcse.training.task import StepInputs
from distcse.training.trainer import train, training_step
from tests.pairs import bi_tokens, cross_tokens, make_pairs

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

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
PEAK = 989.4e12
"""bf16 operations a second of an H100 and an H200, by NVIDIA's data sheets: the unit of MFU here."""
SENTENCES, EPOCHS = 1_000_000, 4
PAIRS, CYCLES = 37_790, 3
"""Trans-Encoder on the unlabeled STS pairs, and its number of cycles."""
BI, CROSS = 128, 32
"""Pairs of a step (Trans-Encoder, Table 16)."""
EVAL_STEPS, DEV_SENTENCES = 125, 3000
VOCABULARY = 30_522
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BATCHES = (256, 1024, 4096)
"""Batch sizes of sentence-transformers, of which the fastest is compared."""
PASS_TOKENS = (16_384, 262_144)
"""Tokens of a frozen model's forward pass that are tried as well as the default."""
KINDS = {
    "attention": "flash|fmha|attention",
    "matrix products": "gemm|cutlass|nvjet|xmma|cublas",
    "AdamW": "adam",
    "norms": "norm|GammaBeta",
    "fused by the compiler": "^triton",
    "copies and casts": "copy|Memcpy|Memset",
    "sums": "reduce",
    "embeddings": "embedding|index|gather|scatter",
    "element-wise": "elementwise|dropout|gelu",
}
"""Kinds of kernels that a profile sums up, by what a kernel's name contains; the first that fits."""
BUDGET = 7.5 * 60.0
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
        self.module = gpu_module(device) if is_gpu(device) else None
        """PyTorch's module of the device; None on a CPU."""
        self.records = self.module is not None and not call_by_call
        self.n = 16 if tiny else 128
        self.effort = Effort(pairs=2, warmups=1, shortest=0.0) if tiny else Effort(pairs=5, warmups=2, shortest=0.0)
        self.steps = 2 if tiny else 16
        self.draw = np.random.default_rng(0)
        counts = json.loads(LENGTHS.read_text())["truncated_32"]
        self._lengths = np.array([int(length) for length in counts]), np.array(list(counts.values()), dtype=np.float64)

    def shape(self, name: str) -> tuple[int, int, int]:
        return SHAPES["tiny" if self.tiny else name]

    def model(self, name: str, seed: int = 0) -> nn.Module:
        """A BERT of a shape with random weights, drawn on the device: a CPU takes seconds."""
        torch.manual_seed(seed)
        with self.device if self.device.type == "cuda" else contextlib.nullcontext():
            return BertModel(self.config(name), add_pooling_layer=False).to(self.device)

    def config(self, name: str, **more: Any) -> BertConfig:
        """The configuration of a shape."""
        layers, width, heads = self.shape(name)
        return BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            **more,
        )

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A WordPiece tokenizer as BERT's, whose words are w0, w1, …: one token each."""
        words = [*SPECIAL, *(f"w{number}" for number in range(VOCABULARY - len(SPECIAL)))]
        found = Tokenizer(WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
        found.normalizer = normalizers.BertNormalizer()
        found.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        found.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        kinds = zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True)
        return PreTrainedTokenizerFast(tokenizer_object=found, model_max_length=512, **dict(kinds))

    def encoder(self, name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Encoder:
        """distcse's encoder of a shape, [CLS] pooling, on the device; its matrices are of type `dtype`."""
        encoder = Encoder(self.model(name, seed), self.tokenizer(), "cls", 32)
        halve_matrices(encoder, dtype)
        return encoder

    def texts(self, count: int) -> list[str]:
        """Sentences of random words, with real lengths."""
        draws = (self.draw.integers(0, VOCABULARY - len(SPECIAL), max(1, length - 2)) for length in self.lengths(count))
        return [" ".join(f"w{number}" for number in words) for words in draws]

    def lengths(self, count: int) -> np.ndarray:
        """Lengths of `count` random sentences."""
        values, weights = self._lengths
        return self.draw.choice(values, count, p=weights / weights.sum())

    def batch(self, count: int, width: int = 32) -> tuple[Tensor, Tensor]:
        """(B, 32) random ids and mask, as a random batch of real sentences is: padded to the cap."""
        lengths = torch.from_numpy(self.lengths(count))
        mask = (torch.arange(width)[None, :] < lengths[:, None]).long()
        ids = torch.randint(999, 30000, (count, width)) * mask
        ids[:, 0] = SPECIAL.index("[CLS]")
        return ids.to(self.device), mask.to(self.device)

    def sampler(self, call: Callable[[], object], steps: int | None = None) -> Sampler:
        """Seconds of a call by the device's events; by the clock on a CPU."""
        count = steps or self.steps

        def sample(repeats: int) -> Duration:
            if self.module is None:
                begun = time.perf_counter()
                for _ in range(count * repeats):
                    call()
                seconds = (time.perf_counter() - begun) / (count * repeats)
                return Duration(seconds, seconds)
            begin, end = (self.module.Event(enable_timing=True) for _ in range(2))
            host = time.perf_counter()
            begin.record()
            for _ in range(count * repeats):
                call()
            end.record()
            issued = time.perf_counter() - host
            self.module.synchronize()
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
        compiled: Layers are compiled, as in long runs.
    """

    def __init__(
        self,
        bench: Bench,
        shape: str,
        objective: dict[str, Any],
        precision: Precision,
        n: int | None = None,
        graphs: bool = False,
        compiled: bool = False,
    ) -> None:
        self.teacher_lists: Callable[[slice], Tensor] | None = None
        """Maps rows of the eight batches to the teachers' lists; None for SimCSE."""
        encoder = bench.encoder(shape, seed=1)
        self.model = StudentModel(encoder, build_projection("tanh_mlp", encoder.dimension))
        self.records = graphs and bench.records
        self.engine = TorchEngine(self.model, LoopSection(precision=precision), None)
        self.objective = build_objective(ObjectiveSection.model_validate(objective))
        self.batches = [bench.batch(n or bench.n) for _ in range(8)]
        self.step, self.parts = 0, 1
        step = CompiledStep(training_step, fail) if compiled else training_step
        self._take = CudaGraphStep(step, CudaGraphs(bench.device)) if self.records else step

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
        batch = Batch([(Tokens(*tokens), 16 * step + number) for number, tokens in enumerate(streams)])
        if self.model.detector is not None:
            batch = batch._replace(edit_seeds=[16 * step + 8 + number for number in range(self.parts)])
        here = step % 8
        lists = self.teacher_lists(slice(here * len(ids), (here + 1) * len(ids))) if self.teacher_lists else None
        return StepInputs(batch, TeacherOutputs(lists))

    def compute_loss(self, inputs: TeacherOutputs, output: StudentOutput) -> tuple[Tensor, dict[str, Tensor]]:
        """See `TrainingTask`."""
        return self.objective(gather_views(output.z1, output.z2, detection=output.detection), inputs)

    def attach(self, detector: EditDetector) -> None:
        """Give the student a discriminator, and train it too."""
        self.model.detector = detector.to(self.engine.device)
        self.engine = TorchEngine(self.model, LoopSection(precision="bf16"), None)

    def loss_of_next(self) -> Tensor:
        """The next step's loss, without an update."""
        inputs = self.prepare_batch(self.step, self.engine.device)
        return self.compute_loss(inputs.loss_inputs, self.engine.forward(inputs.model_inputs))[0]


def fail(reason: str) -> None:
    """Raise `RuntimeError`: the product continues without compiled layers."""
    raise RuntimeError(f"layers cannot be compiled: {reason}")


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
    """Rows 1 to 3, 6 and the host's time of 7; ours are CUDA graphs, compared with the same steps in eager mode.

    Large batches run call by call: two graphs and a step in float32 would not fit in 80 GB, and the host is never waited for.
    """
    for n in (bench.n, bench.n // 2, bench.n * 8):
        yield from steps_of(bench, n)
        gc.collect()
        if bench.module is not None:
            bench.module.empty_cache()


def steps_of(bench: Bench, n: int) -> Iterator[Figure]:
    """The rows of `steps` for batches of n sentences; rows 6 and 7 for 128 only."""
    records = bench.records and n <= bench.n
    student = Student(bench, "base", RANKCSE, "bf16", n, graphs=records)
    by_call = Student(bench, "base", RANKCSE, "bf16", n)
    by_call.batches = student.batches
    live = Reference(bench, student, ("base", "large"), torch.bfloat16, half_teachers=True)
    verbatim = Reference(bench, student, ("base", "large"), None, half_teachers=False)
    verbatim.teachers = live.teachers
    check(bench, live)
    student.teacher_lists = by_call.teacher_lists = cosines_of(live)
    simcse = Student(bench, "base", SIMCSE, "bf16", n, graphs=records)
    equal_steps(student, by_call, "recorded steps")
    ways = {"ours": student, "by call": by_call, "SimCSE": simcse, "live": live, "verbatim": verbatim}
    if records and bench.device.type == "cuda":
        ways["compiled"] = compiled_like(bench, student, n)
    count = max(1, bench.steps * bench.n // n // 2)
    few = {"live": count // 4 or 1, "verbatim": count // 8 or 1}
    samplers = {name: bench.sampler(way, few.get(name, count)) for name, way in ways.items()}  # type: ignore[arg-type]
    rounds = interleave(samplers, bench.effort, again="ours")
    steps_are = "recorded steps" if records else "steps call by call"
    at = f"base, N = {n}, {steps_are}; batches and teachers' vectors on the device"
    terms = {f"{name}, ms": 1000 * rounds.of(lambda s, name=name: s[name], "wall").median for name in ways}  # type: ignore[misc]
    if "compiled" in ways:
        terms["ours / compiled"] = rounds.ratio("ours", "compiled", "wall").median
    yield replace(of_ratio(1, "bf16", rounds, "ours", "SimCSE", at, "wall"), terms=terms)
    yield of_ratio(2, "bf16, live teachers under autocast", rounds, "live", "ours", at, "wall")
    yield of_ratio(3, "bf16", rounds, "verbatim", "ours", at, "wall")
    if n != bench.n:
        return
    host = rounds.of(lambda s: 1000 * s["ours"], "cpu")
    call_by_call = {
        "by call, host ms": 1000 * rounds.of(lambda s: s["by call"], "cpu").median,
        "by call / ours": rounds.ratio("by call", "ours", "wall").median,
    }
    yield of_spread(7, "host time a step", host, at, **call_by_call)
    for way, layers in {"ours": "", "compiled": ", compiled layers"}.items():
        if way in ways:
            mfu = rounds.of(lambda s, way=way: 100 * work_of(bench, "base", student) / s[way] / PEAK, "wall")  # type: ignore[misc]
            yield of_spread(6, f"MFU base, N = 128{layers}", mfu, at, rounds.noise("wall"))


def compiled_like(bench: Bench, student: Student, n: int) -> Student:
    """A student whose layers are compiled, on the batches and lists of another one; without dropout it learns the same."""
    compiled, plain, timed = (
        Student(bench, "base", RANKCSE, "bf16", n, graphs=True, compiled=is_compiled)
        for is_compiled in (True, False, True)
    )
    for each in (compiled, plain, timed):
        each.batches, each.teacher_lists = student.batches, student.teacher_lists
    for part in (*compiled.model.modules(), *plain.model.modules()):
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    equal_steps(compiled, plain, "compiled layers")
    return timed


def work_of(bench: Bench, shape: str, student: Student) -> float:
    """Operations of a step's matrix products, of real tokens alone, both views, forward and backward."""
    tokens, (layers, width, _) = int(sum(mask.sum() for _, mask in student.batches)) / 8, bench.shape(shape)
    return 2 * 3 * tokens * layers * (24 * width**2 + 4 * (tokens / len(student.batches[0][0])) * width)


class TrainedStudent(Student):
    """The student as `train` trains it: batches from the host, a dev score and a checkpoint every 125 steps.

    Args:
        bench: Where.
        steps: How many.
    """

    evaluates_initial_model = False
    teacher_wait_s = 0.0
    metric_name: str | None = "mean cosine of pairs"

    def __init__(self, bench: Bench, steps: int) -> None:
        super().__init__(bench, "base", RANKCSE, "bf16")
        self.steps, self.rows = steps, bench.n
        self._host = [(ids.cpu(), mask.cpu()) for ids, mask in self.batches]
        self._dev = bench.texts(32 if bench.tiny else DEV_SENTENCES)

    def on_start(self, first_step: int) -> None:
        """See `TrainingTask`."""

    def prepare_batch(self, step: int, device: torch.device) -> StepInputs:
        """See `TrainingTask`."""
        ids, mask = (to_device(tensor, device) for tensor in self._host[step % 8])
        self.batches[step % 8] = (ids, mask)
        return super().prepare_batch(step, device)

    def describe_batch(self, step: int) -> str:
        """See `TrainingTask`."""
        return f"batch {step % 8} of 8"

    def should_evaluate(self, done: int) -> bool:
        """See `TrainingTask`."""
        return done % EVAL_STEPS == 0

    def evaluate(self) -> float:
        """See `TrainingTask`."""
        vectors = self.model.encoder.encode(self._dev, normalize=True, precision="bf16")
        half = len(vectors) // 2
        return float((vectors[:half] * vectors[half : 2 * half]).sum(axis=1).mean())


class ReportClock:
    """A listener that notes when steps are reported, from its creation on."""

    def __init__(self) -> None:
        self._begun = time.perf_counter()
        self._seconds: dict[int, float] = {}

    def __call__(self, event: Event) -> None:
        """Receive an event of `train`."""
        if isinstance(event, StepReport):
            self._seconds[event.step] = time.perf_counter() - self._begun

    def step_and_fixed_seconds(self, steps: int) -> tuple[float, float]:
        """Return the seconds of one of the last `EVAL_STEPS` steps, with a score and a checkpoint, and what the run took besides.

        The first steps record graphs: all batch shapes have been seen twice before the last `EVAL_STEPS` steps begin.
        """
        total, last = time.perf_counter() - self._begun, max(self._seconds)
        first = min(step for step in self._seconds if step >= last - EVAL_STEPS)
        if first == last:  # a tiny run has one report
            return total / steps, 0.0
        step = (self._seconds[last] - self._seconds[first]) / (last - first)
        return step, total - steps * step


def full_run(bench: Bench) -> Iterator[Figure]:
    """Rows 4, 5 and 31: `train` for 300 steps, with dev scores and checkpoints; the reference's steps and dev scores alone."""
    student = TrainedStudent(bench, 4 if bench.tiny else 300)
    reference = Reference(bench, student, ("base", "large"), None, half_teachers=False)
    student.teacher_lists = cosines_of(reference)
    section = LoopSection(precision="bf16", engine="torch", batch_size=bench.n)
    with TemporaryDirectory() as folder:
        clock = ReportClock()
        graphs: GraphMode = "on" if bench.records else "off"
        train(student, section, CheckpointStore(open_store(Path(folder))), Reporter(clock), cuda_graphs=graphs)
        seconds, fixed = clock.step_and_fixed_seconds(student.steps)
    tokenizer, dev = bench.tokenizer(), student._dev
    ways = {
        "reference": bench.sampler(reference, bench.steps // 8 or 1),
        "reference, dev": bench.sampler(lambda: encode(reference.model, tokenizer, dev), 1),
        "dev": bench.sampler(student.evaluate, 1),
    }
    rounds = interleave(ways, bench.effort)
    at = f"base, N = {bench.n}, {student.steps} steps of `train`, batches from the host, dev scores and checkpoints"
    epoch = rounds.of(lambda s: (EVAL_STEPS * s["reference"] + s["reference, dev"]) / (EVAL_STEPS * seconds), "wall")
    yield of_spread(4, "125 steps and one score", epoch, at)
    share = rounds.of(lambda s: 100 * s["dev"] / (EVAL_STEPS * seconds), "wall")
    yield of_spread(31, "share of training at every 125 steps", share, at)
    rates, updates = encode_rates(bench), SENTENCES // bench.n * EPOCHS
    once = SENTENCES * sum(1 / rate for rate in rates.values())
    terms = {
        "step ms, with scores and checkpoints": 1000 * seconds,
        "recording and the last checkpoint s": fixed,
        "teacher pass s": once,
    }
    yield counted(5, "minutes", (updates * seconds + fixed + once) / 60, at, **terms)


def equal_steps(changed: Student, plain: Student, name: str) -> None:
    """Eight steps of each, from the same weights and under the same noise; `RuntimeError` where they do not learn the same."""
    both = [torch.stack([step() for _ in range(8)]) for step in (changed, plain)]
    apart = float((both[0] / both[1] - 1).abs().max())
    print(f"{name} against steps without: losses apart by {apart:.1e}", flush=True)
    if not apart < 1e-2:
        raise RuntimeError(f"{name} do not learn what others do: losses are apart by {apart:.1e}; not timed")


def check(bench: Bench, reference: Reference) -> None:
    """Losses of both steps on one batch, float32, without dropout, live lists; `RuntimeError` where they differ."""
    student = Student(bench, "base", RANKCSE, "fp32", len(reference._batches[0][0]))
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
    mfu = rounds.of(lambda s: 100 * work_of(bench, "large", student) / s["ours"] / PEAK, "wall")
    yield of_spread(6, "MFU large, N = 128", mfu, f"N = {bench.n}, SimCSE", rounds.noise("wall"))


def last_layers(bench: Bench) -> Iterator[Figure]:
    """Row 13: all of the last layer over [CLS] alone."""
    ways = {name: Student(bench, "base", SIMCSE, "bf16", graphs=True) for name in ("one token", "all tokens")}
    encoder = ways["all tokens"].model.encoder
    encoder.forward = partial(whole_last_layer, encoder)  # type: ignore[method-assign]
    rounds = interleave({name: bench.sampler(way) for name, way in ways.items()}, bench.effort, again="one token")
    yield of_ratio(13, "base", rounds, "all tokens", "one token", f"N = {bench.n}, SimCSE, bf16", "wall")


def gradient_cache(bench: Bench) -> Iterator[Figure]:
    """Row 33: eight chunks, recorded, against one pass over the batch, whose kernels are long enough without a recording."""
    n = 8 * bench.n
    ways = {
        name: Student(bench, "base", SIMCSE, "bf16", n, graphs=name == "chunks")
        for name in ("plain", "chunks", "chunks by call")
    }
    for name in ("chunks", "chunks by call"):
        ways[name].model.grad_cache, ways[name].parts, ways[name].batches = True, 8, ways["plain"].batches
    if bench.records:
        equal_steps(ways["chunks"], ways["chunks by call"], "a recorded gradient cache")
    few = bench.steps // 8 or 1
    rounds = interleave({name: bench.sampler(way, few) for name, way in ways.items()}, bench.effort, again="plain")
    terms = {f"{name}, ms": rounds.of(lambda s, name=name: 1000 * s[name], "wall").median for name in ways}  # type: ignore[misc]
    at = f"base, N = {n}, eight chunks, {'recorded' if bench.records else 'call by call'}"
    yield replace(of_ratio(33, "cost", rounds, "chunks", "plain", at, "wall"), terms=terms)


def dispatch(bench: Bench) -> Iterator[Figure]:
    """Rows 7 and 34, by PyTorch's profiler of CUDA."""
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
    on_device = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]  # events of operations count the time of their kernels a second time
    kernels = [e for e in events if e.device_type == on_device and not e.is_user_annotation]
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    waits = sum(e.count for e in events if e.key in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"))
    terms = dict.fromkeys((f"{kind}, ms" for kind in (*KINDS, "other")), 0.0)
    for kernel in kernels:
        terms[f"{kind_of(kernel.key)}, ms"] += kernel.self_device_time_total / 1000 / count
    yield Figure(7, "busy share", *(100 * busy / wall,) * 3, setting=f"{way}, under the profiler", terms=terms)
    yield counted(34, "synchronizations a step", waits / count, way)


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE)), "other")


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


def optimizer(bench: Bench) -> Iterator[Figure]:
    """Row 15."""
    parameters = dict(bench.model("base").named_parameters())
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 1e-3)
    fused = FusedAdamW(parameters, LoopSection())
    rounds = interleave({"fused": bench.sampler(lambda: fused.step(3e-5))}, bench.effort)
    yield of_spread(15, "fused step, BERT-base", rounds.of(lambda s: 1000 * s["fused"], "wall"), "base")


def encode_rates(bench: Bench) -> dict[str, float]:
    """Sentences a second of both teachers in fp16, by `Encoder.encode`."""
    return {name: encode_rate(bench, name, 16_384) for name in ("base", "large")}


def encode_rate(bench: Bench, shape: str, count: int) -> float:
    """Sentences a second of a teacher, tokenizing included."""
    teacher, texts = frozen(bench, shape), bench.texts(64 if bench.tiny else count)
    sampler = bench.sampler(lambda: teacher.encode(texts, precision="fp16"), 1)
    sampler(1)
    return len(texts) / sampler(1).wall


def frozen(bench: Bench, shape: str, seed: int = 0) -> Encoder:
    """A teacher with weights as distcse loads them for fp16."""
    return bench.encoder(shape, frozen_weight_dtype("fp16", bench.device.type), seed).eval()


def teacher_memory(bench: Bench) -> Iterator[Figure]:
    """Row 30: what a teacher in fp16 holds on the device between two passes."""
    if bench.device.type != "cuda":
        return
    with TemporaryDirectory() as folder:
        bench.model("base").cpu().save_pretrained(folder)  # type: ignore[operator]
        before = torch.cuda.memory_allocated()
        kind = frozen_weight_dtype("fp16", bench.device.type)
        backbone = load_backbone(ModelFolder.read(Path(folder)), None, 32, kind).to(bench.device)
    teacher = Encoder(backbone, bench.tokenizer(), "cls", 32).eval()
    teacher.encode(bench.texts(4096), precision="fp16")
    held = torch.cuda.memory_allocated() - before
    weights = 2 * sum(weight.numel() for weight in teacher.parameters())
    yield counted(30, "base, fp16: memory / weights", held / weights, f"{weights / 1e6:.0f} MB of weights")


def encoding(bench: Bench) -> Iterator[Figure]:
    """Rows 11 and 12: sentence-transformers with its defaults and at its best in fp16, and `Encoder.encode` in fp16."""
    count = 96 if bench.tiny else 8192
    texts, ours = bench.texts(count), frozen(bench, "base")
    single, half = (sentence_transformer(bench, "base", fp16) for fp16 in (False, True))
    by_batch = {batch: bench.sampler(lambda batch=batch: half.encode(texts, batch_size=batch), 1) for batch in BATCHES}  # type: ignore[misc]
    best = min(BATCHES, key=lambda batch: [by_batch[batch](1).wall for _ in range(2)][-1])
    ways = {
        "default": bench.sampler(lambda: single.encode(texts), 1),
        "tuned": by_batch[best],
        "ours": bench.sampler(lambda: ours.encode(texts, precision="fp16"), 1),
        **{
            f"ours, {tokens:,} tokens": bench.sampler(
                lambda tokens=tokens: ours.encode(texts, precision="fp16", batch_tokens=tokens),
                1,  # type: ignore[misc]
            )
            for tokens in PASS_TOKENS
        },
        "tokens alone": bench.sampler(lambda: ours.token_ids(texts), 1),
    }
    rounds = interleave(ways, bench.effort, again="ours")
    seconds = {f"{name}, s": rounds.of(lambda s, name=name: s[name], "wall").median for name in ways}  # type: ignore[misc]
    attention = half[0].auto_model.config._attn_implementation
    at = f"base, {count:,} sentences, tokenizing included; sentence-transformers' best: batches of {best}, {attention}"
    yield replace(of_ratio(11, "default (fp32) / fp16", rounds, "default", "ours", at, "wall"), terms=seconds)
    yield of_ratio(11, "tuned, same dtype (fp16)", rounds, "tuned", "ours", at, "wall")
    real, processed = tokens_of(ours, texts)
    layers, width, _ = bench.shape("base")
    work = real * layers * (24 * width**2 + 4 * real / count * width)
    floor = rounds.of(lambda s: 100 * work / s["ours"] / PEAK, "wall")
    yield of_spread(11, "share of the compute floor, base", floor, at)
    yield counted(12, "teacher pass", round(real / processed, 4), f"{count:,} sentences")


def sentence_transformer(bench: Bench, shape: str, fp16: bool) -> SentenceTransformer:
    """A model of sentence-transformers; in fp16 without padding where flash-attn is installed."""
    from sentence_transformers import SentenceTransformer  # needs datasets, which not all images with a GPU have
    from sentence_transformers.models import Pooling, Transformer

    with TemporaryDirectory() as folder:
        bench.model(shape).cpu().save_pretrained(folder)  # type: ignore[operator]
        bench.tokenizer().save_pretrained(folder)
        attention = "flash_attention_2" if fp16 and is_flash_attn_2_available() else "sdpa"
        kinds: dict[str, Any] = {"dtype": torch.float16} if fp16 else {}
        backbone = Transformer(folder, max_seq_length=32, model_kwargs={"attn_implementation": attention, **kinds})
        pooling = Pooling(backbone.get_embedding_dimension(), "cls")
        return SentenceTransformer(modules=[backbone, pooling], device=str(bench.device))


def tokens_of(encoder: Encoder, texts: list[str]) -> tuple[int, int]:
    """Real tokens, and processed ones, of `Encoder.encode`."""
    seen: list[int] = []
    embeddings = encoder.backbone.get_submodule("embeddings.word_embeddings")
    hook = embeddings.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].numel()))
    encoder.encode(texts, precision="fp16")
    hook.remove()
    return sum(map(len, set(map(tuple, encoder.token_ids(texts))))), sum(seen)


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


class PairStep:
    """distcse's step on pairs, as `train` takes it, in bf16."""

    def __init__(self, bench: Bench, encoder: Encoder | CrossEncoder, tokens: PairTokens, size: int) -> None:
        section = LoopSection(batch_size=size, engine="torch", epochs=1e6, warmup=0.0, precision="bf16")
        labels = np.linspace(0, 1, tokens.number, dtype=np.float32)
        self._task = PairTask(encoder, tokens, labels, section, None, 10**9, seed=0)
        self._engine = TorchEngine(self._task.model, section, None)
        self._step = 0
        self._take = CudaGraphStep(training_step, CudaGraphs(bench.device)) if bench.records else training_step

    def __call__(self) -> None:
        """One step."""
        self._task.model.train()
        inputs = self._task.prepare_batch(self._step, self._engine.device)
        self._take(self._engine, self._task, inputs, 2e-5)
        self._step += 1


def trans_encoder(bench: Bench) -> Iterator[Figure]:
    """Rows 20 and 21: scoring of pairs against the reference style, and a full run of three cycles from its parts."""
    sizes, count = ((8, 4), 32) if bench.tiny else ((BI, CROSS), 8192)
    first, second = bench.texts(count), bench.texts(count)
    torch.manual_seed(0)
    classifier = BertForSequenceClassification(bench.config("base", num_labels=1)).to(bench.device).eval()
    cross, bi = CrossEncoder(copy.deepcopy(classifier), bench.tokenizer(), 64), bench.encoder("base")
    with TemporaryDirectory() as folder:  # what is mapped stays readable
        pairs = make_pairs(Path(folder), first, second)
        steps = {
            "bi step": PairStep(bench, bi, bi_tokens(bi, pairs), sizes[0]),
            "cross step": PairStep(bench, cross, cross_tokens(cross, pairs, both_orders=False), sizes[1]),
        }
    both = list(zip(first, second, strict=True))
    few = both[: count // 8]
    frozen_cross = CrossEncoder(copy.deepcopy(classifier), bench.tokenizer(), 64)
    frozen_bi, tokenizer = bench.encoder("base"), bench.tokenizer()
    sentences = [*dict.fromkeys([*first, *second])]
    ways: dict[str, Sampler] = {
        **{name: bench.sampler(step) for name, step in steps.items()},
        "bi scores": bench.sampler(lambda: frozen_bi.encode(sentences, precision="bf16"), 1),
        "cross scores": bench.sampler(lambda: frozen_cross.score(both, precision="bf16"), 1),
        "reference": bench.sampler(lambda: score_cross(classifier, tokenizer, few), 1),
    }
    rounds = interleave(ways, bench.effort, again="cross scores")
    ratio = rounds.of(lambda s: s["reference"] / len(few) * len(both) / s["cross scores"], "wall")
    at = f"base, {count:,} pairs, fp32 reference"
    yield of_spread(20, "cross, bf16", ratio, at, rounds.noise("wall"))

    def minutes(s: Any) -> float:
        """Of the cycles: bi scores, cross learns both orders, cross scores, bi learns ten epochs."""
        scores = PAIRS / count * (s["bi scores"] + s["cross scores"])
        learning = 2 * PAIRS / sizes[1] * s["cross step"] + 10 * PAIRS / sizes[0] * s["bi step"]
        return float(CYCLES * (scores + learning) / 60)

    terms = {name: rounds.of(lambda s, name=name: s[name], "wall").median for name in ways}  # type: ignore[misc]
    at = f"base, bf16, {PAIRS:,} pairs, from its parts, without dev scores"
    yield of_spread(21, "full base run of 3 cycles, extrapolated", rounds.of(minutes, "wall"), at, **terms)


class DetectingReference(PublicStudent):
    """The reference style's DiffCSE step: generator, discriminator and student under autocast."""

    def __init__(self, bench: Bench, student: Student, generator: nn.Module) -> None:
        detector = student.model.detector
        assert detector is not None
        discriminator = copy.deepcopy(detector.backbone)
        self._replaced = ReplacedTokens(generator, discriminator, detector.head, mask_tokens, SPECIAL.index("[CLS]"))
        super().__init__(bench, student)
        self._modes = [*self._modes, self._replaced]
        self.parameters += [p for p in self._replaced.parameters() if p.requires_grad]

    def loss(self) -> Tensor:
        """The step's loss, without an update."""
        ids, mask = self.tokens()
        z1, z2 = self.views(ids, mask, torch.bfloat16)
        with self._bench.autocast(torch.bfloat16):
            detection = self._replaced(ids, mask, torch.stack([z1, z2], dim=1).flatten(0, 1))
        return contrastive(z1, z2, 0.05)[1] + 0.005 * detection.float()


def mask_tokens(ids: Tensor, mask: Tensor) -> Tensor:
    """Mask 30 % of the tokens as BERT does, without a wait for the device: 80 % [MASK], 10 % random, 10 % kept."""
    draws = torch.rand(ids.shape, device=ids.device)
    chosen = (draws < 0.3) & mask.bool() & (ids >= len(SPECIAL))
    kinds = torch.rand(ids.shape, device=ids.device)
    edited = torch.where(kinds < 0.8, SPECIAL.index("[MASK]"), torch.randint_like(ids, len(SPECIAL), VOCABULARY))
    return torch.where(chosen & (kinds < 0.9), edited, ids)


def diffcse(bench: Bench) -> Iterator[Figure]:
    """Row 23: student, discriminator and generator of base's size."""
    n = 8 if bench.tiny else 64
    words = Vocabulary(VOCABULARY, SPECIAL.index("[CLS]"), SPECIAL.index("[PAD]"), SPECIAL.index("[MASK]"), (0, 2, 3))
    torch.manual_seed(3)
    generator = BertForMaskedLM(bench.config("base")).to(bench.device)
    ways: dict[str, Student] = {}
    for name, choice in (("ours", "all_positions"), ("masked only", "masked_only")):
        section = DetectionSection.model_validate({"generator": "random weights", "replace": choice})
        objective = {**SIMCSE, "detection": section}
        student = Student(bench, "base", objective, "bf16", n, graphs=True)
        student.attach(EditDetector(bench.model("base", seed=1), copy.deepcopy(generator), words, section))
        ways[name] = student
    samplers = {name: bench.sampler(way, bench.steps // 4 or 1) for name, way in ways.items()}
    theirs = DetectingReference(bench, ways["ours"], generator)
    rounds = interleave(
        {**samplers, "reference": bench.sampler(theirs, bench.steps // 4 or 1)}, bench.effort, again="ours"
    )
    at = f"base, N = {n}, bf16"
    yield of_ratio(23, "identical semantics", rounds, "reference", "ours", at, "wall")
    yield of_ratio(23, "masked positions only", rounds, "reference", "masked only", at, "wall")


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
    ours = Student(bench, "base", RANKENCODER, "bf16", n, graphs=True)
    simcse = Student(bench, "base", SIMCSE, "bf16", n, graphs=True)
    teacher = bench.model("base", seed=2).eval()
    vectors = unit_vectors(teacher, ours.batches).cpu().numpy()
    others = torch.nn.functional.normalize(torch.randn(references, vectors.shape[1]), dim=1)
    space = DeviceRankSpace(others.numpy(), str(bench.device))
    ours.teacher_lists = lambda rows: torch.from_numpy(space.similarities(vectors[rows])).to(bench.device)
    public = RankReference(bench, ours, teacher, others.to(bench.device))
    few = bench.steps // 8 or 1
    ways = {"ours": bench.sampler(ours), "SimCSE": bench.sampler(simcse), "public": bench.sampler(public, few)}
    rounds = interleave(ways, bench.effort, again="ours")
    at = f"base, N = {n}, n = {references:,}, ranks before each step"
    yield of_ratio(16, "base", rounds, "ours", "SimCSE", at, "wall")
    yield of_ratio(18, "bf16", rounds, "public", "ours", at, "wall")


def rank_kernels(bench: Bench) -> Iterator[Figure]:
    """Rows 17 and 19: ranks and their products alone; pairs of different sentences, through the host's memory."""
    n, references, sentences = (16, 500, 40) if bench.tiny else (64, 100_000, 21_531)
    seen = torch.randn(n, references, device=bench.device) / 28
    rounds = interleave({"sort": bench.sampler(lambda: products(*(sorted_ranks(seen),) * 2))}, bench.effort)
    yield of_spread(17, "64 × 100k", rounds.of(lambda s: 1000 * s["sort"], "wall"), "by sorting, exact")
    vectors, others = (
        torch.nn.functional.normalize(torch.randn(count, 768), dim=1).numpy() for count in (sentences, references)
    )
    space, first = DeviceRankSpace(others, str(bench.device)), np.arange(sentences * 6 // 7)
    scored = bench.sampler(lambda: pair_similarities(space, vectors, first, first[::-1]), 1)
    yield counted(19, "seconds", scored(1).wall, f"{len(first):,} pairs of {sentences:,} sentences, exact")


PARTS: dict[tuple[int, ...], Callable[[Bench], Iterator[Figure]]] = {
    (1, 2, 3, 6): steps,
    (4, 5, 31): full_run,
    (7, 34): dispatch,
    (13,): last_layers,
    (33,): gradient_cache,
    (14,): losses,
    (15,): optimizer,
    (11, 12): encoding,
    (10,): fidelity,
    (30,): teacher_memory,
    (16, 18): rank_steps,
    (17, 19): rank_kernels,
    (20, 21): trans_encoder,
    (23,): diffcse,
    (6,): large,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="gpu", help="gpu (default), sim or cpu")
    parser.add_argument("--tiny", action="store_true", help="two layers, two samples: shows that the code works")
    parser.add_argument("--call-by-call", action="store_true", help="steps are not recorded as CUDA graphs")
    parser.add_argument(
        "--rows", type=int, nargs="+", help="only the parts with these rows; the report keeps the others"
    )
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which no further rows begin")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if unknown := {*(options.rows or ())} - {row for rows in PARTS for row in rows}:
        parser.error(
            f"--rows {min(unknown)} is no row of a GPU; choose from {sorted({row for rows in PARTS for row in rows})}"
        )
    require_device(parser, options.device, options.tiny)
    with entered(options.device):
        measure("cpu" if options.device == "cpu" else default_device(), options)


def require_device(parser: argparse.ArgumentParser, device: str, tiny: bool) -> None:
    """Exit with status 2 where the benchmark cannot run on a device, `gpu`, `sim` or `cpu`."""
    if device != "gpu" and not tiny:
        parser.error("a CPU takes hours at these sizes and measures nothing that is asked for; add --tiny")
    if device == "gpu" and default_device() == "cpu":
        print("no GPU here: nothing is run. `--device sim --tiny` shows whether the script works")
        sys.exit(2)


def entered(device: str) -> contextlib.AbstractContextManager[object]:
    """Return the context in which a device is there: a simulated one only inside."""
    if device != "sim":
        return contextlib.nullcontext()
    from tests.gpusim import simulated

    return simulated()


def measure(device: str, options: argparse.Namespace) -> None:
    """Measure all parts, print the figures and store them; exit status 1 if a part failed.

    The report is written anew after each part, so that whatever ends the benchmark loses one part at most.
    """
    bench = Bench(torch.device(device), options.tiny, options.call_by_call)
    name = {"gpu": bench.module.get_device_name(0)} if bench.module is not None else {}
    settings = {"pairs": bench.effort.pairs, "recorded steps": bench.records}
    report = Report("gpu", {**machine(), **name}, settings, [], options.tiny, {})
    problems: dict[str, str] = {}
    begun, failed = time.monotonic(), []
    chosen = {rows: part for rows, part in PARTS.items() if options.rows is None or {*rows} & {*options.rows}}
    stored = [] if options.rows is None or options.tiny else stored_figures(report, options.out)
    merged = report
    for rows, part in chosen.items():
        if time.monotonic() - begun > options.budget:
            problems[f"rows {rows}"] = "out of time"
            continue
        try:
            for figure in part(bench):
                report.figures.append(figure)  # those before a refusal are kept
        except Exception as refused:  # what was found is kept: such a device is not had every day
            traceback.print_exc()
            problems[f"rows {rows}"] = f"{type(refused).__name__}: {refused}".splitlines()[0]
            failed.append(f"rows {rows}")
            if isinstance(refused, torch.AcceleratorError):
                print(
                    "a device on which something failed is not measured further; again with --call-by-call?", flush=True
                )
                break
        finally:
            measured = {(figure.row, figure.part) for figure in report.figures}
            figures = [*report.figures, *(kept for kept in stored if (kept.row, kept.part) not in measured)]
            report = replace(report, not_run=problems | missing(figures))
            merged = replace(report, figures=figures)
            if not options.tiny:
                merged.write(options.out)
        gc.collect()  # a student holds its step, and that one the student
        if bench.module is not None:
            bench.module.empty_cache()
        print(f"rows {', '.join(map(str, rows))} after {time.monotonic() - begun:.0f} s", flush=True)
    print("\n".join(lines_of(report)))
    if options.tiny:
        print("these are no figures: tiny models show that the code works, nothing is stored")
    else:
        print(f"written: {merged.write(options.out)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def stored_figures(report: Report, folder: Path) -> list[Figure]:
    """The stored figures of the same machine and settings, none of others: rows that are measured again replace them."""
    file = folder / report.place / f"{report.group}.json"
    if not file.exists():
        return []
    before = Report.read(file)
    return before.figures if (before.machine, before.settings) == (report.machine, report.settings) else []


def missing(figures: list[Figure]) -> dict[str, str]:
    """Parts of rows that have no figure, with the reason."""
    measured = {(figure.row, figure.part) for figure in figures}
    return {
        f"row {row.number}, {part.name}": f"not built: {part.needs}" if part.needs else "not run"
        for row in ROWS
        for part in row.gpu
        if (row.number, part.name) not in measured
    }


if __name__ == "__main__":
    main()
