"""Resources and packages of this machine; within a container, the container's limits (cgroup, version 2 or 1)."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PACKAGE = "package:"
"""Begins the name of a file or folder inside an installed package: `package:NAME/PATH`."""
CGROUP = Path("/sys/fs/cgroup")
_UNLIMITED = ("max", "-1")
_GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
_WITHOUT_DRIVER = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""Variable with which `torch.cuda.is_available` reads `CUDA_VISIBLE_DEVICES` at each call, and does not ask the CUDA driver."""

_EXTRAS = {
    "completion": ("shtab>=1.13",),
    "deepspeed": ("deepspeed>=0.19,<0.20",),
    "mining": ("bm25s>=0.2", "faiss-cpu>=1.9"),
    "mlflow": ("mlflow-skinny>=3.1,<4",),
    "onnx": ("onnx>=1.19", "onnxruntime>=1.22", "onnxscript>=0.5"),
    "static": ("model2vec[train]>=0.10,<0.11",),
    "tune": ("optuna>=4.2", "simpleeval>=1.0"),
    "wandb": ("wandb>=0.31",),
}
"""pyproject.toml's extras, which an installation without metadata (a job's folder) does not have."""

_hides_gpus = False
"""Whether this process uses no GPU, also of a kind that the variable does not hide."""


def cpus(cgroup: Path = CGROUP) -> int:
    """Return the number of CPUs that this process may use, at least 1."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _words(cgroup / "cpu.max") or [
        *_words(cgroup / "cpu" / "cpu.cfs_quota_us"),
        *_words(cgroup / "cpu" / "cpu.cfs_period_us"),
    ]
    if len(limit) != 2 or limit[0] in _UNLIMITED:
        return available
    return max(1, min(available, math.ceil(int(limit[0]) / int(limit[1]))))


def limit_spinning() -> None:
    """Let OpenMP's threads spin for microseconds instead of milliseconds before they sleep, unless the user has set how long.

    Call it before PyTorch is imported; processes that this one starts inherit it. Next to other programs, a thread that spins
    waits for one that has no processor: a training step on two CPUs with four busy processes takes 1.6 times as long with
    GNU OpenMP's default. Without other programs both take as long (docs/reference/command-line.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "2000")


def memory(cgroup: Path = CGROUP) -> float:
    """Return the total memory in bytes."""
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    limit = _words(cgroup / "memory.max") or _words(cgroup / "memory" / "memory.limit_in_bytes") or ["max"]
    return total if limit[0] in _UNLIMITED else min(total, float(limit[0]))


def memory_used(cgroup: Path = CGROUP) -> float:
    """Return the container's used memory in bytes, without reclaimable file cache; 0 if there is no cgroup."""
    v1 = cgroup / "memory"
    used = _words(cgroup / "memory.current") or _words(v1 / "memory.usage_in_bytes") or ["0"]
    stats = _words(cgroup / "memory.stat") or _words(v1 / "memory.stat")
    sizes = dict(zip(stats[::2], stats[1::2], strict=False))
    reclaimable = sizes.get("total_inactive_file", sizes.get("inactive_file", "0"))
    return max(0.0, float(used[0]) - float(reclaimable))


def hides_gpus() -> bool:
    """Return whether this process uses none of the machine's GPUs (`hide_gpus`, `gpus_hidden`)."""
    return _hides_gpus


def hide_gpus() -> None:
    """Make this process, and libraries that have not initialized CUDA in it, use no GPU."""
    global _hides_gpus
    _hides_gpus = True
    os.environ[_GPU_VARIABLE] = ""


@contextmanager
def gpus_hidden() -> Iterator[None]:
    """Context manager: hide the GPUs from this process for the block. Afterwards, the process can use them."""
    import torch

    global _hides_gpus
    # The CUDA driver reads the variable once per process, and PyTorch counts its GPUs once, in the first backward pass at the
    # latest. In the block, both would find none for good. Counting them here creates no CUDA context.
    torch.accelerator.is_available()
    was_hidden, variables = _hides_gpus, {name: os.environ.get(name) for name in (_GPU_VARIABLE, _WITHOUT_DRIVER)}
    hide_gpus()
    os.environ[_WITHOUT_DRIVER] = "1"  # else libraries would find the GPUs that were counted
    try:
        yield
    finally:
        _hides_gpus = was_hidden
        restore_variables(variables)


def restore_variables(before: Mapping[str, str | None]) -> None:
    """Give environment variables the values that they had before; None is unset."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _words(file: Path) -> list[str]:
    return file.read_text(encoding="ascii").split() if file.is_file() else []


def installed_version(package: str, missing: str = "not installed") -> str:
    """Return a package's version, or `missing` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return missing


def package_folder(package: str) -> Path | None:
    """Return the folder of an installed package, which is not imported; None if there is none."""
    # For a dotted name, find_spec would import the parent.
    spec = find_spec(package) if package.isidentifier() else None
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def path_in_package(name: str) -> Path:
    """Return the path that `package:NAME/PATH` names, whether it exists or not; a `LookupError` if there is no such package."""
    package, _, inside = name.removeprefix(PACKAGE).partition("/")
    if (folder := package_folder(package)) is None:
        raise LookupError(f"package {package!r} is not installed; pip install {package}")
    if ".." in Path(inside).parts or Path(inside).is_absolute():
        raise LookupError(f"package {package!r} has no {inside!r}; write a path inside it")
    return folder / inside


def pip_install(extra: str) -> str:
    """Return the command that installs an extra's packages; it needs no clone, and no release of distcse on an index."""
    return " ".join(("pip install", *(f'"{package}"' for package in _EXTRAS[extra])))


SECRET_SUFFIXES = ("TOKEN", "KEY", "SECRET", "PASSWORD", "CREDENTIALS")
"""Suffixes of variables that are never passed to Ray, because it logs and displays workers' environments."""
MALLOC_ENV = {
    # By default glibc returns large blocks to the kernel after every step and faults them in again: steps are up to 5x slower.
    "MALLOC_MMAP_THRESHOLD_": "2147483648",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
}
"""Environment variables of a training process; glibc reads them when the process starts."""


def source() -> dict[str, Any]:
    """Return the commit of the running code and whether files differ from it; both None outside its own git checkout."""
    here = Path(__file__)
    # Installed inside another repository, the commit would be that one's.
    if _git(here, "ls-files", "--error-unmatch", here.name) is None:
        return {"commit": None, "changed": None}
    changes = _git(here, "status", "--porcelain", "--untracked-files=no", "--", str(here.parent.parent))
    return {"commit": _git(here, "rev-parse", "HEAD"), "changed": bool(changes)}


def _git(file: Path, *arguments: str) -> str | None:
    """Return the output of git in a file's folder; None if it fails or is not installed."""
    try:
        completed = subprocess.run(
            ["git", "-C", str(file.parent), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout.strip() if completed.returncode == 0 else None


def release_memory() -> None:
    """Return free memory to the kernel and the GPU. Call it between two trainings in one process.

    With `MALLOC_ENV`, glibc returns no memory by itself, and each training fragments the heap further. PyTorch caches GPU
    memory, which another process on the same GPU may need.
    """
    gc.collect()
    trim()
    torch = sys.modules.get("torch")  # not imported only for this
    if torch is not None and torch.accelerator.is_available():
        module = torch.get_device_module()
        if module.is_initialized():  # a process that has not used its GPU gets no context for this
            module.empty_cache()


def trim() -> None:
    """Return free memory to the kernel, without a garbage collection."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if malloc_trim is not None:
        malloc_trim(0)
