"""Custom teachers: classes of the user's that a recipe names by `class_path`."""

from __future__ import annotations

from typing import Protocol, cast

from distcse.checks import Check, fail, ok
from distcse.errors import CustomClassError, RecipeError
from distcse.recipe import TeacherSection
from distcse.recipe.names import load_class
from distcse.storage import content_key
from distcse.teachers.kinds.base import TeacherKind, register_kind
from distcse.teachers.teacher import Embedder


class CustomTeacher(Embedder, Protocol):
    """Interface of the class that `class_path` names: it embeds texts, and identifies its vectors."""

    fingerprint: str
    """Identifies the vectors: a table is reused while this string and the class's arguments are unchanged."""


@register_kind
class CustomKind(TeacherKind):
    """A class of the user's; `backbone` is the teacher's name."""

    name = "custom"

    @classmethod
    def matches(cls, section: TeacherSection) -> bool:
        return section.class_path is not None

    @property
    def source(self) -> str:
        """`module:Class`."""
        return str(self.section.class_path)

    def source_fingerprint(self) -> str:
        """Hash the class's path, its arguments and its `fingerprint`."""
        identity = [self.section.class_path, self.section.kwargs, self.open_embedder().fingerprint]
        return content_key(identity)

    def open_embedder(self) -> CustomTeacher:
        """Create an object of the class, with `kwargs` as its arguments."""
        teacher_class = load_class(self.source, "a teacher's class_path")
        try:
            custom = teacher_class(**self.section.kwargs)
        except TypeError as error:
            raise CustomClassError(
                f"teacher {self.section.backbone}: {self.source} does not accept the kwargs of the recipe ({error}); change "
                "kwargs"
            ) from None
        if not callable(getattr(custom, "encode", None)) or not isinstance(getattr(custom, "fingerprint", None), str):
            raise CustomClassError(
                f"teacher {self.section.backbone}: {self.source} lacks a method encode(texts, …) or a string fingerprint; add "
                "them"
            )
        return cast(CustomTeacher, custom)

    def check_source(self) -> list[Check]:
        """Create an object of the class."""
        try:
            self.open_embedder()
        except RecipeError as error:
            return [fail("model", str(error), "see docs/how-to/extend.md")]
        return [ok("model", f"{self.section.backbone}: {self.source} can be created")]
