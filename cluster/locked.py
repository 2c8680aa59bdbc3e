"""Prints the entries of requirements.lock that distcse needs with some extras, for `pip install --require-hashes --no-deps`.

python cluster/locked.py quickstart,tune [--without-torch] > needed.lock

PyTorch's CUDA build and its libraries are not in the lock, whose torch is the CPU build: `--without-torch` leaves torch out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def needed_names(extras: str) -> set[str]:
    """Return the names of the packages that pip would install, as the lock writes them."""
    command = [
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--report",
        "-",
        "--constraint",
        "constraints.txt",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pip", *command, f".[{extras}]"], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    return {normalized(item["metadata"]["name"]) for item in json.loads(done.stdout)["install"]}


def normalized(name: str) -> str:
    """Return a package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(names: set[str]) -> str:
    """Return the lock's entries of these packages."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    found = re.finditer(r"^([\w.-]+)==.*(?:\n    --hash=.*)+", lock, re.MULTILINE)
    return "".join(f"{entry[0]}\n" for entry in found if normalized(entry[1]) in names)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extras", help="extras of distcse, separated by commas")
    parser.add_argument("--without-torch", action="store_true", help="leave PyTorch out")
    options = parser.parse_args()
    sys.stdout.write(entries(needed_names(options.extras) - ({"torch"} if options.without_torch else set())))
