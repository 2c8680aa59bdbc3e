"""Training steps on the simulated GPU: all tensors on one device, no wait for it in a step, and replays equal to eager steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from distcse.events import DevScore, Event, LogMessage, Reporter
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import BiSection, CrossSection, LoopSection, Recipe
from distcse.runs.distillation.distillation_task import BatchLoader
from distcse.runs.mutual.pair_task import PairTask
from distcse.storage import open_store
from distcse.teachers.kinds import kind_of
from distcse.teachers.lists import LocalTeacherClient
from distcse.text import Corpus
from distcse.training import cuda_graphs
from distcse.training.checkpoints import CheckpointStore
from distcse.training.engines import make_engine
from distcse.training.trainer import train as train_task
from distcse.training.trainer import training_step
from tests.gpusim import Simulation, simulated
from tests.jobs import local_clients, make_recipe, make_spec, train, train_with_and_without_interruption
from tests.models import make_cross_encoder, make_masked_lm
from tests.pairs import bi_tokens, cross_tokens, make_pairs
from tests.training_step import TrainingStep
from tests.weights import assert_equal_weights, weights_of

MakeRecipe = Callable[..., Recipe]
CUSTOM = """
import torch
from torch import Tensor, nn

from distcse.losses import TeacherOutputs, Views


