"""Python, torch, processors, memory and limits of this machine."""

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
from distcse.device import local_speed
from distcse.experiments.distillation import roles as student_roles
from distcse.experiments.mutual import roles as mutual_roles
from distcse.health.check import Check, fail, gib, ok, warn
from distcse.precision import describe_roles
from distcse.recipe import LoopSection, MutualRecipe, Recipe

_SHARED_MEMORY = Path("/dev/shm")
_LEAST_MEMORY, _GOOD_MEMORY = 2**30, 4 * 2**30
_LEAST_SHARED, _GOOD_SHARED = 128 * 2**20, 2 * 2**30
_LEAST_FILES, _GOOD_FILES = 1024, 8192


def python() -> list[Check]:
    """At least 3.11."""
    told = f"{platform.python_version()} at {sys.executable}"
    return [ok("python", told) if sys.version_info >= (3, 11) else fail("python", told, "install Python 3.11 or newer")]


def torch_and_transformers() -> list[Check]:
    """Both import; transformers is of the line that distcse reads."""
    found = []
    for name in ("torch", "transformers"):
        try:
            told = version(name)
        except PackageNotFoundError:
            found.append(fail(name, "not installed", f"pip install -c constraints.txt {name}"))
            continue
        major = int(told.split(".")[0])
        if name == "transformers" and major != 5:
            found.append(fail(name, told, 'pip install "transformers>=5,<6"'))
        else:
            found.append(ok(name, told))
    return found


def processors() -> list[Check]:
    """CPUs that this process may use, and how busy they are."""
    usable, there = host.cpus(), os.cpu_count() or 1
    told = f"{usable} of {there} usable" if usable < there else f"{there}"
    load = os.getloadavg()[0]
    if load > 1.5 * there:
        return [warn("cpus", f"{told}, load {load:.1f}", "others use this machine; a run takes longer than planned")]
    return [ok("cpus", f"{told}, load {load:.1f}")]


def precision(recipe: Recipe | MutualRecipe | None) -> list[Check]:
    """What `precision: auto` chooses on this machine; a half precision of the recipe that is slow here is a warning."""
    devices = [local_speed()]
    if recipe is None:
        return [ok("precision", f"auto: {devices[0].precision} ({devices[0].describe()})")]
    if isinstance(recipe, MutualRecipe):
        roles = mutual_roles.roles_on(recipe, devices, devices)
    else:
        roles = student_roles.roles_on(recipe, devices)
    chosen = describe_roles(roles)
    if keys := [role.key for role in roles if role.no_gain_on]:
        return [warn("precision", chosen, f"write auto or fp32 for {', '.join(keys)}")]
    return [ok("precision", chosen)]


def gpus() -> list[Check]:
    """GPUs that torch sees, with driver; a driver whose GPUs torch does not see is a mistake."""
    import torch

    driver = _driver()
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
        told = ", ".join(f"{gpu.name} ({gib(gpu.total_memory)})" for gpu in names)
        return [ok("gpus", f"{told}; CUDA {torch.version.cuda}, driver {driver or 'not told'}")]
    if driver:
        fix = "install a CUDA build of torch, or unset CUDA_VISIBLE_DEVICES"
        return [fail("gpus", f"driver {driver} is there, torch {torch.__version__} sees no GPU", fix)]
    return [ok("gpus", "none; runs use CPUs")]


def memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = host.CGROUP) -> list[Check]:
    """What could be had now without swapping, in a container of what that was given."""
    if not meminfo.exists():
        return [ok("memory", "not told by this system")]
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if ":" in line
    }
    free, there = float(sizes["MemAvailable"]), float(sizes["MemTotal"])
    if (given := host.memory(cgroup)) < there:  # a container's part of it
        free, there = min(free, given - host.memory_taken(cgroup)), given
    told, fix = f"{gib(free)} of {gib(there)} available", "end other programs, or lower training.batch_size"
    if free < _LEAST_MEMORY:
        return [fail("memory", told, fix)]
    return [ok("memory", told) if free >= _GOOD_MEMORY else warn("memory", told, fix)]


def shared_memory(folder: Path = _SHARED_MEMORY) -> list[Check]:
    """Where Ray keeps objects; containers give 64 MB by default."""
    fix = "start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm)"
    if not folder.is_dir():
        return [warn("shared memory", f"no {folder}", "Ray puts objects on disk, which is slow; mount one")]
    size = shutil.disk_usage(folder).total
    told = f"{gib(size)} at {folder}"
    if size < _LEAST_SHARED:
        return [fail("shared memory", told, fix)]
    return [ok("shared memory", told) if size >= _GOOD_SHARED else warn("shared memory", told, fix)]


def open_files() -> list[Check]:
    """File descriptors of a process: Ray takes some for every worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told, fix = f"{soft:,} (at most {hard:,})", f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    if soft < _LEAST_FILES:
        return [fail("open files", told, fix)]
    return [ok("open files", told) if soft >= _GOOD_FILES else warn("open files", told, fix)]


def deepspeed(recipe: Recipe | MutualRecipe | None) -> list[Check]:
    """Whether the engine the recipe wants is there, and imports without a compiler."""
    sections: list[LoopSection] = []
    if recipe is not None:
        sections = [recipe.training] if isinstance(recipe, Recipe) else [recipe.bi, recipe.cross]
    wanted = any(section.engine == "deepspeed" or section.zero_stage for section in sections)
    if sections and all(section.engine == "torch" for section in sections):
        return [ok("deepspeed", "not asked for: training.engine is plain")]
    if find_spec("deepspeed") is None:
        if wanted:
            return [fail("deepspeed", "not installed, and the recipe wants it", 'pip install "distcse[deepspeed]"')]
        return [ok("deepspeed", "not installed: the plain engine is used")]
    code = "import deepspeed; print(deepspeed.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        told = (done.stderr.strip().splitlines() or ["no word"])[-1]
        verdict = fail if wanted else warn
        return [verdict("deepspeed", f"does not import: {told}", "write training.engine=torch, or install it anew")]
    told = f"{done.stdout.strip().splitlines()[-1]}; no op is compiled: AdamW is torch's, CPU ops are switched off"
    if os.environ.get("DS_BUILD_OPS") == "1":
        return [
            warn(
                "deepspeed",
                f"{told.split(';')[0]}; DS_BUILD_OPS=1 compiles ops when it is installed",
                "unset DS_BUILD_OPS",
            )
        ]
    return [ok("deepspeed", told)]


def _driver() -> str | None:
    """Version of NVIDIA's driver; None where there is none."""
    file = Path("/proc/driver/nvidia/version")
    if file.exists():
        words = file.read_text().split()
        return next((word for word in words if word[:1].isdigit() and "." in word), "of unknown version")
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True)
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.split() else None
