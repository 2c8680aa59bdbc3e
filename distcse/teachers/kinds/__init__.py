"""The kinds of teachers, one file a kind. Importing this package imports every file in it, and thereby registers the kinds.

To add a kind, see CONTRIBUTING.md.
"""

from importlib import import_module
from pkgutil import iter_modules

from distcse.teachers.kinds.base import Serving, TeacherKind
from distcse.teachers.kinds.registry import kind_of, open_live, register_kind

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["Serving", "TeacherKind", "kind_of", "open_live", "register_kind"]
