"""Restricts an actor's process to the GPUs and CPUs that Ray assigned to it."""

from __future__ import annotations

import os
import sys

import ray


def use_assigned_gpus() -> None:
    """Hide all GPUs from an actor that reserved none, because Ray does not. Call it before PyTorch initializes CUDA."""
    if not ray.get_runtime_context().get_accelerator_ids().get("GPU"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def use_assigned_threads() -> None:
    """Limit PyTorch's threads to the actor's CPUs, if PyTorch is imported."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1))))
