"""Groups that run out of a GPU's memory continue with smaller forward passes; the GPU is simulated."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.errors import OutOfMemoryError
from distcse.events import CheckpointSaved, Event, GroupEvent, LogMessage, Reporter, StepReport
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import MutualRecipe
from distcse.runs.directory import RunDirectory
from distcse.runs.mutual.pair_task import PairTask, PairTokens
from tests.backends import run_mutual
from tests.failures import fails_with
from tests.gpusim import Simulation, simulated
from tests.pairs import assert_same_labels, bi_tokens, cross_tokens, make_mutual_recipe, make_pairs


@pytest.mark.parametrize("kind", ["bi", "cross"])
def test_smaller_passes_have_the_same_gradient_and_need_less_memory(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str], simulated_gpu: Simulation, kind: str
) -> None:
    recipe = make_mutual_recipe(tmp_path, {"only": tiny("bert")}, sentences)
    pairs, labels = make_pairs(tmp_path, sentences[:16], sentences[16:32]), np.linspace(0, 1, 16, dtype=np.float32)
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    gradients: list[dict[str, torch.Tensor]] = []
    peaks: list[int] = []
    for passes in (1, 4):
        encoder: Encoder | CrossEncoder
        tokens: PairTokens
        torch.manual_seed(0)
        if kind == "bi":
            encoder = Encoder.from_section(recipe.groups[0].model_copy(update={"dropout": 0.0}))
            tokens = bi_tokens(encoder, pairs)
        else:
            encoder = CrossEncoder.fresh(tiny("bert"), 32, dropout=0.0)
            tokens = cross_tokens(encoder, pairs, both_orders=False)
        task = PairTask(encoder, tokens, labels, recipe.bi, None, 1, seed=3, passes=passes)
        task.model.to(device).train()
        inputs = task.prepare_batch(0, device)
        assert [len(stream.parts) for stream in inputs.model_inputs] == [passes]
        before = simulated_gpu.peak_bytes = simulated_gpu.allocated_bytes
        share, _ = task.compute_loss(inputs.loss_inputs, task.model(inputs.model_inputs))
        peaks.append(simulated_gpu.peak_bytes - before)
        share.backward()
        gradients.append({name: p.grad.cpu() for name, p in task.model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4, msg=name)
    assert peaks[1] < peaks[0] / 2


def test_a_group_without_memory_continues_from_its_checkpoint_to_the_same_labels(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    """The cross-encoder runs out of memory once, after its first checkpoint; the bi-encoder does not."""
    overrides = (
        "mutual.cycles=1",
        "groups.0.dropout=0.0",
        "cross.epochs=2",
        "cross.log_every=1",
        "cross.cuda_graphs=off",
    )
    recipe = make_mutual_recipe(tmp_path, {"only": tiny("bert")}, sentences, *overrides)
    events: list[Event] = []
    with simulated() as gpu, ExitStack() as failing:
        undisturbed = run_mutual(recipe, Reporter())

        def on_event(event: Event) -> None:
            inner = event.event if isinstance(event, GroupEvent) else event
            if isinstance(inner, CheckpointSaved) and not any(isinstance(old, CheckpointSaved) for old in events):
                failing.enter_context(gpu.out_of_memory(at="distcse/training/engines", after=50))
            events.append(inner)

        disturbed = run_mutual(recipe, Reporter(on_event))
    (number,) = [
        number
        for number, event in enumerate(events)
        if isinstance(event, LogMessage) and event.text.startswith("out of memory in cycle-1-cross")
    ]
    warning = events[number]
    assert isinstance(warning, LogMessage) and warning.warning and "8 of 16 pairs" in warning.text
    saved = [event.step for event in events[:number] if isinstance(event, CheckpointSaved)]
    repeated = next(event.step for event in events[number:] if isinstance(event, StepReport))
    assert saved and repeated == saved[-1] + 1
    assert (disturbed.directory.path / "memory" / "only.json").exists()
    assert_same_labels(undisturbed.directory.path, disturbed.directory.path, tolerance=1e-4)


def test_a_group_in_which_no_pair_fits_ends_with_advice(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    overrides = ("mutual.cycles=1", "cross.cuda_graphs=off")
    recipe = make_mutual_recipe(tmp_path, {"only": tiny("bert")}, sentences, *overrides)
    events: list[Event] = []
    with (
        simulated() as gpu,
        gpu.out_of_memory(at="distcse/training/engines", times=10_000),
        fails_with(OutOfMemoryError, "group only", "cycle-1-cross", "1 pair per forward pass", "batch_size=8"),
    ):
        run_mutual(recipe, Reporter(events.append))
    inner = [event.event if isinstance(event, GroupEvent) else event for event in events]
    halved = [event.text for event in inner if isinstance(event, LogMessage) and "out of memory" in event.text]
    assert [f"at most {pairs} of 16 pairs" in text for pairs, text in zip((8, 4, 2, 1), halved, strict=True)] == [
        True
    ] * 4


@pytest.mark.slow
def test_a_resumed_run_begins_with_the_smaller_passes(
    tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]
) -> None:
    recipe = make_mutual_recipe(tmp_path, {"only": tiny("bert")}, sentences, "mutual.cycles=1")
    events: list[Event] = []

    def is_out_of_memory(event: Event) -> bool:
        return isinstance(event, GroupEvent) and isinstance(event.event, LogMessage) and event.event.warning

    with simulated() as gpu, gpu.out_of_memory(at="distcse/training/engines", after=100):
        first = run_mutual(recipe, Reporter(events.append, lambda: any(map(is_out_of_memory, events))))
    assert first.interrupted
    directory, resumed = RunDirectory.reopen(first.directory.path, [])
    assert isinstance(resumed, MutualRecipe)
    passes: list[int] = []
    original = PairTask.prepare_batch

    def note(self: PairTask, step: int, device: torch.device) -> object:
        inputs = original(self, step, device)
        (stream,) = inputs.model_inputs
        passes.append(len(stream.parts) if stream.recomputes else 1)
        return inputs

    with simulated(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(PairTask, "prepare_batch", note)
        assert not run_mutual(resumed, Reporter(), directory).interrupted
    assert set(passes) == {1, 2}, "the cross-encoder's steps have two passes, the bi-encoder's one"
