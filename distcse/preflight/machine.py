"""Checks of this machine: Python, packages, CPUs, GPUs, memory, limits and folders; and its description for a bug report."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from distcse.checks import Check, fail, gib, ok, warn
from distcse.devices import host
from distcse.devices.device import auto_precision, default_device, gpu_count, gpu_module, has_gpu, local_speed
from distcse.devices.host import installed_version
from distcse.errors import StorageError
from distcse.preflight.precision import Role, describe_roles
from distcse.recipe import BaseRecipe
from distcse.recipe.section import is_secret
from distcse.storage import FolderStore, is_in_job_copy, open_store

_SHARED_MEMORY = Path("/dev/shm")
_MEMORY, _SHARED, _FILES, _DISK = (2**30, 4 * 2**30), (128 * 2**20, 2 * 2**30), (1024, 8192), (2**30, 10 * 2**30)
"""Sizes below which a check fails, and below which it warns."""
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
    "vllm",
)
_PREFIXES = ("DISTCSE_", "RAY_", "HF_", "CUDA_", "NCCL_", "GLOO_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "DS_")
"""Beginnings of the variables that change how a run behaves."""
_HIDDEN_PREFIX = "RAY_JOB_"
"""Ray's copy of a job's configuration, which holds the job's variables, secrets included."""


def check_python() -> Check:
    """Report Python."""
    return ok("python", f"{platform.python_version()} at {sys.executable}")


def check_package(requirement: str, oldest: tuple[int, int], unsupported: tuple[int, int] = (999, 0)) -> Check:
    """Check that a package is installed in a supported version."""
    name = re.split(r"[\[<>=]", requirement)[0]
    installed = installed_version(name)
    release = tuple(map(int, re.findall(r"\d+", installed)[:2]))
    fits = oldest <= release < unsupported
    return ok(name, installed) if fits else fail(name, installed, f'pip install "{requirement}"')


def check_cpus() -> Check:
    """Report the CPUs that this process may use, and warn of a high load."""
    usable, there, load = host.cpus(), os.cpu_count() or 1, os.getloadavg()[0]
    found = f"{f'{usable} of {there} usable' if usable < there else there}, load {load:.1f}"
    if load > 1.5 * there:
        return warn("cpus", found, "other programs use this machine; end them, or plan more time")
    return ok("cpus", found)


def check_precision(roles: Sequence[Role] | None) -> Check:
    """Report the precision of a run's roles on this machine, and warn of a half precision that is slow on it."""
    if roles is None:
        return ok("precision", f"auto: {auto_precision([local_speed()])} ({local_speed().describe()})")
    if keys := [role.key for role in roles if role.slow_devices]:
        return warn("precision", describe_roles(roles), f"set auto or fp32 for {', '.join(keys)}")
    return ok("precision", describe_roles(roles))


def check_gpus(recipe: BaseRecipe | None = None) -> Check:
    """Report the GPUs and the driver; fail if torch sees no GPU although there is a driver, or the recipe requires one here."""
    import torch

    driver = _driver()
    if has_gpu():
        unused = "; the recipe uses none (resources.gpu: none)" if recipe and recipe.gpu_mode == "none" else ""
        return ok("gpus", f"{_describe_gpus()}, driver {driver or 'unknown'}{unused}")
    if driver:
        fix = "install a CUDA build of torch, or unset CUDA_VISIBLE_DEVICES"
        return fail("gpus", f"driver {driver} is installed, but torch {torch.__version__} sees no GPU", fix)
    if recipe is not None and recipe.gpu_mode == "required" and not recipe.uses_ray:
        fix = "run the recipe on a machine with a GPU, or write resources.gpu=auto"
        return fail("gpus", "none, but resources.gpu is required", fix)
    return ok("gpus", "none; runs use CPUs")


def check_memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = host.CGROUP) -> Check:
    """Check the available memory, within a container's limit."""
    if not meminfo.exists():
        return ok("memory", f"unknown: this system has no {meminfo}")
    sizes = {
        line.split(":")[0]: int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines() if ":" in line
    }
    free, there = float(sizes["MemAvailable"]), float(sizes["MemTotal"])
    if (limit := host.memory(cgroup)) < there:  # the container's limit
        free, there = min(free, limit - host.memory_used(cgroup)), limit
    fix = "end other programs, or lower training.batch_size"
    return _graded("memory", free, _MEMORY, f"{gib(free)} of {gib(there)} available", fix)