class SquaredDistance(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, views: Views, teachers: TeacherOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        distance = self.scale * (views.z1 - views.z2).square().sum() / len(views.all_z1)
        return distance, {"distance": distance.detach()}
"""
BF16, CACHE, STREAMS = "training.precision=bf16", "training.grad_cache_chunk=4", "training.dropout_rng_streams=4"
BATCH_NORM, UNPROJECTED, CLS = "student.projection=batch_norm_mlp", "student.projection=none", "student.pooling=cls"
ONLY = ("objective.rank=null", "objective.info_nce=null", "objective.consistency=null")


def detecting(*settings: str) -> tuple[str, ...]:
    """Overrides of a recipe of DiffCSE, whose student learns without teachers."""
    section = ", ".join(("weight: 0.5", "generator: GENERATOR", *settings))
    objective = "objective={rank: null, consistency: null, detection: {" + section + "}}"
    return objective, "teachers.encoders=[]", CLS, BATCH_NORM


CASES: dict[str, tuple[str, ...]] = {
    "RankCSE, batch norm, initial weights mixed in": (BATCH_NORM, "student.init_weight_mix=0.2"),
    "ListMLE, bf16, streams": ("objective.rank.form=list_mle", BF16, STREAMS),
    "negative entropy, gradient cache, RoBERTa": (
        *("objective.consistency.form=neg_entropy", CACHE),
        "student.backbone=ROBERTA",
    ),
    "ListNet alone, bf16, [CLS]": (*ONLY, "objective.rank={}", BF16, CLS),
    "ListNet alone, streams, DistilBERT": (*ONLY, "objective.rank={}", STREAMS, "student.backbone=DISTILBERT"),
    "vectors, bf16, gradient cache": (*ONLY, "objective.regression={form: cosine}", UNPROJECTED, BF16, CACHE),
    "vectors by MSE, no dropout": (*ONLY, "objective.regression={form: mse}", UNPROJECTED, "student.dropout=0.0"),
    "rank regression, ELECTRA": (*ONLY, "objective.rank_regression={}", CLS, "student.backbone=ELECTRA"),
    "hinge, bf16, gradient cache, batch norm": (
        *("objective.rank=null", "objective.rank_regression={}", "objective.combine=hinge"),
        *(BF16, CACHE, BATCH_NORM),
    ),
    "DiffCSE, sampled, bf16, streams": (*detecting("replace: masked_only", "sampling: sample"), BF16, STREAMS),
    "DiffCSE, non-padding, gradient cache": (*detecting("reduction: nonpad"), CACHE),
    "DiffCSE, no dropout, weight decay": (*detecting(), "student.dropout=0.0", "training.weight_decay=0.1"),
}
NOT_RECORDED = {
    "custom, bf16, gradient accumulation": (
        *(*ONLY, "objective.custom={squared: {class_path: 'squared_distance:SquaredDistance'}}"),
        *(BF16, "training.gradient_accumulation=2"),
    ),
}


@pytest.fixture(scope="module")
def recipe_of(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]
) -> Iterator[MakeRecipe]:
    """Makes recipes of one corpus, whose teachers embed it once, for a student of one layer."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "squared_distance.py").write_text(CUSTOM)
    make_masked_lm(folder / "generator", tiny("bert"))
    models = {kind.upper(): tiny(kind) for kind in ("distilbert", "roberta", "electra")}
    models["GENERATOR"] = folder / "generator"

    def make(*overrides: str) -> Recipe:
        for name, path in models.items():
            overrides = tuple(each.replace(name, str(path)) for each in overrides)
        teachers = [tiny("minilm"), tiny("roberta")]
        return make_recipe(folder, tiny("bert"), teachers, sentences, "student.layers=[1]", *overrides)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield make


@contextmanager
def no_wait(gpu: Simulation) -> Iterator[None]:
    """Context manager: assert that this thread does not wait for the device."""
    with gpu.counting():
        yield
    assert not [place for place in gpu.waits if " in teacher" not in place]
    assert gpu.launches > 0


@pytest.mark.parametrize("case", [*CASES, *NOT_RECORDED])
def test_a_step_waits_for_nothing(case: str, recipe_of: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_of(*(CASES | NOT_RECORDED)[case]))
    with simulated() as gpu:
        step = TrainingStep(spec, local_clients(spec, tables))
        with no_wait(gpu):
            losses = [step(), step()]
        assert np.isfinite([float(loss) for loss in losses]).all()


def test_a_step_with_live_teachers_waits_for_nothing(recipe_of: MakeRecipe) -> None:
    """They encode in a separate thread, a block of steps ahead."""
    recipe = recipe_of()
    spec, _ = make_spec(recipe)
    with simulated() as gpu:
        corpus = Corpus.open(spec.corpus)
        kinds = [kind_of(teacher) for teacher in recipe.teachers.encoders]
        live = [LocalTeacherClient(kind.open_live(corpus, recipe.teachers.tokens_per_batch)) for kind in kinds]
        step = TrainingStep(spec, live)
        with no_wait(gpu):
            step(), step()
        assert any(" in teacher" in place for place in gpu.waits)


def test_streams_that_could_be_recorded_have_one_width(recipe_of: MakeRecipe) -> None:
    """That of the global batch, on any number of workers."""
    spec, _ = make_spec(recipe_of(STREAMS))

    def widths(step: int, device: str, rank: int = 0, workers: int = 1) -> list[int]:
        streams = BatchLoader(spec, rank, workers).batch(step, torch.device(device)).streams
        return [tokens.ids.shape[1] for tokens, _ in streams]

    with simulated():
        for step in range(8):
            for workers in (1, 2, 4):
                found = [width for rank in range(workers) for width in widths(step, "gpu", rank, workers)]
                assert len(found) == 4 and len({*found}) == 1
    assert any(len({*widths(step, "cpu")}) > 1 for step in range(8))


@pytest.fixture
def pair_task(
    tiny: Callable[..., Path], tmp_path: Path, sentences: list[str]
) -> Callable[[LoopSection, str, int], PairTask]:
    """Makes the task of a one-layer bi- or cross-encoder of 24 pairs, for a section, kind and number of steps."""
    pairs, labels = make_pairs(tmp_path, sentences[:24], sentences[24:48]), np.linspace(0, 1, 24, dtype=np.float32)

    def make(section: LoopSection, kind: str, steps: int) -> PairTask:
        torch.manual_seed(0)
        if isinstance(section, CrossSection):
            scorer = CrossEncoder.load(make_cross_encoder(tmp_path / "cross", tiny(kind, layers=1)), max_length=32)
            return PairTask(scorer, cross_tokens(scorer, pairs, both_orders=True), labels, section, None, steps, 0)
        encoder = Encoder.load(tiny(kind, layers=1), pooling="mean", max_length=16)
        return PairTask(encoder, bi_tokens(encoder, pairs), labels, section, None, steps, 0)

    return make


@pytest.mark.parametrize(
    ("section", "kind", "precision"),
    [(BiSection, "roberta", "bf16"), (CrossSection, "bert", "bf16"), (CrossSection, "roberta", "fp32")],
)
def test_a_step_of_pairs_waits_for_nothing(
    section: type[LoopSection], kind: str, precision: str, pair_task: Callable[..., PairTask]
) -> None:
    settings = section.model_validate({"batch_size": 8, "precision": precision, "engine": "torch"})
    with simulated() as gpu:
        task = pair_task(settings, kind, 100)
        engine = make_engine(task.model, settings, task.rows, None)
        task.model.train()
        with no_wait(gpu):
            for step in range(2):
                training_step(engine, task, task.prepare_batch(step, engine.device), 1e-3)


@pytest.fixture
def recordings(monkeypatch: pytest.MonkeyPatch) -> list[Mock]:
    """The recorded steps, as mocks that count their replays."""
    found, record = list[Mock](), cuda_graphs.CudaGraphs.record

    def counting(*arguments: Any) -> Mock:
        found.append(Mock(wraps=record(*arguments)))
        return found[-1]

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "record", counting)
    return found


