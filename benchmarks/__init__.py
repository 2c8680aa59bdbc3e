"""Paired measurements of distcse: ratios and exact counts, never bare seconds. See README.md."""

from pathlib import Path

STORED = Path(__file__).parent / "results"
"""Folder of the reports, with a folder for each machine."""
