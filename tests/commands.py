"""Commands in processes, as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence

from distcse import cli
from tests.conftest import ROOT

TRAIN = [sys.executable, "-m", "distcse.train"]


def user_environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", **more}


def run_command(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=900, env=user_environment(**environment), cwd=ROOT, check=False
    )


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Return a function that runs a command of the command line in this process, and returns its exit status."""
    return lambda words: cli.main([name, *words])
