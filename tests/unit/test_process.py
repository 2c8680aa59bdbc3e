"""Memory of a process: what a training frees is returned to the kernel, and imports pause the garbage collector."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys

import pytest

from distcse.devices import host
from distcse.devices.process import gc_paused
from tests.conftest import ROOT

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