def replays(recordings: list[Mock]) -> int:
    return sum(recording.call_count for recording in recordings)


@pytest.fixture
def exact_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes all learning rates exact in float32, in which recorded steps read them."""
    monkeypatch.setattr("distcse.training.trainer.warmup_then_linear", lambda step, *_: 1 - step % 8 / 8)


@pytest.mark.usefixtures("exact_rates")
@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (n > 0)) for n, c in enumerate(CASES)])
def test_recorded_steps_give_the_same_weights_as_eager_ones(
    case: str, recipe_of: MakeRecipe, recordings: list[Mock]
) -> None:
    """Bitwise, with several batch shapes, dropout, dev scores and checkpoints in between."""
    runs, said = [], []
    for mode, engine in (("off", "torch"), ("auto", "auto")):
        fixed = (f"training.cuda_graphs={mode}", f"training.engine={engine}", f"training.lr={2**-10}")
        spec, tables = make_spec(recipe_of("training.max_steps=10", *fixed, *CASES[case]))
        events: list[Event] = []
        with simulated():
            train(spec, tables, events)
        runs.append(weights_of(spec.run.path))
        texts = [event.text for event in events if isinstance(event, LogMessage)]
        said.append(any("recorded as CUDA graphs" in text for text in texts))
    assert said == [False, True] and 0 < len(recordings) < replays(recordings) >= 4
    assert_equal_weights(*runs)


@pytest.mark.usefixtures("exact_rates")
@pytest.mark.parametrize("section", [BiSection, CrossSection])
def test_recorded_steps_of_pairs_give_the_same_weights_as_eager_ones(
    section: type[LoopSection], tmp_path: Path, pair_task: Callable[..., PairTask], recordings: list[Mock]
) -> None:
    """Bitwise, with several batch shapes, dropout, checkpoints in between, and the sections' own weight decay."""
    settings = section.model_validate(
        {"batch_size": 8, "epochs": 3, "lr": 2**-10, "precision": "bf16", "engine": "torch"}
    )
    weights = []
    for mode in ("off", "auto"):
        with simulated():
            task = pair_task(settings, "bert", 4)
            train_task(task, settings, CheckpointStore(open_store(tmp_path / mode)), Reporter(), cuda_graphs=mode)  # type: ignore[arg-type]
            weights.append({name: tensor.cpu() for name, tensor in task.model.state_dict().items()})
    assert replays(recordings) >= 3
    assert_equal_weights(*weights)


def test_a_resumed_run_takes_eager_steps_that_were_replayed_before(
    recipe_of: MakeRecipe, recordings: list[Mock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are bitwise equal, also with learning rates that are not exact in float32, and few recorded shapes."""
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    with simulated():
        undisturbed, resumed = train_with_and_without_interruption(recipe_of("training.max_steps=13", CLS))
    assert 2 <= len(recordings) <= 6 and replays(recordings) > 6
    assert_equal_weights(weights_of(undisturbed.run.path), weights_of(resumed.run.path))


def test_a_run_waits_only_at_its_start_and_for_reports_scores_and_checkpoints(recipe_of: MakeRecipe) -> None:
    spec, tables = make_spec(recipe_of("training.max_steps=13", BF16))
    events: list[Event] = []
    with simulated() as gpu, gpu.counting():
        train(spec, tables, events)
    assert [event.step for event in events if isinstance(event, DevScore)] == [0, 6, 12, 13]
    waits = Counter[str]()
    for place, count in gpu.waits.items():
        waits[place.partition(" @ ")[2].partition(":")[0]] += count
    # Copies of the weights, of two buffers that are not saved, and of the number of updates, before the first step.
    assert waits.pop("distcse/training/engines/torch_engine.py") == len(weights_of(spec.run.path)) + 2
    assert waits.pop("distcse/training/engines/fused_adamw.py") == 1
    # Reports after 4, 8, 12 and 13 steps, and a check before a score.
    assert waits.pop("distcse/training/step_log.py") == 5
    assert set(waits) == {"distcse/devices/device.py"}  # vectors of the dev set, and snapshots for checkpoints
