"""Checks of Python, packages, CPUs, GPUs, memory and limits of this machine."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from distcse import host
from distcse.checks import Check, fail, gib, ok, warn
from distcse.device import default_device, gpu_count, gpu_module, has_gpu, local_speed
from distcse.device_defaults import auto_precision
from distcse.experiments.registry import experiment_of
from distcse.precision import describe_roles
from distcse.recipe import BaseRecipe

_SHARED_MEMORY = Path("/dev/shm")
_MIN_MEMORY, _GOOD_MEMORY = 2**30, 4 * 2**30
_MIN_SHARED, _GOOD_SHARED = 128 * 2**20, 2 * 2**30
_MIN_FILES, _GOOD_FILES = 1024, 8192


def check_python() -> list[Check]:
    """Check that Python is 3.11 or newer."""
    summary = f"{platform.python_version()} at {sys.executable}"
    return [
        ok("python", summary)
        if sys.version_info >= (3, 11)
        else fail("python", summary, "install Python 3.11 or newer")
    ]


def check_packages() -> list[Check]:
    """Check that torch is installed, and transformers in a supported version."""
    found = []
    for name, supported in (("torch", "torch>=2.8"), ("transformers", "transformers>=5,<6")):
        try:
            installed = version(name)
        except PackageNotFoundError:
            found.append(fail(name, "not installed", f'pip install "{supported}"'))
            continue
        major = int(installed.split(".")[0])
        if name == "transformers" and major != 5:
            found.append(fail(name, installed, f'pip install "{supported}"'))
        else:
            found.append(ok(name, installed))
    return found


def check_cpus() -> list[Check]:
    """Report the CPUs that this process may use, and warn of a high load."""
    usable, there = host.cpus(), os.cpu_count() or 1
    summary = f"{usable} of {there} usable" if usable < there else f"{there}"
    load = os.getloadavg()[0]
    if load > 1.5 * there:
        return [
            warn("cpus", f"{summary}, load {load:.1f}", "other programs use this machine; end them, or plan more time")
        ]
    return [ok("cpus", f"{summary}, load {load:.1f}")]


def check_precision(recipe: BaseRecipe | None) -> list[Check]:
    """Report the precision of each role; warn of a half precision that is slow on this machine."""
    devices = [local_speed()]
    if recipe is None:
        return [ok("precision", f"auto: {auto_precision(devices)} ({devices[0].describe()})")]
    roles = experiment_of(recipe).precision_roles(devices)
    chosen = describe_roles(roles)
    if keys := [role.key for role in roles if role.slow_devices]:
        return [warn("precision", chosen, f"set auto or fp32 for {', '.join(keys)}")]
    return [ok("precision", chosen)]


def check_gpus(recipe: BaseRecipe | None = None) -> list[Check]:
    """Report the GPUs and the driver; fail if torch sees no GPU although there is a driver, or the recipe requires one here."""
    import torch

    driver = _driver()
    if has_gpu():
        module = gpu_module(default_device())
        names = [module.get_device_properties(number) for number in range(gpu_count())]
        summary = ", ".join(f"{gpu.name} ({gib(gpu.total_memory)})" for gpu in names)
        unused = (
            "; the recipe uses none (resources.gpu: none)" if recipe is not None and recipe.gpu_mode == "none" else ""
        )
        return [ok("gpus", f"{summary}; CUDA {torch.version.cuda}, driver {driver or 'unknown'}{unused}")]
    if driver:
        fix = "install a CUDA build of torch, or unset CUDA_VISIBLE_DEVICES"
        return [fail("gpus", f"driver {driver} is installed, but torch {torch.__version__} sees no GPU", fix)]
    if recipe is not None and recipe.gpu_mode == "required" and not recipe.uses_ray:
        fix = "run the recipe on a machine with a GPU, or write resources.gpu=auto"
        return [fail("gpus", "none, but resources.gpu is required", fix)]
    return [ok("gpus", "none; runs use CPUs")]


def check_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = host.CGROUP) -> list[Check]:
    """Check the available memory, within a container's limit."""
    if not meminfo.exists():
        return [ok("memory", f"unknown: this system has no {meminfo}")]
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if ":" in line
    }
    free, there = float(sizes["MemAvailable"]), float(sizes["MemTotal"])
    if (limit := host.memory(cgroup)) < there:  # the container's limit
        free, there = min(free, limit - host.memory_used(cgroup)), limit
    summary, fix = f"{gib(free)} of {gib(there)} available", "end other programs, or lower training.batch_size"
    if free < _MIN_MEMORY:
        return [fail("memory", summary, fix)]
    return [ok("memory", summary) if free >= _GOOD_MEMORY else warn("memory", summary, fix)]


def check_shared_memory(folder: Path = _SHARED_MEMORY) -> list[Check]:
    """Check the size of /dev/shm, where Ray stores objects; containers have 64 MB by default."""
    fix = "start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm)"
    if not folder.is_dir():
        return [
            warn(
                "shared memory",
                f"no {folder}, so Ray stores objects on disk, which is slow",
                f"mount a tmpfs at {folder}",
            )
        ]
    size = shutil.disk_usage(folder).total
    summary = f"{gib(size)} at {folder}"
    if size < _MIN_SHARED:
        return [fail("shared memory", summary, fix)]
    return [ok("shared memory", summary) if size >= _GOOD_SHARED else warn("shared memory", summary, fix)]


def check_open_files() -> list[Check]:
    """Check the limit of file descriptors per process: Ray needs some for every worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    summary, fix = f"{soft:,} (at most {hard:,})", f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    if soft < _MIN_FILES:
        return [fail("open files", summary, fix)]
    return [ok("open files", summary) if soft >= _GOOD_FILES else warn("open files", summary, fix)]


def check_deepspeed(recipe: BaseRecipe | None) -> list[Check]:
    """Check that DeepSpeed can be imported, if the recipe needs it."""
    sections = [] if recipe is None else recipe.loop_sections
    is_required = any(section.needs_deepspeed for section in sections)
    if sections and all(section.engine == "torch" for section in sections):
        return [ok("deepspeed", "not required: training.engine is torch")]
    if find_spec("deepspeed") is None:
        if is_required:
            return [fail("deepspeed", "not installed, but the recipe requires it", host.pip_install("deepspeed"))]
        return [ok("deepspeed", "not installed: the torch engine is used")]
    code = "import deepspeed; print(deepspeed.__version__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if result.returncode:
        summary = (result.stderr.strip().splitlines() or ["no message"])[-1]
        verdict = fail if is_required else warn
        return [verdict("deepspeed", f"cannot be imported: {summary}", "set training.engine=torch, or reinstall it")]
    summary = f"{result.stdout.strip().splitlines()[-1]}; compiles no ops: AdamW is torch's, CPU ops are disabled"
    if os.environ.get("DS_BUILD_OPS") == "1":
        return [
            warn(
                "deepspeed",
                f"{summary.split(';')[0]}; DS_BUILD_OPS=1 makes its installation compile ops",
                "unset DS_BUILD_OPS",
            )
        ]
    return [ok("deepspeed", summary)]


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None if there is none."""
    file = Path("/proc/driver/nvidia/version")
    if file.exists():
        words = file.read_text().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "of unknown version")
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True)
    return result.stdout.split()[0] if result.returncode == 0 and result.stdout.split() else None
