"""requirements.lock: the versions of constraints.txt with the hashes of their files."""

from __future__ import annotations

import re

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
