"""Recipes of the kinds of run, one file a kind.

Importing this package imports every file in it, and thereby registers the recipes. To add a kind of run, see CONTRIBUTING.md.
"""

from importlib import import_module
from pkgutil import iter_modules

import distcse.recipe.kinds.distillation  # noqa: F401 (registered first: the kind of a document that names none)

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
