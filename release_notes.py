"""The part of CHANGELOG.md about one version, as a release on a forge wants it: `make release-notes VERSION=0.2.0`.

A paragraph or list item is one line there: forges break lines where the file does.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_VERSION = re.compile(r"^## \[([^\]]+)\].*\n", re.M)


def notes(changelog: str, version: str) -> str:
    """Markdown of a version's part. `SystemExit` with the versions there are, where it has none or an empty one."""
    parts = _VERSION.split(changelog)[1:]
    found = dict(zip((name.lower() for name in parts[::2]), parts[1::2], strict=True))
    text = re.sub(r"\n +(?=\S)", " ", found.get(version.lower(), "")).strip()
    if not text:
        raise SystemExit(f"CHANGELOG.md says nothing of version {version!r}; versions there: {', '.join(parts[::2])}")
    return text


if __name__ == "__main__":
    if len(sys.argv) != 2 or not sys.argv[1]:
        raise SystemExit("which version? make release-notes VERSION=0.2.0 (or unreleased)")
    sys.stdout.write(notes((Path(__file__).parent / "CHANGELOG.md").read_text(encoding="utf-8"), sys.argv[1]) + "\n")
