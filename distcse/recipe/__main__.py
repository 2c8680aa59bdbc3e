"""Print the reference of all knobs: `python -m distcse.recipe > docs/recipe-reference.md`."""

from __future__ import annotations

import sys

from distcse.recipe.reference import reference

sys.stdout.write(reference())
