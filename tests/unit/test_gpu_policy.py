"""`resources.gpu` in a process without Ray, and the memory of a fraction of a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from distcse import host
from distcse.device import default_device, gpu_count, has_gpu, limit_memory, usable_memory
from distcse.errors import GpuRequiredError
from distcse.events import Event, Reporter, StageProgress
from distcse.experiments.distillation.experiment import Distillation
from distcse.experiments.gpu_policy import gpu_policy
from distcse.experiments.local_backend import LocalBackend
from distcse.recipe import Recipe
from tests.failures import fails_with
from tests.gpusim import Simulation

MakeRecipe = Callable[..., Recipe]


def test_no_gpu_is_seen_where_the_recipe_wants_none(simulated_gpu: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert default_device() == "gpu"
    with gpu_policy("none", computes_here=True):
        assert (default_device(), has_gpu(), gpu_count()) == ("cpu", False, 0)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""  # DeepSpeed looks there
        with host.gpus_hidden():
            pass
        assert not has_gpu()
    assert has_gpu() and os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_variable_is_removed_where_there_was_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(ValueError, match="stop"), host.gpus_hidden():
        raise ValueError("stop")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_a_required_gpu_is_there(simulated_gpu: Simulation) -> None:
    with gpu_policy("required", computes_here=True):
        assert has_gpu()


def test_a_run_in_this_process_refuses_to_train_without_a_required_gpu(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    experiment = Distillation(recipe_with("resources.gpu=required"))
    for start in (experiment.check, experiment.run):
        with fails_with(GpuRequiredError, "this process, in which the run trains, sees no GPU", "resources.gpu=auto"):
            start(LocalBackend(), Reporter())
    assert not list((tmp_path / "runs").iterdir())


def test_a_run_without_gpus_trains_on_the_cpu(recipe_with: MakeRecipe, simulated_gpu: Simulation) -> None:
    """Any use of the simulated device would be counted."""
    events: list[Event] = []
    with simulated_gpu.counting():
        done = Distillation(recipe_with("resources.gpu=none", "training.max_steps=2")).run(
            LocalBackend(), Reporter(events.append)
        )
    assert not simulated_gpu.operations and done.models["student"].is_dir()
    assert any(isinstance(event, StageProgress) for event in events)


def test_a_fraction_of_a_gpu_has_that_fraction_of_its_memory(simulated_gpu: Simulation) -> None:
    with simulated_gpu.memory_limit(100_000):
        assert usable_memory("gpu") == 100_000
        limit_memory(0.5)
        assert usable_memory("gpu") == 47_500  # the rest is for what PyTorch does not allocate
        held = torch.empty(40_000, dtype=torch.uint8, device="gpu")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(20_000, dtype=torch.uint8, device="gpu")
        assert held.numel() == 40_000
