"""Training steps on the simulated GPU: all tensors on one device, no wait for it in a step, and replays equal to eager steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from distcse.devices.device import gpu_module
from distcse.devices.distributed import rank as distributed_rank
from distcse.events import DevScore, Event, LogMessage, Reporter
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import BiSection, CrossSection, LoopSection, Recipe
from distcse.runs.distillation.batch_loader import BatchLoader, TrainSpec
from distcse.runs.mutual.pair_task import PairTask
from distcse.teachers.kinds import kind_of
from distcse.teachers.lists import LocalTeacherClient
from distcse.teachers.table import EmbeddingTable
from distcse.teachers.teacher import open_table_teacher
from distcse.text import Corpus
from distcse.text.collate import Tokens
from distcse.training import cuda_graphs
from distcse.training.checkpoints import CheckpointStore
from distcse.training.engines import make_engine
from distcse.training.trainer import train as train_task
from distcse.training.trainer import training_step
from tests.backends import run
from tests.gpusim import Simulation, simulated
from tests.jobs import make_recipe, make_spec, train
from tests.models import KINDS, make_cross_encoder, make_masked_lm
from tests.pairs import bi_tokens, cross_tokens, make_pairs
from tests.training_step import TrainingStep
from tests.weights import assert_equal_weights, weights_of
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]
STEPS = 2
ALLOWED: dict[str, int] = {}
"""Waits of a step, by kind and line."""
CUSTOM = """
from torch import Tensor, nn

from distcse.losses import TeacherOutputs, Views


