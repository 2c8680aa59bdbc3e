"""Steps of two workers on simulated GPUs: recorded after a check, with weights equal to those of eager steps in all cases."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from distcse.devices.distributed import rank
from distcse.errors import CUDAGraphError
from distcse.events import Event, LogMessage, Reporter
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import BiSection, CrossSection, LoopSection, Recipe
from distcse.runs.distillation.distillation_task import TrainSpec
from distcse.runs.mutual.pair_task import PairTask
from distcse.storage import open_store
from distcse.teachers.table import EmbeddingTable
from distcse.text import Pairs
from distcse.training import compiled_step, cuda_graphs, step_check
from distcse.training.checkpoints import CheckpointStore
from distcse.training.cuda_graphs import CudaGraphs, Recording
from distcse.training.trainer import train as train_task
from tests.gpusim import simulated
from tests.jobs import make_recipe, make_spec, train
from tests.models import make_cross_encoder, make_masked_lm
from tests.pairs import bi_tokens, cross_tokens, make_pairs
from tests.unit.test_gpu_steps import BATCH_NORM, BF16, CLS, ONLY, UNPROJECTED, detecting
from tests.weights import assert_equal_weights, weights_of
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]
RunBoth = Callable[..., list["Trained"]]
CASES: dict[str, tuple[str, ...]] = {
    "RankCSE, batch norm": (BATCH_NORM,),
    "hinge, bf16, gradient cache": (
        *("objective.rank=null", "objective.rank_regression={}", "objective.combine=hinge"),
        *(BF16, "training.grad_cache_chunk=1", BATCH_NORM),
    ),
    "vectors": (*ONLY, "objective.regression={form: cosine}", UNPROJECTED),
    "ListNet alone, [CLS]": (*ONLY, "objective.rank={}", CLS),
    "DiffCSE, weight decay": (*detecting(), "training.weight_decay=0.1", "training.gradient_clipping=0"),
}


@pytest.fixture(scope="module")
def recipe_of(tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    """Most lines are of three words, so that batches have several shapes."""
    folder = tmp_path_factory.mktemp("check")
    lines = [text if number % 8 == 0 else " ".join(text.split()[:3]) for number, text in enumerate(sentences)]
    make_masked_lm(folder / "generator", tiny("bert"))

    def make(*overrides: str) -> Recipe:
        overrides = tuple(each.replace("GENERATOR", str(folder / "generator")) for each in overrides)
        fixed = ("student.layers=[1]", "training.max_steps=10", "training.batch_size=4", "training.workers=2")
        fixed += (f"training.lr={2**-10}",)
        return make_recipe(folder, tiny("bert"), [tiny("minilm")], lines, *fixed, *overrides)

    return make


class Trained(NamedTuple):
    """What a worker saw."""

    recorded: int
    """Recorded shapes of batches."""
    parts: list[int]
    """Graphs and collectives of each replay."""
    said: list[str]
    """Messages of steps and layers, and the class of the error that ended it."""


LIMIT_S = 2.0
"""Of a recording that hangs, which would return after twice as long."""


def break_worker(patch: pytest.MonkeyPatch, fault: str) -> list[str]:
    """Let this worker have a fault when it records; return what must not be said at the end."""
    record, replay, continued = CudaGraphs.record, Recording.__call__, list[str]()

    def failing(recorder: CudaGraphs, call: Callable[[], Any], seeds: Sequence[int]) -> Any:
        if fault == "fails":
            raise RuntimeError("operation not permitted when stream is capturing")
        if fault == "hangs":
            time.sleep(2 * LIMIT_S)
            continued.append("a thread that was left behind has continued")
        recording = record(recorder, call, seeds)
        if fault == "other collectives":
            recording.collectives.append(1)
        return recording

    def differing(recording: Recording[Any], seeds: Sequence[int]) -> Any:
        return replay(recording, [seed + (fault == "other seeds") for seed in seeds])

    patch.setattr(CudaGraphs, "record", failing)
    patch.setattr(Recording, "__call__", differing)
    return continued


def train_here(train_once: Callable[[list[Event]], object], fault: str = "") -> Trained:
    """Train on this worker's simulated GPU; worker 1 has the fault."""
    parts, record, replay = list[int](), CudaGraphs.record, Recording.__call__
    recorded, continued = list[int](), list[str]()

    def counting(recording: Recording[Any], seeds: Sequence[int]) -> Any:
        parts.append(len(recording.parts))
        return replay(recording, seeds)

    def recording(*arguments: Any) -> Any:
        recorded.append(1)
        return record(*arguments)

    with pytest.MonkeyPatch.context() as patch, simulated():
        patch.setattr("distcse.training.trainer.warmup_then_linear", lambda step, *_: 1 - step % 8 / 8)
        patch.setattr(step_check, "RECORDING_S", 60.0 if fault != "hangs" else LIMIT_S)
        patch.setattr(Recording, "__call__", counting)
        patch.setattr(CudaGraphs, "record", recording)
        if fault == "eager on one":
            patch.setattr(cuda_graphs, "MAX_GRAPHS", 1 if rank() == 1 else 8)
        elif fault.startswith("compiles"):
            compiling(patch, fault.partition(", ")[2])
        elif rank() == 1:
            continued = break_worker(patch, fault)
        events: list[Event] = []
        try:
            train_once(events)
        except CUDAGraphError as error:
            return Trained(len(recorded), parts, [f"{type(error).__name__}: {error}"])
        if fault == "hangs":
            time.sleep(2 * LIMIT_S)
        texts = [event.text for event in events if isinstance(event, LogMessage)]
        said = [text for text in texts if re.search("CUDA graphs|layers (are|run)", text)]
        return Trained(len(recorded), parts, said + continued)


