"""requirements.lock: the versions of constraints.txt with the hashes of their files, and pip refuses any other file."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.conftest import ROOT

PIN = re.compile(r"^([\w.-]+)==([\w.+]+)")
HASH = re.compile(r"    --hash=sha256:[0-9a-f]{64}( \\)?")
ENTRY = re.compile(r"^([\w.-]+)==.*(?:\n    --hash=.*)+", re.MULTILINE)


def pins(text: str) -> dict[str, str]:
    """Versions by name, names written as pip compares them."""
    found = (PIN.match(line) for line in text.splitlines())
    return {re.sub(r"[-_.]+", "-", pin[1]).lower(): pin[2] for pin in found if pin}


def entries() -> dict[str, str]:
    """Each package's lines of the lock, by name."""
    return {found[1]: found[0] for found in ENTRY.finditer(lock())}


def lock() -> str:
    return (ROOT / "requirements.lock").read_text()


def test_it_holds_the_pins_of_the_constraints_and_a_hash_of_each() -> None:
    text, found = lock(), entries()
    assert pins(text) == pins((ROOT / "constraints.txt").read_text()), "make lock"
    assert found.keys() == pins(text).keys()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert "\n".join(lines) == "\n".join(found.values())
    assert all(PIN.match(line) or HASH.fullmatch(line) for line in lines)


def test_every_pin_that_is_installed_admits_the_oldest_python() -> None:
    """`make lock` asks the index about the others."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = f"{project['requires-python'].removeprefix('>=')}.0"
    pinned = pins(lock()).items()
    about = {f"{found.metadata['Name']}=={found.version.partition('+')[0]}": found for found in distributions()}
    required = {
        pin: found.metadata.json.get("requires_python", "")
        for pin, found in about.items()
        if pinned >= pins(pin).items()
    }
    assert "torch" in pins("\n".join(required))
    assert {pin: python for pin, python in required.items() if oldest not in SpecifierSet(python)} == {}


@pytest.fixture
def impostor(tmp_path: Path) -> Path:
    """A folder with a wheel of a locked package's name and version, and other content."""
    name, version = "mdurl", pins(lock())["mdurl"]
    about = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(tmp_path / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "stolen = True\n")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    return tmp_path


def test_a_file_of_other_content_is_not_installed(impostor: Path) -> None:
    asked, there = impostor / "asked.txt", impostor / "site"
    asked.write_text(entries()["mdurl"] + "\n")

    def install(*how: str) -> subprocess.CompletedProcess[str]:
        pip = [sys.executable, "-m", "pip", "--isolated", "install", "--no-index", "--no-deps", "--target", str(there)]
        command = [*pip, "--find-links", str(impostor), *how]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    refused = install("--require-hashes", "--requirement", str(asked))
    assert refused.returncode and "DO NOT MATCH THE HASHES" in refused.stderr and not there.exists()
    taken = install("mdurl")
    assert not taken.returncode and (there / "mdurl.py").exists(), taken.stderr
