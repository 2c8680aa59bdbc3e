"""Teachers of the user's own."""

from __future__ import annotations

import json
from typing import Protocol, cast

from distcse.errors import CustomClassError
from distcse.files import text_checksum
from distcse.recipe import TeacherSection
from distcse.recipe.own import load_class
from distcse.teachers.teacher import Embedder


class CustomTeacher(Embedder, Protocol):
    """What `code` names: it gives vectors, and says what decides them."""

    fingerprint: str
    """Changes when the vectors would: tables are kept under it."""


def open_custom(teacher: TeacherSection) -> CustomTeacher:
    """The teacher that a recipe names by `code`, made with its knobs.

    Raises:
        RecipeError: It cannot be imported or made, or lacks `encode` or `fingerprint`.
    """
    code = str(teacher.class_path)
    made = load_class(code, "a teacher's code")
    try:
        own = made(**teacher.kwargs)
    except TypeError as refused:
        raise CustomClassError(f"teacher {teacher.backbone}: {code} does not take its knobs: {refused}") from None
    if not callable(getattr(own, "encode", None)) or not isinstance(getattr(own, "fingerprint", None), str):
        raise CustomClassError(
            f"teacher {teacher.backbone}: {code} wants a method encode(texts, …) and a string fingerprint"
        )
    return cast(CustomTeacher, own)


def custom_fingerprint(teacher: TeacherSection) -> str:
    """What decides its vectors: the class, its knobs, and what it says itself."""
    told = json.dumps([teacher.class_path, teacher.kwargs, open_custom(teacher).fingerprint], sort_keys=True)
    return text_checksum(told)