def train_student(spec: TrainSpec, tables: list[EmbeddingTable], fault: str) -> Trained:
    return train_here(lambda events: train(spec, tables, events), fault)


@pytest.fixture(scope="module")
def run_both(recipe_of: MakeRecipe) -> RunBoth:
    """Trains with several workers' steps recorded where possible; weights must be those of eager steps, bit by bit."""
    eager: dict[tuple[str, ...], dict[str, Tensor]] = {}

    def weights_and_found(fault: str, *overrides: str) -> tuple[dict[str, Tensor], list[Trained]]:
        spec, tables = make_spec(recipe_of(*overrides))
        found = run_workers(train_student, 2, spec, tables, fault)
        return weights_of(spec.run.path), found

    def run(*overrides: str, fault: str = "") -> list[Trained]:
        if overrides not in eager:
            off = ("training.cuda_graphs=off", "training.compile_layers=off")
            eager[overrides], _ = weights_and_found("", *overrides, *off)
        weights, found = weights_and_found(fault, *overrides, "training.engine=auto")
        assert_equal_weights(eager[overrides], weights)
        assert found[0].said.pop(0) == "engine PyTorch: its steps can be recorded as CUDA graphs"
        return found

    return run


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_two_workers_record_their_steps_in_parts_between_collectives(case: str, run_both: RunBoth) -> None:
    for number, trained in enumerate(run_both(*CASES[case])):
        assert 2 <= trained.recorded < len(trained.parts)
        assert len(trained.said) == (number == 0)


def test_a_worker_replays_while_another_takes_an_eager_step(run_both: RunBoth) -> None:
    """As with batches of other shapes."""
    first, second = run_both(fault="eager on one")
    assert first.recorded > second.recorded == 1 and len(first.parts) > len(second.parts)
    assert len(first.said) == 1 and not second.said
    assert all(parts > 4 and parts % 2 for parts in first.parts)  # graphs, and a collective between any two


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("fails", r"worker 1: operation not permitted when stream is capturing"),
        ("hangs", r"worker 1: recording has not ended after 2 s"),
        pytest.param("other collectives", r"workers have recorded different collectives", marks=pytest.mark.slow),
        ("other seeds", r"worker \d: its (loss|gradient's norm) is [\d.]+, and the eager step's [\d.]+"),
    ],
)
def test_a_worker_whose_recording_is_wrong_lets_all_take_eager_steps(
    fault: str, reason: str, run_both: RunBoth
) -> None:
    first, second = run_both(fault=fault)
    (said,) = first.said
    assert re.fullmatch(rf"steps run eagerly: they cannot be recorded as CUDA graphs \({reason}\)", said)
    assert not second.said and len(first.parts) == len(second.parts) == (fault == "other seeds")