class SquaredDistance(nn.Module):
    def forward(self, views: Views, teachers: TeacherOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        distance = (views.z1 - views.z2).square().sum() / len(views.all_z1)
        return distance, {"distance": distance.detach()}
"""
ONLY = ("objective.rank=null", "objective.info_nce=null", "objective.consistency=null")
LOSSES: dict[str, tuple[str, ...]] = {
    "ListNet, InfoNCE, JS consistency": (),
    "ListMLE": ("objective.rank.form=list_mle",),
    "negative entropy": ("objective.consistency.form=neg_entropy",),
    "false negatives masked": (*ONLY, "objective.info_nce={false_negatives: {threshold: 0.99}}"),
    "false negatives softened": (*ONLY, "objective.info_nce={false_negatives: {threshold: 0.99, form: soften}}"),
    "vectors": (*ONLY, "objective.regression={form: cosine}", "student.projection=none"),
    "vectors by MSE": (*ONLY, "objective.regression={form: mse}", "student.projection=none"),
    "rank regression": (*ONLY, "objective.rank_regression={}"),
    "rank regression, hinge": ("objective.rank=null", "objective.rank_regression={}", "objective.combine=hinge"),
    "custom": (*ONLY, "objective.custom={squared: {class_path: 'squared_distance:SquaredDistance'}}"),
}
SINGLE_PASS: dict[str, tuple[str, ...]] = {
    "batch norm": ("student.projection=batch_norm_mlp",),
    "no dropout": ("student.dropout=0.0",),
    "mean of the first and last layer": ("student.pooling=first_last_avg",),
    "[CLS], factorized embeddings": ("student.pooling=cls", "student.embedding_size=8"),
    "weight decay": ("training.weight_decay=0.1",),
    "gradient accumulation": ("training.gradient_accumulation=2",),
}
DETECTION: dict[str, tuple[str, ...]] = {
    "replacement": (),
    "masked only, sampled": ("replace: masked_only", "sampling: sample"),
    "non-padding": ("reduction: nonpad",),
}
MODES: dict[str, tuple[str, ...]] = {
    "plain": (),
    "gradient cache": ("training.grad_cache_chunk=8",),
    "streams": ("training.dropout_rng_streams=2",),
}


def detecting(edit: str) -> tuple[str, ...]:
    """Overrides of a recipe of DiffCSE, whose student learns without teachers."""
    section = ", ".join(("weight: 0.5", "generator: GENERATOR", *DETECTION[edit]))
    objective = "objective={rank: null, consistency: null, detection: {" + section + "}}"
    return objective, "teachers.encoders=[]", "student.pooling=cls", "student.projection=batch_norm_mlp"


def in_all_modes(kinds: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return each kind, precision and mode."""
    return [(kind, precision, mode) for mode in MODES for precision in ("fp32", "bf16") for kind in kinds]


@pytest.fixture(scope="module")
def recipe_of(
    tmp_path_factory: pytest.TempPathFactory, tiny: Callable[..., Path], sentences: list[str]
) -> Iterator[MakeRecipe]:
    """Makes recipes of one corpus, whose teachers embed it once."""
    folder = tmp_path_factory.mktemp("steps")
    (folder / "squared_distance.py").write_text(CUSTOM)
    make_masked_lm(folder / "generator", tiny("bert"))

    def make(*overrides: str) -> Recipe:
        named = [each.replace("GENERATOR", str(folder / "generator")) for each in overrides]
        return make_recipe(folder, tiny("bert"), [tiny("minilm"), tiny("roberta")], sentences, *named)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield make


def clients(spec: TrainSpec, tables: Sequence[EmbeddingTable]) -> list[LocalTeacherClient]:
    teachers = spec.recipe.teachers.encoders
    return [
        LocalTeacherClient(open_table_teacher(teacher, table)) for teacher, table in zip(teachers, tables, strict=True)
    ]


@contextmanager
def no_wait(gpu: Simulation) -> Iterator[None]:
    """Context manager: assert that this thread does not wait for the device."""
    with gpu.counting():
        yield
    assert {place: count for place, count in gpu.waits.items() if " in teacher" not in place} == ALLOWED
    assert gpu.launches > 0


def test_streams_that_could_be_recorded_have_one_width(recipe_of: MakeRecipe) -> None:
    """That of the global batch, on any number of workers."""
    spec, _ = make_spec(recipe_of("training.dropout_rng_streams=4"))
    with simulated():
        widths = [
            [tokens.ids.shape[1] for rank in range(workers) for tokens, _ in streams_of(spec, rank, workers, step)]
            for step in range(8)
            for workers in (1, 2, 4)
        ]
    assert all(len(each) == 4 and len({*each}) == 1 for each in widths)
    on_cpu = BatchLoader(spec, 0, 1)
    assert any(len({t.ids.shape[1] for t, _ in on_cpu.batch(n, torch.device("cpu")).streams}) > 1 for n in range(8))


def streams_of(spec: TrainSpec, rank: int, workers: int, step: int) -> Sequence[tuple[Tokens, int]]:
    return BatchLoader(spec, rank, workers).batch(step, torch.device("gpu")).streams


def check_steps(recipe: Recipe) -> None:
    """Assert that a recipe's first steps stay on the device, wait for nothing and have finite losses."""
    spec, tables = make_spec(recipe)
    with simulated() as gpu:
        step = TrainingStep(spec, clients(spec, tables))
        with no_wait(gpu):
            losses = [step() for _ in range(STEPS)]
        values = [float(loss) for loss in losses]
    assert np.isfinite(values).all()


@pytest.mark.parametrize(("loss", "precision", "mode"), in_all_modes(LOSSES))
def test_a_step_waits_for_nothing(loss: str, precision: str, mode: str, recipe_of: MakeRecipe) -> None:
    check_steps(recipe_of(*LOSSES[loss], *MODES[mode], f"training.precision={precision}"))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("setting", SINGLE_PASS)
def test_a_step_with_other_settings_waits_for_nothing(setting: str, precision: str, recipe_of: MakeRecipe) -> None:
    check_steps(recipe_of(*SINGLE_PASS[setting], f"training.precision={precision}"))


@pytest.mark.parametrize(("edit", "precision", "mode"), in_all_modes(DETECTION))
def test_a_diffcse_step_waits_for_nothing(edit: str, precision: str, mode: str, recipe_of: MakeRecipe) -> None:
    overrides = (*detecting(edit), *MODES[mode])
    if mode == "gradient cache":
        overrides = (*overrides, "student.projection=none")
    check_steps(recipe_of(*overrides, f"training.precision={precision}"))


def test_a_step_with_live_teachers_waits_for_nothing(recipe_of: MakeRecipe) -> None:
    """They encode in a separate thread, a block of steps ahead."""
    recipe = recipe_of()
    spec, _ = make_spec(recipe)
    with simulated() as gpu:
        live = [
            LocalTeacherClient(
                kind_of(teacher).open_live(Corpus.open(spec.corpus.path), recipe.teachers.tokens_per_batch)
            )
            for teacher in recipe.teachers.encoders
        ]
        step = TrainingStep(spec, live)
        with no_wait(gpu):
            for _ in range(STEPS):
                step()
        assert any(" in teacher" in place for place in gpu.waits)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("formulation", ["bi", "cross"])
def test_a_step_of_pairs_waits_for_nothing(
    formulation: str,
    kind: str,
    precision: str,
    tiny: Callable[..., Path],
    tmp_path: Path,
    sentences: list[str],
    recipe_of: MakeRecipe,
) -> None:
    pairs, labels = make_pairs(tmp_path, sentences[:32], sentences[32:64]), np.linspace(0, 1, 32, dtype=np.float32)
    section = recipe_of(f"training.precision={precision}").training
    with simulated() as gpu:
        if formulation == "bi":
            encoder = Encoder.load(tiny(kind), pooling="mean", max_length=16)
            task = PairTask(encoder, bi_tokens(encoder, pairs), labels, section, None, 100, 0)
        else:
            scorer = CrossEncoder.load(make_cross_encoder(tmp_path / "cross", tiny(kind)), max_length=32)
            task = PairTask(scorer, cross_tokens(scorer, pairs, both_orders=True), labels, section, None, 100, 0)
        engine = make_engine(task.model, section, task.rows, None)
        task.model.train()
        with no_wait(gpu):
            for step in range(2):
                training_step(engine, task, task.prepare_batch(step, engine.device), 1e-3)


GRAPH_MODES: tuple[cuda_graphs.GraphMode, cuda_graphs.GraphMode] = ("off", "auto")
RECORDED: dict[str, tuple[str, ...]] = {
    "RankCSE": (),
    "bf16, [CLS]": ("training.precision=bf16", "student.pooling=cls"),
    "bf16, no dropout": ("training.precision=bf16", "student.dropout=0.0"),
    "ListMLE": ("objective.rank.form=list_mle",),
    "vectors": (*ONLY, "objective.regression={}", "student.projection=none"),
    "hinge": ("objective.rank=null", "objective.rank_regression={}", "objective.combine=hinge"),
    "false negatives": (*ONLY, "objective.info_nce={false_negatives: {threshold: 0.9, form: soften}}"),
    "batch norm": ("student.projection=batch_norm_mlp",),
    "negative entropy": ("objective.consistency.form=neg_entropy",),
    "vectors by MSE": (*ONLY, "objective.regression={form: mse}", "student.projection=none"),
    "gradient cache": ("training.grad_cache_chunk=4",),
    "RoBERTa": (),
    "DistilBERT": (),
    "streams": ("training.dropout_rng_streams=4",),
    "gradient cache, bf16, batch norm": (
        "training.grad_cache_chunk=4",
        "training.precision=bf16",
        "student.projection=batch_norm_mlp",
    ),
    "MiniLM": (),
    **{f"DiffCSE, {edit}": detecting(edit) for edit in DETECTION},
    "DiffCSE, no dropout": (*detecting("replacement"), "student.dropout=0.0"),
    "DiffCSE, streams": (*detecting("replacement"), "training.dropout_rng_streams=4"),
    "DiffCSE, gradient cache": (*detecting("replacement"), "training.grad_cache_chunk=4"),
}


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each replay of a recorded step."""
    entries, record = list[None](), cuda_graphs.CudaGraphs.record

    def counting(
        recorder: cuda_graphs.CudaGraphs, call: Callable[[], object], seeds: Sequence[int]
    ) -> Callable[[Sequence[int]], object]:
        replay = record(recorder, call, seeds)

        def counted(new_seeds: Sequence[int]) -> object:
            entries.append(None)
            return replay(new_seeds)

        return counted

    monkeypatch.setattr(cuda_graphs.CudaGraphs, "record", counting)
    return entries


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("formulation", ["bi", "cross"])
def test_recorded_steps_of_pairs_give_the_same_weights_as_eager_ones(
    formulation: Literal["bi", "cross"],
    precision: str,
    tiny: Callable[..., Path],
    tmp_path: Path,
    sentences: list[str],
    replays: list[None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bitwise, with several batch shapes, dropout, checkpoints in between, and the sections' own weight decay."""
    monkeypatch.setattr("distcse.training.trainer.warmup_then_linear", lambda step, *_: 1 - step % 8 / 8)
    pairs, labels = make_pairs(tmp_path, sentences[:40], sentences[40:80]), np.linspace(0, 1, 40, dtype=np.float32)
    settings = {"batch_size": 8, "epochs": 3, "lr": 2**-10, "precision": precision, "engine": "torch"}
    kind: type[LoopSection] = BiSection if formulation == "bi" else CrossSection
    section = kind.model_validate(settings)
    weights = []
    for mode in GRAPH_MODES:
        with simulated():
            torch.manual_seed(0)
            if formulation == "bi":
                encoder = Encoder.load(tiny("bert"), pooling="mean", max_length=16)
                task = PairTask(encoder, bi_tokens(encoder, pairs), labels, section, None, 4, 0)
            else:
                scorer = CrossEncoder.load(make_cross_encoder(tmp_path / "cross", tiny("bert")), max_length=32)
                task = PairTask(scorer, cross_tokens(scorer, pairs, both_orders=True), labels, section, None, 4, 0)
            train_task(task, section, CheckpointStore(tmp_path / mode), Reporter(), cuda_graphs=mode)
            weights.append({name: tensor.cpu() for name, tensor in task.model.state_dict().items()})
    assert len(replays) >= 6
    assert_equal_weights(*weights)


@pytest.mark.parametrize(
    "family",
    [pytest.param(family, marks=() if number < 2 else pytest.mark.slow) for number, family in enumerate(RECORDED)],
)
def test_recorded_steps_give_the_same_weights_as_eager_ones(
    family: str,
    recipe_of: MakeRecipe,
    tiny: Callable[..., Path],
    replays: list[None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bitwise, with several batch shapes, dropout, dev scores and checkpoints in between."""
    monkeypatch.setattr("distcse.training.trainer.warmup_then_linear", lambda step, *_: 1 - step % 8 / 8)
    overrides = list(RECORDED[family])
    if family.lower() in KINDS:
        overrides = [f"student.backbone={tiny(family.lower())}"]
    runs = []
    for mode in ("off", "on"):
        # The kernel reads a learning rate tensor in float32: all rates are exact in it.
        fixed = ("training.max_steps=10", f"training.lr={2**-10}", f"training.cuda_graphs={mode}")
        spec, tables = make_spec(recipe_of(*fixed, *overrides))
        with simulated():
            train(spec, tables)
        runs.append(weights_of(spec.run.path))
    assert len(replays) >= 4
    assert_equal_weights(*runs)


OF_SEVERAL_WORKERS: dict[str, tuple[str, ...]] = {
    "gradient cache, bf16, batch norm": RECORDED["gradient cache, bf16, batch norm"],
    "RankCSE": (),
    "hinge": RECORDED["hinge"],
    "ListMLE": RECORDED["ListMLE"],
    "vectors": RECORDED["vectors"],
    "false negatives": RECORDED["false negatives"],
    "DiffCSE": detecting("replacement"),
    "DiffCSE, gradient cache": RECORDED["DiffCSE, gradient cache"],
}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.slow if number else ())
        for number, family in enumerate(OF_SEVERAL_WORKERS)
    ],
)
def test_steps_of_two_workers_recorded_in_parts_give_the_same_weights_as_eager_ones(
    family: str, recipe_of: MakeRecipe
) -> None:
    """Bitwise, also where one worker replays while the other runs its steps eagerly, as with batches of other shapes."""

    def trained(mode: str, recording: int) -> tuple[Any, list[tuple[list[int], dict[str, int], int]]]:
        fixed = ("training.max_steps=10", f"training.lr={2**-10}", f"training.cuda_graphs={mode}", "training.workers=2")
        spec, tables = make_spec(recipe_of(*fixed, *OF_SEVERAL_WORKERS[family]))
        found = run_workers(train_in_a_group, 2, spec, tables, recording)
        return weights_of(spec.run.path), found

    eager, _ = trained("off", 2)
    for recording in (2, 1):
        weights, found = trained("on", recording)
        assert_equal_weights(eager, weights)
        for rank, (parts, waits, said) in enumerate(found):
            assert said == (rank == 0)
            graphs = [number // 2 + 1 for number in parts]  # between any two is a collective
            assert (len(parts) >= 4 and min(graphs) > 3) if rank < recording else parts == []
            assert not any("views.py" in place or "student.py" in place or "distributed.py" in place for place in waits)


def train_in_a_group(
    spec: TrainSpec, tables: list[EmbeddingTable], recording: int
) -> tuple[list[int], dict[str, int], int]:
    """Train on this worker's simulated GPU.

    Returns:
        Numbers of parts of its replays, its waits, and how often it says that steps are recorded.

    Args:
        spec: The run.
        tables: Its teachers' tables.
        recording: Number of workers that record their steps.
    """
    replayed, replay = list[int](), cuda_graphs.RecordedParts.replay

    def counting(recorded: cuda_graphs.RecordedParts, seeds: Sequence[int]) -> None:
        replayed.append(len(recorded.parts))
        replay(recorded, seeds)

    with pytest.MonkeyPatch.context() as patch, simulated() as gpu:
        patch.setattr("distcse.training.trainer.warmup_then_linear", lambda step, *_: 1 - step % 8 / 8)
        patch.setattr(cuda_graphs.RecordedParts, "replay", counting)
        if distributed_rank() >= recording:
            patch.setattr(cuda_graphs, "MAX_GRAPHS", 0)
        events: list[Event] = []
        with gpu.counting():
            train(spec, tables, events)
        said = sum(isinstance(event, LogMessage) and "steps are recorded" in event.text for event in events)
        return replayed, dict(gpu.waits), said


def test_graphs_of_two_workers_cannot_end_in_a_threads_backward_pass() -> None:
    """The rule that needs a backward pass in the thread that records."""
    with simulated():
        device, (ended,) = torch.device("gpu"), [list[str]()]

        class Ending(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
                return rows.clone()

            @staticmethod
            def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
                parts.add_collective(lambda: ended.append("run"))
                return gradient

        module = gpu_module(device)
        parts = cuda_graphs.RecordedParts(
            lambda rng: (module.graph(graph := module.CUDAGraph()), graph.replay), cuda_graphs.GraphRNG(module, [])
        )
        rows = torch.ones(2, device=device, requires_grad=True)
        with parts.recording(), torch.autograd.set_multithreading_enabled(False):
            Ending.apply(rows).sum().backward()
        assert len(parts.parts) == 3 and not ended
        with pytest.raises(RuntimeError, match="from another thread"), parts.recording():
            Ending.apply(rows).sum().backward()


def test_a_run_waits_only_at_its_start_and_for_reports_scores_and_checkpoints(recipe_of: MakeRecipe) -> None:
    """An interrupted and resumed run has its weights."""
    recipe = recipe_of("training.max_steps=13", "training.precision=bf16")
    spec, tables = make_spec(recipe)
    resumed, _ = make_spec(recipe)
    events: list[Event] = []
    with simulated() as gpu:
        with gpu.counting():
            train(spec, tables, events)
        assert train(resumed, tables, stop_after=2).interrupted
        train(resumed, tables)
    assert_equal_weights(weights_of(spec.run.path), weights_of(resumed.run.path))
    assert [event.step for event in events if isinstance(event, DevScore)] == [0, 6, 12, 13]
    waits = Counter[str]()
    for place, count in gpu.waits.items():
        waits[place.partition(" @ ")[2].partition(":")[0]] += count
    # Copies of the weights, of two buffers that are not saved, and of the number of updates, before the first step.
    assert waits.pop("distcse/training/engines/torch_engine.py") == len(weights_of(spec.run.path)) + 2
    assert waits.pop("distcse/training/engines/fused_adamw.py") == 1
    assert (
        waits.pop("distcse/training/step_log.py") == 5
    )  # reports after 4, 8, 12 and 13 steps, and a check before a score
    assert set(waits) == {"distcse/devices/device.py"}  # vectors of the dev set, and snapshots for checkpoints


def test_a_whole_run_has_the_layers_and_scores_of_one_on_a_cpu(
    recipe_with: MakeRecipe, labelled: Path, tmp_path: Path
) -> None:
    """With `layers: auto`, a rank-space teacher and the final evaluation. The host waits to load models, and for results."""
    overrides = (
        "student.layers=auto",
        "student.num_layers=2",
        "student.dropout=0.0",
        "teachers.encoders.0.similarity=rank",
        "teachers.encoders.0.num_references=50",
        "training.max_steps=12",
        f"evaluation.data={labelled}",
        "evaluation.final_suites=[sts]",
    )
    results, scores = [], []
    for device in ("cpu", "gpu"):
        recipe, events = recipe_with(*overrides, f"storage.cache={tmp_path / device}"), list[Event]()
        with (
            simulated() if device == "gpu" else nullcontext() as gpu,
            gpu.counting() if gpu is not None else nullcontext(),
        ):
            results.append(run(recipe, Reporter(events.append)))
        scores.append([event.score for event in events if isinstance(event, DevScore)])
    assert gpu is not None
    assert {place.partition(" @ ")[2].partition(":")[0].rpartition("/")[2] for place in gpu.waits} == {
        *("layer_selection.py", "base.py", "torch_engine.py", "fused_adamw.py", "final_evaluation.py"),
        *("step_log.py", "device.py"),
    }
    assert results[0].recipe.student.layers == results[1].recipe.student.layers
    assert len(scores[0]) == 3 and scores[1] == pytest.approx(scores[0], abs=0.5)
    first, second = (result.evaluation for result in results)
    assert first is not None and second is not None and len(first.scores) == len(second.scores) > 0
    for expected, found in zip(first.scores, second.scores, strict=True):
        assert found.values == pytest.approx(expected.values, abs=0.5)
