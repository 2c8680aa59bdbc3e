"""Release notes are what the changelog says of a version."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import ROOT

CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-12-01

### Added
- One thing, in
  two lines.
- Another.

## [0.1.0]

### Fixed
- The first.
"""


def asked(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "release_notes.py"), *words], capture_output=True, text=True, check=False
    )


def test_a_versions_part_with_joined_lines() -> None:
    sys.path.insert(0, str(ROOT))
    try:
        from release_notes import notes
    finally:
        sys.path.remove(str(ROOT))
    assert notes(CHANGELOG, "0.2.0") == "### Added\n- One thing, in two lines.\n- Another."
    assert notes(CHANGELOG, "0.1.0") == "### Fixed\n- The first."


def test_of_this_changelog() -> None:
    printed = asked("unreleased")
    assert printed.returncode == 0 and printed.stdout.startswith("### Added\n- ")
    assert not [line for line in printed.stdout.splitlines() if line and not line.startswith(("- ", "### "))]


def test_a_version_that_is_not_there() -> None:
    assert "CHANGELOG.md says nothing of version '9.9'; versions there: Unreleased" in asked("9.9").stderr
    assert asked("").returncode == 1
