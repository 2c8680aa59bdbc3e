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
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
CUDA = re.compile("nvidia-|cuda-|triton")
"""Names of the packages that PyTorch's CUDA build needs; the lock has the CPU build."""
PIP = [
    *("install", "--dry-run", "--ignore-installed", "--quiet"),
    *("--report", "-", "--constraint", "constraints.txt"),
]


def needed_names(extras: str) -> set[str]:
    """Return the names of the packages that pip would install to build distcse and to run it."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = document["project"]
    requirements = [*document["build-system"]["requires"], *project["dependencies"]]
    for extra in extras.split(","):
        requirements += project["optional-dependencies"][extra]
    command = [sys.executable, "-m", "pip", *PIP, *requirements]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE)
    names = {normalized(item["metadata"]["name"]) for item in json.loads(done.stdout)["install"]}
    return {name for name in names if not CUDA.match(name)}


def normalized(name: str) -> str:
    """Return a package's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(names: set[str]) -> str:
    """Return the lock's entries of these packages. Exits with an error if one has none."""
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    found = re.finditer(r"^([\w.-]+)==.*(?:\n    --hash=.*)+", lock, re.MULTILINE)
    by_name = {normalized(entry[1]): f"{entry[0]}\n" for entry in found}
    if missing := sorted(names - by_name.keys()):
        sys.exit(f"requirements.lock has no {', '.join(missing)}; run make lock")
    return "".join(by_name[name] for name in sorted(names))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extras", help="extras of distcse, separated by commas")
    parser.add_argument("--without-torch", action="store_true", help="leave PyTorch out")
    options = parser.parse_args()
    sys.stdout.write(entries(needed_names(options.extras) - ({"torch"} if options.without_torch else set())))
