"""Custom teachers: classes of the user's that a recipe names by `class_path`."""

from __future__ import annotations

import json
from typing import Protocol, cast

from distcse.errors import CustomClassError
from distcse.files import text_checksum
from distcse.recipe import TeacherSection
from distcse.recipe.custom import load_class
from distcse.teachers.teacher import Embedder


class CustomTeacher(Embedder, Protocol):
    """Interface of the class that `class_path` names: it embeds texts, and identifies its vectors."""

    fingerprint: str
    """Identifies the vectors: a table is reused while this string and the class's arguments are unchanged."""


def open_custom(teacher: TeacherSection) -> CustomTeacher:
    """Create the teacher that a recipe names by `class_path`, with `kwargs` as its arguments.

    Raises:
        CustomClassError: The class cannot be imported or created, or lacks `encode` or `fingerprint`.
    """
    class_path = str(teacher.class_path)
    teacher_class = load_class(class_path, "a teacher's class_path")
    try:
        custom = teacher_class(**teacher.kwargs)
    except TypeError as error:
        raise CustomClassError(
            f"teacher {teacher.backbone}: {class_path} does not accept the kwargs of the recipe ({error}); change kwargs"
        ) from None
    if not callable(getattr(custom, "encode", None)) or not isinstance(getattr(custom, "fingerprint", None), str):
        raise CustomClassError(
            f"teacher {teacher.backbone}: {class_path} lacks a method encode(texts, …) or a string fingerprint; add them"
        )
    return cast(CustomTeacher, custom)


def custom_fingerprint(teacher: TeacherSection) -> str:
    """Hash what determines a custom teacher's vectors: class path, arguments, and its own `fingerprint`."""
    identity = json.dumps([teacher.class_path, teacher.kwargs, open_custom(teacher).fingerprint], sort_keys=True)
    return text_checksum(identity)
