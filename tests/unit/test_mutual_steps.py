"""What a group computes does not depend on its workers, its scorers, the passes of a step, or a GPU without memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.errors import OutOfMemoryError, RunTakenOverError
from distcse.events import Event, GroupEvent, LogMessage, Reporter
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import MutualRecipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.runs.mutual import phase_trainer
from distcse.runs.mutual.pair_task import PairTask, PairTokens
from distcse.runs.mutual.pairs import load_pairs
from distcse.runs.mutual.phase_store import GroupContext, Phase, ScoreShards
from distcse.runs.mutual.phase_trainer import PairScorer
from distcse.storage import open_store
from tests.backends import resume_mutual, run_mutual
from tests.failures import fails_with
from tests.gpusim import Simulation, simulated
from tests.pairs import bi_tokens, cross_tokens, make_mutual_recipe, make_pairs

MakeRecipe = Callable[..., MutualRecipe]


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    return lambda *overrides: make_mutual_recipe(tmp_path, {"only": tiny("bert")}, sentences, *overrides)


class Gradients:
    """Gradients of the first step of 16 pairs of a bi- or cross-encoder, summed over its workers as engines sum them."""

    def __init__(
        self, kind: str, recipe: MutualRecipe, sentences: list[str], folder: Path, device: str = "cpu"
    ) -> None:
        self._kind, self._recipe, self._device = kind, recipe, torch.device(device)
        second = [f"{one} {other}" for one, other in zip(sentences[20:40], sentences[40:60], strict=True)]
        self._pairs = make_pairs(folder, sentences[:20], second)
        self._labels = np.linspace(0, 1, 20, dtype=np.float32)

    def __call__(self, workers: int, streams: int, passes: int = 1) -> dict[str, torch.Tensor]:
        group, section = self._recipe.groups[0], self._recipe.bi
        torch.manual_seed(0)
        encoder: Encoder | CrossEncoder
        tokens: PairTokens
        if self._kind == "bi":
            encoder = Encoder.from_section(group)
            tokens = bi_tokens(encoder, self._pairs)
        else:
            encoder = CrossEncoder.fresh(group.backbone, 32, dropout=group.dropout)
            tokens = cross_tokens(encoder, self._pairs, both_orders=True)
        encoder.to(self._device).train()
        total = 0.0
        for rank in range(workers):
            task = PairTask(
                encoder, tokens, self._labels, section, None, 1, 3, rank, workers, passes=passes, streams=streams
            )
            inputs = task.prepare_batch(0, self._device)
            assert len(inputs.loss_inputs) == task.rows == section.batch_size // workers
            share, _ = task.compute_loss(inputs.loss_inputs, task.model(inputs.model_inputs))
            share.backward()
            total += share.item()
        found = {name: p.grad.cpu() for name, p in encoder.named_parameters() if p.grad is not None}
        return {"loss": torch.tensor(total), **found}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize(("kind", "passes"), [("bi", 1), ("bi", 2), ("cross", 2)])
def test_any_number_of_workers_has_the_gradient_of_one(
    recipe_with: MakeRecipe, sentences: list[str], tmp_path: Path, kind: str, passes: int
) -> None:
    gradients = Gradients(kind, recipe_with("groups.0.dropout=0.2"), sentences, tmp_path)
    one = gradients(workers=1, streams=4, passes=passes)
    for workers in (2, 4):
        assert_close(one, gradients(workers, streams=4, passes=passes))
    with pytest.raises(AssertionError):  # other dropout
        assert_close(one, gradients(workers=1, streams=1, passes=passes))


@pytest.mark.parametrize("kind", ["bi", "cross"])
def test_smaller_passes_have_the_same_gradient_and_need_less_memory(
    recipe_with: MakeRecipe, tmp_path: Path, sentences: list[str], simulated_gpu: Simulation, kind: str
) -> None:
    gradients = Gradients(kind, recipe_with("groups.0.dropout=0.0"), sentences, tmp_path, "gpu")
    found, peaks = [], list[int]()
    for passes in (1, 4):
        before = simulated_gpu.peak_bytes = simulated_gpu.allocated_bytes
        found.append(gradients(workers=1, streams=1, passes=passes))
        peaks.append(simulated_gpu.peak_bytes - before)
    assert_close(*found)
    assert peaks[1] < peaks[0] / 2


# -- a GPU without memory -------------------------------------------------------------------------------------------------


def test_a_group_in_which_no_pair_fits_ends_with_advice_and_is_resumed_with_its_smallest_passes(
    recipe_with: MakeRecipe,
) -> None:
    recipe, events = recipe_with("mutual.cycles=1", "cross.cuda_graphs=off"), list[Event]()
    for resumed, expected in ((False, ["8", "4", "2", "1"]), (True, [])):
        with (
            simulated() as gpu,
            gpu.out_of_memory(at="distcse/training/engines", times=10_000),
            fails_with(OutOfMemoryError, "group only", "cycle-1-cross", "1 pair per forward pass", "batch_size=8"),
        ):
            if resumed:
                resume_mutual(*Path(recipe.storage.runs).iterdir(), reporter=Reporter(events.append))
            else:
                run_mutual(recipe, Reporter(events.append))
        inner = [event.event if isinstance(event, GroupEvent) else event for event in events]
        texts = " ".join(event.text for event in inner if isinstance(event, LogMessage))
        assert re.findall(r"out of memory in .*?at most (\d+) of 16 pairs", texts) == expected
        events.clear()


# -- scores ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def context(recipe_with: MakeRecipe) -> GroupContext:
    recipe = recipe_with("groups.0.max_workers=4")
    directory = RunDirectory.create(recipe)
    load_pairs(recipe, open_store(directory.path), LocalBackend(), Reporter())
    return GroupContext(recipe, 0, open_store(directory.path, Lease.acquire(open_store(directory.path))), {})


def test_any_number_of_scorers_computes_the_same_scores(context: GroupContext, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = PairScorer(context).score(Phase(0))
    shards = (context.folder(Phase(0)) / "scores").path
    monkeypatch.setitem(phase_trainer.PAIRS_PER_SHARD, "cpu", 11)
    boundaries = [bound for edge in (0, 15, 30, 45) for bound in (edge, edge + 11)]
    found = []
    for parts in (1, 2, 3, 4):
        ScoreShards(context.run, "only", Phase(0)).delete()
        reports: list[tuple[int, int]] = []

        def note(done: int, total: int, reports: list[tuple[int, int]] = reports) -> None:
            reports.append((done, total))

        found.append(np.concatenate([PairScorer(context).score(Phase(0), part, parts, note) for part in range(parts)]))
        assert {file.name for file in shards.glob("*.json")} == {
            f"{begin}-{end}.json" for begin, end in pairwise([*boundaries, 60])
        }
        assert all(done <= total for done, total in reports)
        assert sum(done == total for done, total in reports) == parts
        if parts == 2:
            assert [done for done, _ in reports if done in (0, 11, 15, 26, 30)] == 2 * [0, 11, 15, 26, 30]
    for scores in found:
        np.testing.assert_array_equal(scores, found[0])
    np.testing.assert_allclose(found[0], whole, atol=1e-6)


def test_a_damaged_shard_is_scored_again_and_one_of_an_earlier_start_is_refused(context: GroupContext) -> None:
    scores = np.array([0.1, -1 / 3, 0.0, 1.0], dtype=np.float32)
    shards = ScoreShards(context.run, "bert", Phase(1))
    shards.write(10, scores)
    assert shards.read(0, 4) is None and shards.read(10, 13) is None
    stored = shards.read(10, 14)
    assert stored is not None and stored.dtype == np.float32
    np.testing.assert_array_equal(stored, scores)
    file = context.run.path / "groups" / "bert" / "cycle-1-cross" / "scores" / "10-14.json"
    file.write_text(file.read_text().replace("A", "B", 1))
    assert shards.read(10, 14) is None
    shards.delete()
    assert not file.exists()
    Lease.acquire(context.run)
    with fails_with(RunTakenOverError, str(context.run)):
        shards.write(14, scores)
    assert shards.read(14, 18) is None
