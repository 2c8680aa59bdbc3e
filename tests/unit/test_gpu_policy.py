"""`resources.gpu` in a process without Ray, the memory of a fraction of a GPU, and what a process returns to the kernel."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from distcse.devices import host
from distcse.devices.device import default_device, gpu_count, has_gpu, limit_memory
from distcse.devices.process import gc_paused
from distcse.errors import ClusterTooSmallError, RayConnectionError
from distcse.events import Event, Reporter, StageProgress
from distcse.recipe import Recipe
from distcse.runs.backend import LocalBackend
from distcse.runs.cluster_fit import gpu_policy
from distcse.runs.distillation.experiment import Distillation
from distcse.runs.mutual.experiment import MutualDistillation
from tests.clusters import FixedCluster
from tests.conftest import ROOT
from tests.failures import fails_with
from tests.gpusim import Simulation
from tests.pairs import make_mutual_recipe

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
    with gpu_policy("required", computes_here=True):
        assert has_gpu()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ValueError, match="stop"), host.gpus_hidden():
        raise ValueError("stop")
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


def test_gpus_are_counted_before_they_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA driver and PyTorch keep their first count for the life of the process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    counted: list[tuple[str | None, ...]] = []
    count = torch.accelerator.is_available

    def record() -> bool:
        counted.append(tuple(map(os.environ.get, ("CUDA_VISIBLE_DEVICES", "PYTORCH_NVML_BASED_CUDA_CHECK"))))
        return count()

    monkeypatch.setattr("torch.accelerator.is_available", record)
    with host.gpus_hidden():
        assert counted == [("3", None)]
        assert not torch.cuda.is_available()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3" and "PYTORCH_NVML_BASED_CUDA_CHECK" not in os.environ


def test_a_run_in_this_process_refuses_to_train_without_a_required_gpu(recipe_with: MakeRecipe, tmp_path: Path) -> None:
    experiment, named = Distillation(recipe_with("resources.gpu=required")), "the run trains, sees no GPU"
    for start in (experiment.check, experiment.run):
        with fails_with(ClusterTooSmallError, named, "resources.gpu=auto"):
            start(LocalBackend(), Reporter())
    assert not list((tmp_path / "runs").iterdir())


@dataclass
class JoinedCluster(FixedCluster):
    """A cluster that notes whether the process which joins, and may start it, sees GPUs; the run ends there."""

    saw_gpus: list[bool] = field(default_factory=list)

    def joined(self) -> AbstractContextManager[None]:
        self.saw_gpus.append(has_gpu())
        raise RayConnectionError("joined")


class ClusterBackend(LocalBackend):
    """A backend with a cluster."""

    def __init__(self, cluster: FixedCluster) -> None:
        self.cluster = cluster  # type: ignore[assignment]


@pytest.mark.parametrize(("mode", "sees_gpus"), [("none", False), ("auto", True)])
def test_the_policy_holds_before_a_run_joins_a_cluster(
    mode: str, sees_gpus: bool, recipe_with: MakeRecipe, simulated_gpu: Simulation, tmp_path: Path
) -> None:
    """A local cluster counts the GPUs that this process sees."""
    setting, models = f"resources.gpu={mode}", {"bert": Path("unread")}
    mutual = make_mutual_recipe(tmp_path / "mutual", models, ["A cat.", "A dog."], setting)
    for experiment in (MutualDistillation(mutual), Distillation(recipe_with(setting))):
        cluster = JoinedCluster([])
        with fails_with(RayConnectionError, "joined"):
            experiment.run(ClusterBackend(cluster), Reporter())
        assert cluster.saw_gpus == [sees_gpus]


def test_a_run_without_gpus_trains_on_the_cpu(recipe_with: MakeRecipe, simulated_gpu: Simulation) -> None:
    """Any use of the simulated device would be counted."""
    events: list[Event] = []
    experiment = Distillation(recipe_with("resources.gpu=none", "training.max_steps=2"))
    with simulated_gpu.counting():
        done = experiment.run(LocalBackend(), Reporter(events.append))
    assert not simulated_gpu.operations and done.models["student"].is_dir()
    assert any(isinstance(event, StageProgress) for event in events)


def test_a_fraction_of_a_gpu_has_that_fraction_of_its_memory(simulated_gpu: Simulation) -> None:
    with simulated_gpu.memory_limit(100_000):
        limit_memory(0.5)
        held = torch.empty(40_000, dtype=torch.uint8, device="gpu")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(20_000, dtype=torch.uint8, device="gpu")
        assert held.numel() == 40_000


# -- memory of a process -------------------------------------------------------------------------------------------------


_PROGRAM = """
from pathlib import Path
from distcse.devices.host import release_memory

def megabytes():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) / 1024

held = [b"x" * 2**20 for _ in range(400)]
last = held[-1]  # the topmost block keeps the heap from shrinking by itself
del held
before = megabytes()
release_memory()
print(before - megabytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is configured")
def test_release_memory_returns_free_memory() -> None:
    environment = {**os.environ, **host.MALLOC_ENV, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert float(done.stdout) > 300


def test_the_collectors_state_is_restored() -> None:
    assert gc.isenabled()
    with gc_paused():
        assert not gc.isenabled()
        with gc_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ModuleNotFoundError), gc_paused():
        import no_such_library  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
