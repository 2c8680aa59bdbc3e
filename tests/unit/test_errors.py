"""The error classes: one stable code each, listed on the troubleshooting page, and nothing else raised."""

from __future__ import annotations

import ast
import inspect
import json
import pickle
import re

import pytest
from ray import cloudpickle

from distcse import errors
from distcse.devices.process import exit_status
from distcse.errors import (
    CorpusError,
    CorpusNotFoundError,
    DistcseError,
    EncoderError,
    EvaluationError,
    RecipeError,
    RunError,
    StorageError,
    StorageWriteError,
    TeacherError,
    UnknownKeyError,
    first_line,
    last_line,
)
from distcse.preflight import warnings as settings_warnings
from tests.conftest import ROOT

BASES = {
    "R": RecipeError,
    "C": CorpusError,
    "M": EncoderError,
    "T": TeacherError,
    "E": EvaluationError,
    "X": RunError,
    "S": StorageError,
}
CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, DistcseError)]
SPECIFIC = [kind for kind in CLASSES if not kind.code.endswith("00")]


def test_every_class_has_a_unique_code_of_its_family_a_docstring_of_one_line_and_crosses_processes() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)
    assert {kind for kind in CLASSES if kind not in SPECIFIC} == {DistcseError, *BASES.values()}
    for kind in CLASSES:
        assert "code" in vars(kind) and re.fullmatch(r"DCSE-[A-Z]\d\d", kind.code), kind
        if kind in SPECIFIC:
            family = next(base for base in kind.__mro__ if base in BASES.values())
            assert family is BASES[kind.code[5]] and kind.__name__.endswith("Error"), kind
        assert kind.__doc__ and "\n" not in kind.__doc__ and kind.__doc__.endswith("."), kind
        assert kind.__doc__ != getattr(kind.__base__, "__doc__", None), kind
        for pickler in (pickle, cloudpickle):
            crossed = pickle.loads(pickler.dumps(kind("training.lr is 'fast'")))
            assert type(crossed) is kind and str(crossed) == "training.lr is 'fast'" and crossed.code == kind.code


def test_the_page_lists_every_class_and_nothing_else() -> None:
    page = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text(encoding="utf-8")
    lines = page.partition("\n## Error codes\n")[2].splitlines()
    rows = [[cell.strip(" |") for cell in line.split(" | ")] for line in lines if line.startswith("| `")]
    assert all(fix for _, _, _, fix in rows)
    assert [row[:3] for row in rows] == [[f"`{kind.code}`", f"`{kind.__name__}`", kind.__doc__] for kind in SPECIFIC]
    warnings = re.findall(r"DCSE-W\d\d", inspect.getsource(settings_warnings))
    assert warnings and not {*re.findall(r"DCSE-[A-Z]\d\d", page)} - {kind.code for kind in CLASSES} - {*warnings}


def created_bases(source: str) -> list[str]:
    """Family bases that a module creates, whether it raises them at once or returns them to be raised."""
    bases = {"DistcseError", *(base.__name__ for base in BASES.values())}
    found = []
    for node in ast.walk(ast.parse(source)):
        made = node.exc if isinstance(node, ast.Raise) else node.func if isinstance(node, ast.Call) else None
        name = made.id if isinstance(made, ast.Name) else made.attr if isinstance(made, ast.Attribute) else ""
        if name in bases:
            found.append(f"line {node.lineno}: {name}")  # type: ignore[attr-defined]
    return found


def test_nothing_raises_a_family_base() -> None:
    assert created_bases("raise RunError('x') from None") == ["line 1: RunError"]
    assert created_bases("raise errors.RunError") == ["line 1: RunError"]
    assert created_bases("def lost():\n    return TeacherError(f'{reason}')") == ["line 2: TeacherError"]
    assert created_bases("raise CheckpointError('x')\ntry: pass\nexcept RunError: raise") == []
    found = {file.name: created_bases(file.read_text(encoding="utf-8")) for file in (ROOT / "distcse").rglob("*.py")}
    assert not {name: bases for name, bases in found.items() if bases}


@pytest.mark.parametrize(
    ("kind", "status"),
    [(UnknownKeyError, 2), (CorpusNotFoundError, 1), (StorageWriteError, 1), (errors.StoppedEarlyError, 130)],
)
def test_commands_print_the_code(kind: type[DistcseError], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise kind("what and where")

    assert exit_status(work, kept="all", as_json=True) == status
    shown = capsys.readouterr()
    assert shown.err == f"distcse: [{kind.code}] what and where\n"
    printed = json.loads(shown.out)
    assert printed == {"event": "Error", "code": kind.code, "kind": kind.__name__, "message": "what and where"}


def test_an_error_without_a_message_has_the_line_of_its_class() -> None:
    assert first_line(ValueError("\nfirst\nlast\n")) == "first" and last_line(ValueError("\nfirst\nlast\n")) == "last"
    assert first_line(MemoryError()) == last_line(MemoryError(" ")) == "MemoryError"
