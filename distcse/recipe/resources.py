"""Recipe section of the cluster's resources, and the checks of the keys that share them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from distcse.recipe.section import Section

GpuMode = Literal["auto", "required", "none"]
"""Whether a run uses GPUs."""


class ResourcesSection(Section):
    """Resources that a run may use."""

    gpu: GpuMode = "auto"
    """`auto` gives a worker a GPU and a helper a quarter of one where the nodes have GPUs, and says at the start which process
    gets how much or runs on CPUs. `required` refuses to start unless every process that computes with a model gets a GPU. `none`
    hides all GPUs from the run."""
    wait_s: Annotated[float, Field(ge=0)] = 0
    """Seconds that a run waits at its start for a cluster's autoscaler to start the nodes that it needs. 0 refuses a run for
    which the cluster has too few nodes. A sweep's further trials and a family's further students wait longer, next to those
    that train. Nodes that are not there have no CPUs or GPUs to share out: set
    `training.cpus_per_worker` and `training.gpus_per_worker`, else a worker waits for one CPU, and with `gpu: required` for
    one GPU."""


def check_gpu_keys(mode: GpuMode, gpus: Mapping[str, float | None]) -> None:
    """Check that keys of GPUs do not contradict `resources.gpu`.

    Args:
        mode: `resources.gpu`.
        gpus: GPUs of one process, by recipe key; None leaves the number to the run.

    Raises:
        ValueError: They do.
    """
    for key, number in gpus.items():
        if mode == "required" and number == 0:
            raise ValueError(f"resources.gpu is required, and {key} is 0; write {key}: null, or resources.gpu: auto")
        if mode == "none" and number:
            raise ValueError(
                f"resources.gpu is none, and {key} is {number:g}; write {key}: null, or resources.gpu: auto"
            )


def least_gpus(mode: GpuMode, gpus: float | None) -> float:
    """Return the GPUs that one process needs on any cluster: those that the recipe sets, or one if GPUs are required.

    Args:
        mode: `resources.gpu`.
        gpus: GPUs that the recipe sets; None leaves the number to the run.
    """
    return float(mode == "required") if gpus is None else gpus


def can_share_gpu(workers: int, gpus: float | None) -> bool:
    """Return whether two of a run's workers may be placed on one GPU: two parts of at most a half fit on it."""
    return workers > 1 and gpus is not None and 0 < gpus <= 0.5
