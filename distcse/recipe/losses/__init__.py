"""Settings of the losses, one file a loss. Importing this package imports every file in it, and thereby registers the losses.

To add a loss, see CONTRIBUTING.md.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
