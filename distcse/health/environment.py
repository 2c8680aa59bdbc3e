"""Describes this machine and its software, for a bug report."""

from __future__ import annotations

import os
from collections.abc import Mapping

from distcse import host
from distcse.checks import gib
from distcse.device import default_device, gpu_count, gpu_module, local_speed
from distcse.host import installed_version
from distcse.recipe.section import is_secret
from distcse.runs.directory import RunDirectory

_PACKAGES = (
    "distcse",
    "torch",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "safetensors",
    "ray",
    "deepspeed",
)
_PACKAGES_OF_EXTRAS = (
    "datasets",
    "pyarrow",
    "pydantic",
    "numpy",
    "scipy",
    "optuna",
    "faiss-cpu",
    "onnxruntime",
    "mteb",
)
_PREFIXES = ("DISTCSE_", "RAY_", "HF_", "CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "DS_")
"""Beginnings of the variables that change how a run behaves."""
_HIDDEN_PREFIX = "RAY_JOB_"
"""Ray's copy of a job's configuration, which holds the job's variables, secrets included."""


def describe_environment() -> dict[str, str]:
    """Return versions, devices, memory and variables as lines by name. Values of secrets are left out."""
    source = RunDirectory.circumstances()
    commit = source["commit"]
    changed = ", with changes" if source["changed"] else ""
    return {
        **{name: installed_version(name) for name in _PACKAGES},
        "commit": f"{commit}{changed}" if commit else "installed, no checkout",
        **{name: installed_version(name) for name in _PACKAGES_OF_EXTRAS},
        "python": source["python"],
        "platform": source["platform"],
        "cpus": f"{host.cpus()} of {os.cpu_count()} usable, {local_speed().describe()}",
        "memory": gib(host.memory()),
        "gpus": _describe_gpus(),
        **{f"${name}": value for name, value in sorted(_variables(os.environ).items())},
    }


def _describe_gpus() -> str:
    if not gpu_count():
        return "none"
    import torch

    module = gpu_module(default_device())
    gpus = [module.get_device_properties(number) for number in range(gpu_count())]
    return f"{', '.join(f'{gpu.name} ({gib(gpu.total_memory)})' for gpu in gpus)}; CUDA {torch.version.cuda}"


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        name: "set (not shown)" if is_secret(name) else value
        for name, value in environment.items()
        if name.startswith(_PREFIXES) and not name.startswith(_HIDDEN_PREFIX)
    }
