"""What can be known before a run: a run raises the first error, and `--dry-run` and `doctor` print the answers."""