def check_shared_memory(folder: Path = _SHARED_MEMORY) -> Check:
    """Check the size of /dev/shm, where Ray stores objects; containers have 64 MB by default."""
    if not folder.is_dir():
        found = f"no {folder}, so Ray stores objects on disk, which is slow"
        return warn("shared memory", found, f"mount a tmpfs at {folder}")
    size = shutil.disk_usage(folder).total
    fix = "start the container with --shm-size=8g (Kubernetes: an emptyDir of medium Memory at /dev/shm)"
    return _graded("shared memory", size, _SHARED, f"{gib(size)} at {folder}", fix)


def check_open_files() -> Check:
    """Check the limit of file descriptors per process: Ray needs some for every worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fix = f"ulimit -n {min(hard, 65536) if hard > 0 else 65536}"
    return _graded("open files", soft, _FILES, f"{soft:,} (at most {hard:,})", fix)


def _graded(name: str, size: float, limits: tuple[float, float], found: str, fix: str) -> Check:
    """Return a check that fails below the first limit, and warns below the second."""
    least, good = limits
    return ok(name, found) if size >= good else warn(name, found, fix) if size >= least else fail(name, found, fix)


def check_deepspeed(recipe: BaseRecipe | None) -> Check:
    """Check that DeepSpeed, where it is installed and the recipe may use it, can be imported."""
    sections = [] if recipe is None else recipe.loop_sections
    if sections and all(section.engine == "torch" for section in sections):
        return ok("deepspeed", "not required: training.engine is torch")
    if find_spec("deepspeed") is None:  # a recipe that requires it fails another check
        return ok("deepspeed", "not installed: the torch engine is used")
    code = "import deepspeed; print(deepspeed.__version__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if result.returncode:
        found = f"cannot be imported: {(result.stderr.strip().splitlines() or ['no message'])[-1]}"
        verdict = fail if any(section.needs_deepspeed for section in sections) else warn
        return verdict("deepspeed", found, "set training.engine=torch, or reinstall it")
    installed = result.stdout.strip().splitlines()[-1]
    if os.environ.get("DS_BUILD_OPS") == "1":
        found = f"{installed}; DS_BUILD_OPS=1 makes its installation compile ops"
        return warn("deepspeed", found, "unset DS_BUILD_OPS")
    return ok("deepspeed", f"{installed}; compiles no ops: AdamW is torch's, CPU ops are disabled")


def check_location(key: str, path: Path) -> list[Check]:
    """Check a folder of the recipe, or an address in object storage and its mirror on this machine."""
    if is_in_job_copy(path):
        found = f"{path} is in Ray's temporary copy of the job's working directory"
        return [fail(key, found, f"set {key}=/shared/FOLDER")]
    store = open_store(path)
    if not store.is_remote:
        return [check_folder(key, path)]
    try:
        store.probe()
    except StorageError as error:
        return [fail(key, str(error), f"or set {key}=FOLDER")]
    return [ok(key, f"{store}: written, read and deleted"), check_folder("DISTCSE_MIRROR", path)]


def check_folder(key: str, path: Path, good_free: float = _DISK[1]) -> Check:
    """Check free space and writing in a folder; if it does not exist, in its nearest existing parent. No file remains."""
    fix = f"set {key}=FOLDER, one that this user may write to"
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
    except OSError as closed:  # this user may not read a parent folder
        return fail(key, f"{path}: {closed.strerror}", fix)
    if not existing.is_dir():
        return fail(key, f"{existing} is not a folder", f"set {key}=FOLDER")
    try:
        FolderStore(existing).probe()
    except OSError as error:
        return fail(key, f"{existing}: {error.strerror or error}", fix)
    free = shutil.disk_usage(existing).free
    place = path if existing == path else f"{path} (to be created in {existing})"
    found = f"{place}: {gib(free)} free, written and renamed"
    return _graded(key, free, (_DISK[0], good_free), found, f"free some, or set {key}=FOLDER on a larger disk")


def describe_environment() -> dict[str, str]:
    """Return versions, devices, memory and variables as lines by name. Values of secrets are left out."""
    source = host.source()
    commit = source["commit"]
    changed = ", with changes" if source["changed"] else ""
    return {
        **{name: installed_version(name) for name in _PACKAGES},
        "commit": f"{commit}{changed}" if commit else "installed, no checkout",
        **{name: installed_version(name) for name in _PACKAGES_OF_EXTRAS},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": f"{host.cpus()} of {os.cpu_count()} usable, {local_speed().describe()}",
        "memory": gib(host.memory()),
        "gpus": _describe_gpus() if gpu_count() else "none",
        **{f"${name}": value for name, value in sorted(_variables(os.environ).items())},
    }


def _describe_gpus() -> str:
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