@pytest.mark.slow
def test_steps_that_must_be_recorded_end_the_run_on_all_workers(recipe_of: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_of("training.cuda_graphs=on"))
    for trained in run_workers(train_student, 2, spec, tables, "fails"):
        (error,) = trained.said
        assert error.startswith("CUDAGraphError: steps cannot be recorded") and "training.cuda_graphs=off" in error


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("", "layers are compiled, and steps are recorded"),
        pytest.param(
            "no compiler", r"layers run uncompiled: torch.compile failed \(worker 1: no C c", marks=pytest.mark.slow
        ),
        pytest.param(
            "nonsense", r"layers run uncompiled: torch.compile failed \(worker \d: its ", marks=pytest.mark.slow
        ),
    ],
)
def test_compiled_layers_are_checked_too(fault: str, said: str, run_both: RunBoth) -> None:
    """The compiler here changes nothing, so that weights are equal bit by bit."""
    first, _ = run_both(fault=f"compiles, {fault}")
    texts = [text for text in first.said if "takes up to a minute" not in text]
    assert re.match(said, texts[0])
    assert texts[-1].startswith("steps are recorded") == bool(fault) and len(texts) == 1 + bool(fault)
    assert len(first.parts) >= 8


def compiling(patch: pytest.MonkeyPatch, fault: str) -> None:
    """Let layers be compiled; on worker 1 with a fault."""

    def compile_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
        def compiled(*inputs: Any, **more: Any) -> Any:
            if rank() == 1 and fault == "no compiler":
                raise RuntimeError("no C compiler\nmore of it")
            output = forward(*inputs, **more)
            if rank() == 1 and fault == "nonsense":
                return tuple(part.flip(-1) for part in output) if isinstance(output, tuple) else output.flip(-1)
            return output

        return compiled

    patch.setattr(compiled_step, "MIN_STEPS", 1)
    patch.setattr(step_check, "COMPILED", 1e-6)
    patch.setattr(step_check, "CompiledStep", partial(compiled_step.CompiledStep, compile_forward=compile_forward))


@pytest.mark.parametrize("section", [BiSection, pytest.param(CrossSection, marks=pytest.mark.slow)])
def test_two_workers_of_a_group_record_their_steps(
    section: type[LoopSection], tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> None:
    settings = section.model_validate(
        {"batch_size": 8, "epochs": 3, "lr": 2**-10, "precision": "fp32", "engine": "torch"}
    )
    pairs, cross = make_pairs(tmp_path, sentences[:24], sentences[24:48]), tmp_path / "cross"
    make_cross_encoder(cross, tiny("bert", layers=1))
    model = cross if section is CrossSection else tiny("bert", layers=1)
    weights, found = [], []
    for mode in ("off", "auto"):
        found = run_workers(train_pairs, 2, model, pairs, settings, tmp_path / mode, mode)
        weights.append(found[0][1])
    assert_equal_weights(*weights)
    for number, (trained, _) in enumerate(found):
        assert trained.recorded and len(trained.parts) >= 3 and len(trained.said) == (number == 0)


def train_pairs(
    model: Path, pairs: Pairs, settings: LoopSection, folder: Path, mode: Any
) -> tuple[Trained, dict[str, Tensor]]:
    torch.manual_seed(0)
    labels, weights = np.linspace(0, 1, 24, dtype=np.float32), dict[str, Tensor]()

    def train_once(events: list[Event]) -> None:
        encoder: Encoder | CrossEncoder
        if isinstance(settings, CrossSection):
            encoder = CrossEncoder.load(model, max_length=32)
            tokens = cross_tokens(encoder, pairs, both_orders=True)
        else:
            encoder = Encoder.load(model, pooling="mean", max_length=16)
            tokens = bi_tokens(encoder, pairs)
        task = PairTask(encoder, tokens, labels, settings, None, 4, 0, rank(), 2)
        train_task(task, settings, CheckpointStore(open_store(folder)), Reporter(events.append), cuda_graphs=mode)
        weights.update({name: tensor.cpu() for name, tensor in task.model.state_dict().items()})

    return train_here(train_once), weights
