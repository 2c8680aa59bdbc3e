"""The error classes: one stable code each, listed on the troubleshooting page, and nothing else raised."""

from __future__ import annotations

import ast
import inspect
import json
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

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
    InvalidValueError,
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
from distcse.recipe import read_recipe
from tests.conftest import ROOT
from tests.failures import fails_with

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


def family_of(kind: type[DistcseError]) -> type[DistcseError]:
    """The nearest family base among a class's ancestors."""
    return next(base for base in kind.__mro__ if base in BASES.values())


def test_codes_are_unique_and_well_formed() -> None:
    assert len({kind.code for kind in CLASSES}) == len(CLASSES)
    for kind in CLASSES:
        assert "code" in vars(kind), f"{kind.__name__} has no separate code"
        assert re.fullmatch(r"DCSE-[A-Z]\d\d", kind.code), kind
    assert {kind for kind in CLASSES if kind not in SPECIFIC} == {DistcseError, *BASES.values()}


@pytest.mark.parametrize("kind", SPECIFIC)
def test_the_letter_of_a_code_is_the_family_s(kind: type[DistcseError]) -> None:
    assert family_of(kind) is BASES[kind.code[5]]
    assert kind.__name__.endswith("Error")


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_has_a_docstring_of_one_line(kind: type[DistcseError]) -> None:
    assert kind.__doc__ and "\n" not in kind.__doc__ and kind.__doc__.endswith(".")
    assert kind.__doc__ != getattr(kind.__base__, "__doc__", None)


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("pickler", [pickle, cloudpickle], ids=["pickle", "Ray's"])
def test_every_class_crosses_processes(kind: type[DistcseError], pickler: Any) -> None:
    crossed = pickle.loads(pickler.dumps(kind("training.lr is 'fast'")))
    assert type(crossed) is kind and str(crossed) == "training.lr is 'fast'" and crossed.code == kind.code


def rows_of_the_page() -> Iterator[tuple[str, str, str]]:
    """(code, class, meaning) of each row of the page's table."""
    page = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text(encoding="utf-8")
    for line in page.partition("\n## Error codes\n")[2].splitlines():
        if line.startswith("| `"):
            code, name, meaning, fix = (cell.strip() for cell in line.strip("|").split(" | "))
            assert fix
            yield code.strip("`"), name.strip("`"), meaning


def test_the_page_lists_every_class_and_nothing_else() -> None:
    assert list(rows_of_the_page()) == [(kind.code, kind.__name__, kind.__doc__) for kind in SPECIFIC]


def test_the_page_names_no_code_that_does_not_exist() -> None:
    page = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text(encoding="utf-8")
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
    found = {
        str(file.relative_to(ROOT)): bases
        for file in (ROOT / "distcse").rglob("*.py")
        if (bases := created_bases(file.read_text(encoding="utf-8")))
    }
    assert not found


def test_the_check_would_see_it() -> None:
    assert created_bases("raise RunError('x') from None") == ["line 1: RunError"]
    assert created_bases("raise errors.RunError") == ["line 1: RunError"]
    assert created_bases("def lost():\n    return TeacherError(f'{reason}')") == ["line 2: TeacherError"]
    assert created_bases("raise CheckpointError('x')\ntry: pass\nexcept RunError: raise") == []


def test_only_unknown_keys_are_an_unknown_key_error() -> None:
    with fails_with(UnknownKeyError, "training.lrr", "lr"):
        read_recipe("simcse-bert-base", ["training.lrr=1e-5"])
    with fails_with(InvalidValueError, "training.lr", "fast"):
        read_recipe("simcse-bert-base", ["training.lr=fast"])
    with fails_with(InvalidValueError, "training.lr", "fast", "training.lrr"):
        read_recipe("simcse-bert-base", ["training.lr=fast", "training.lrr=1e-5"])


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


def test_a_subclass_or_another_message_does_not_pass() -> None:
    with pytest.raises(AssertionError, match="StorageWriteError"), fails_with(StorageError):
        raise StorageWriteError("runs cannot be written")
    with pytest.raises(AssertionError, match=r"corpus\.path"), fails_with(CorpusNotFoundError, "corpus.path"):
        raise CorpusNotFoundError("no such file")
    with fails_with(CorpusNotFoundError, "such", "file") as raised:
        raise CorpusNotFoundError("no such file")
    assert raised.value.code == "DCSE-C01"


def test_the_classes_import_nothing_heavy() -> None:
    listed = "import sys; import distcse.errors; print([n for n in ('torch', 'ray', 'numpy', 'pydantic') if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", listed], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_error_without_a_message_has_the_line_of_its_class() -> None:
    assert first_line(ValueError("\nfirst\nlast\n")) == "first" and last_line(ValueError("\nfirst\nlast\n")) == "last"
    assert first_line(MemoryError()) == last_line(MemoryError(" ")) == "MemoryError"
