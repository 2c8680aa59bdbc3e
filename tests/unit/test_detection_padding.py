"""The mean over all positions counts the global batch's padding: the same loss on any number of workers, streams and chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distcse.models import detection as edits
from distcse.models.detection import Vocabulary
from distcse.recipe import Recipe
from distcse.runs.distillation.model import StudentModel
from tests.gpusim import simulated
from tests.jobs import make_recipe, make_spec
from tests.models import make_masked_lm
from tests.training_step import TrainingStep
from tests.workers import run_workers

MakeRecipe = Callable[..., Recipe]


def choose_by_id(ids: Tensor, mask: Tensor, ratio: float, words: Vocabulary) -> Tensor:
    """In place of random choices, which differ between numbers of streams."""
    return (ids % 3 == 0) & mask.bool() & ~torch.isin(ids, torch.tensor(words.special, device=ids.device))


def mask_all(ids: Tensor, chosen: Tensor, words: Vocabulary) -> Tensor:
    return torch.where(chosen, words.mask, ids)


@pytest.fixture
def fixed_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "choose_positions", choose_by_id)
    monkeypatch.setattr(edits, "mask_chosen", mask_all)


@pytest.fixture
def recipe_of(tmp_path: Path, tiny: Callable[..., Path], sentences: list[str]) -> MakeRecipe:
    """Makes recipes without noise, whose batches have one long sentence among short ones."""
    generator = make_masked_lm(tmp_path / "generator", tiny("bert"))
    lines = [" ".join(line.split()[:2]) if number % 16 else f"{line} {line}" for number, line in enumerate(sentences)]
    lines = list(dict.fromkeys(f"{line} {number}" for number, line in enumerate(lines[:64])))

    def make(name: str, *overrides: str) -> Recipe:
        folder = tmp_path / name
        folder.mkdir()
        return make_recipe(
            folder,
            tiny("bert"),
            [],
            lines,
            "student.pooling=cls",
            "student.projection=none",
            "student.dropout=0",
            "objective.rank=null",
            "objective.consistency=null",
            f"objective.detection={{generator: {generator}, generator_dropout: false, weight: 1.0}}",
            "evaluation={dev: none, num_heldout: 0, final_suites: []}",
            *overrides,
        )

    return make


def first_step(spec: Any, rank: int = 0, workers: int = 1) -> tuple[float, dict[str, Tensor], set[int]]:
    """Loss and gradient of the global batch, and the lengths that this worker's streams are padded to."""
    step = TrainingStep(spec, [], rank, workers)
    step.task.model.train()
    share, _ = step.loss()
    step.engine.backward(share)
    named = step.task.model.named_parameters()
    gradient = {name: p.grad.cpu() for name, p in named if p.grad is not None}
    loss = share.detach().clone()
    if workers > 1:
        for part in (loss, *gradient.values()):
            dist.all_reduce(part)
    streams = step.task.prepare_batch(0, step.engine.device).model_inputs.streams
    return loss.item(), gradient, {tokens.ids.shape[1] for tokens, _ in streams}


def assert_equal(found: tuple[float, dict[str, Tensor], set[int]], expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys() and any(name.startswith("detector.") for name in found[1])
    differences = torch.cat([(found[1][name] - expected[1][name]).flatten() for name in found[1]])
    assert differences.norm() <= 1e-5 * torch.cat([each.flatten() for each in expected[1].values()]).norm()


@pytest.mark.usefixtures("fixed_edits")
def test_streams_and_chunks_have_the_loss_of_one_pass(recipe_of: MakeRecipe) -> None:
    expected = first_step(make_spec(recipe_of("one"))[0])
    for part in ("dropout_rng_streams=2", "dropout_rng_streams=4", "grad_cache_chunk=8", "grad_cache_chunk=4"):
        found = first_step(make_spec(recipe_of(part, f"training.{part}"))[0])
        assert len(found[2]) > 1 and max(found[2]) == max(expected[2])  # streams of several lengths
        assert_equal(found, expected)


@pytest.mark.usefixtures("fixed_edits")
@pytest.mark.parametrize("part", ["", "training.dropout_rng_streams=4", "training.grad_cache_chunk=8"])
def test_a_gpu_has_the_loss_of_a_cpu(part: str, recipe_of: MakeRecipe) -> None:
    """Its host does not know the longest sentence: rows are padded further, and what is beyond is not counted."""
    expected = first_step(make_spec(recipe_of("cpu"))[0])
    spec, _ = make_spec(recipe_of("gpu", *([part] if part else [])))
    with simulated():
        found = first_step(spec)
    assert found[2] == {max(expected[2])}
    assert_equal(found, expected)


def test_without_the_batchs_length_the_loss_differs(
    recipe_of: MakeRecipe, fixed_edits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests here hold is visible at this batch."""
    expected = first_step(make_spec(recipe_of("one"))[0])
    monkeypatch.setattr(StudentModel, "padded_length", lambda model, batch: None)
    streams = make_spec(recipe_of("four", "training.dropout_rng_streams=4"))[0]
    assert abs(first_step(streams)[0] - expected[0]) > 1e-3


def _in_worker(spec: Any) -> tuple[float, dict[str, Tensor], set[int]]:
    edits.choose_positions, edits.mask_chosen = choose_by_id, mask_all
    return first_step(spec, dist.get_rank(), 2)


@pytest.mark.usefixtures("fixed_edits")
def test_two_workers_have_the_loss_of_one(recipe_of: MakeRecipe) -> None:
    spec = make_spec(recipe_of("one"))[0]
    one, other = run_workers(_in_worker, 2, spec)
    assert one[2] != other[2]
    expected = first_step(spec)
    assert_equal(one, expected)
    assert_equal(other, expected)


def test_padding_changes_no_token() -> None:
    edited = edits.Edited(torch.tensor([[2, 7, 3]]), torch.ones(1, 3, dtype=torch.long), torch.tensor([[0, 1, 0]]))
    padded = edited.padded(5, pad_id=9)
    assert padded.ids.tolist() == [[2, 7, 3, 9, 9]] and padded.mask.tolist() == [[1, 1, 1, 0, 0]]
    assert padded.labels.tolist() == [[0, 1, 0, 0, 0]]
