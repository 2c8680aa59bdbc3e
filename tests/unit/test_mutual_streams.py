"""Results of a group that do not depend on its number of workers: dropout, gradients and scores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distcse.errors import InvalidValueError
from distcse.events import Reporter
from distcse.models import CrossEncoder, Encoder
from distcse.recipe import MutualRecipe
from distcse.runs.backend import LocalBackend
from distcse.runs.directory import RunDirectory
from distcse.runs.lease import Lease
from distcse.runs.mutual import scoring
from distcse.runs.mutual.pair_task import PairTask, PairTokens
from distcse.runs.mutual.pairs import load_pairs
from distcse.runs.mutual.phases import GroupContext, Phase
from distcse.runs.mutual.scoring import PairScorer
from distcse.storage import open_store
from tests.failures import fails_with
from tests.pairs import bi_tokens, cross_tokens, make_mutual_recipe, make_pairs

MakeRecipe = Callable[..., MutualRecipe]
CPU = torch.device("cpu")


@pytest.fixture
def recipe_with(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    return lambda *overrides: make_mutual_recipe(tmp_path, {"only": tiny("bert")}, sentences, *overrides)


class Gradients:
    """Gradients of a group's first step, summed over its workers as engines sum them.

    Args:
        kind: `bi` or `cross`.
        recipe: The recipe; its group has dropout.
        sentences: Sentences of the pairs.
        folder: Where the pairs are stored.
    """

    def __init__(self, kind: str, recipe: MutualRecipe, sentences: list[str], folder: Path) -> None:
        self._kind, self._recipe = kind, recipe
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
        encoder.train()
        total = 0.0
        for rank in range(workers):
            task = PairTask(
                encoder, tokens, self._labels, section, None, 1, 3, rank, workers, passes=passes, streams=streams
            )
            inputs = task.prepare_batch(0, CPU)
            assert len(inputs.loss_inputs) == task.rows == section.batch_size // workers
            share, _ = task.compute_loss(inputs.loss_inputs, task.model(inputs.model_inputs))
            share.backward()
            total += share.item()
        found = {name: parameter.grad for name, parameter in encoder.named_parameters() if parameter.grad is not None}
        return {"loss": torch.tensor(total), **found}


def assert_close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("kind", ["bi", "cross"])
def test_any_number_of_workers_has_the_gradient_of_one(
    recipe_with: MakeRecipe, sentences: list[str], tmp_path: Path, kind: str, passes: int
) -> None:
    gradients = Gradients(kind, recipe_with("groups.0.dropout=0.2"), sentences, tmp_path)
    one = gradients(workers=1, streams=4, passes=passes)
    for workers in (2, 4):
        assert_close(one, gradients(workers, streams=4, passes=passes))
    with pytest.raises(AssertionError):  # other dropout
        assert_close(one, gradients(workers=1, streams=1, passes=passes))


def test_any_number_of_scorers_computes_the_same_scores(
    recipe_with: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(scoring.PAIRS_PER_SHARD, "cpu", 11)
    recipe = recipe_with("groups.0.max_workers=4")
    directory = RunDirectory.create(recipe)
    load_pairs(recipe, directory.path, LocalBackend(), Reporter())
    context = GroupContext(recipe, 0, open_store(directory.path, Lease.acquire(directory.path)), {})
    found = []
    for parts in (1, 2, 3, 4):
        found.append(np.concatenate([PairScorer(context).score(Phase(0), part, parts) for part in range(parts)]))
        shards = {file.name for file in (context.folder(Phase(0)) / "scores").glob("*.json")}
        assert shards == {
            f"{begin}-{stop}.json"
            for edge in (0, 15, 30, 45)
            for begin, stop in [(edge, edge + 11), (edge + 11, edge + 15)]
        }
        for file in (context.folder(Phase(0)) / "scores").glob("*.json"):
            file.unlink()
    for scores in found[1:]:
        np.testing.assert_array_equal(scores, found[0])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["groups.0.max_workers=3"], "max_workers 3, which does not divide bi.batch_size 16"),
        (["groups.0.max_workers=2", "groups.0.workers=4"], "max_workers 2, which is no multiple of its workers 4"),
        (
            ["groups.0.max_workers=2", "groups.0.bi.cuda_graphs=on", "bi.engine=torch"],
            "groups.0.bi.cuda_graphs records the step of one worker with one dropout stream; write groups.0.workers: 1",
        ),
    ],
)
def test_numbers_of_workers_that_do_not_divide_are_refused(
    recipe_with: MakeRecipe, overrides: list[str], message: str
) -> None:
    with fails_with(InvalidValueError, message):
        recipe_with(*overrides)
