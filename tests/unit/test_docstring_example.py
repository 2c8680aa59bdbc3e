"""Prose of docstrings, held-out objects, and packages that are parsed without being imported."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.evaluation.tasks.retrieval import RetrievalDataset
from examples import docstring_corpus
from examples.docstring_corpus import (
    DocumentedObject,
    docstring_sentences,
    held_out_documentation,
    is_sentence,
    paragraphs,
    split_sentences,
)

WriteFile = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WriteFile:
    """Writes a file of a package on the import path; importing the package is an error."""
    monkeypatch.syspath_prepend(str(tmp_path))
    docstring_corpus.documented.cache_clear()

    def write_file(name: str, content: str) -> Path:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
        init = tmp_path / name.split("/")[0] / "__init__.py"
        if not init.exists():
            init.write_text("raise RuntimeError('imported')\n")
        return file

    return write_file


def function(name: str, docstring: str) -> str:
    return f"def {name}():\n    {docstring!r}\n"


def name_in(module: str, held_out: bool) -> str:
    """Return a function name whose hash holds it out, or keeps it in the corpus, found by trial."""
    names = (f"f{number}" for number in range(1000))
    is_held_out = docstring_corpus.is_held_out
    return next(name for name in names if is_held_out(DocumentedObject(f"{module}.{name}", "", "")) == held_out)


def test_prose_is_taken_without_markup_sections_and_code() -> None:
    docstring = (
        "f(x, y) -> z\n\nGive ``x`` to :class:`~torch.nn.Linear`, e.g. Now. Then *stop* [1]_.\n\nOver two\nlines of text.\n\n"
        "    an indented block\n\nParameters\n----------\nx : int\n    Never prose."
    )
    found = list(paragraphs(docstring))
    assert found == ["Give x to torch.nn.Linear, e.g. Now. Then stop.", "Over two lines of text."]
    assert split_sentences(found[0]) == ["Give x to torch.nn.Linear, e.g. Now.", "Then stop."]


def test_held_out_sentences_are_excluded_from_other_objects_too(write: WriteFile) -> None:
    shared = "This one sentence stands in both of the places."
    held_out = f"Find all of the needles here.\n\n{shared} It continues with a description of some length."
    write("pkg_held/m.py", function(name_in("pkg_held.m", held_out=True), held_out))
    learned = f"Look into the entire haystack.\n\n{shared.upper()[0]}{shared[1:].replace('one', 'ONE')} Nothing else is here now."
    write("pkg_learned/m.py", function(name_in("pkg_learned.m", held_out=False), learned))
    assert docstring_sentences(["pkg_learned"]) != []
    found = docstring_sentences(["pkg_learned", "pkg_held"])
    assert sorted(found) == ["Look into the entire haystack.", "Nothing else is here now."]
    [entry] = held_out_documentation(["pkg_learned", "pkg_held"])
    assert entry.summary == "Find all of the needles here." and entry.description.startswith(shared)
    assert entry.name.startswith("pkg_held.m.f")


def test_retrieval_pairs_are_unique_and_long_enough(write: WriteFile) -> None:
    words = "a description of this very function that is of some length"
    cases = {
        "twin one": f"Return the first of them.\n\nIt is {words}.",
        "twin two": f"Return the first of them.\n\nIt is not {words}.",
        "inside": f"Return the last of them.\n\nUse it to return the last of them, which is {words}.",
        "short summary": f"Return the middle.\n\nIt has {words}.",
        "short description": "Return the second of them.\n\nIt is short.",
    }
    for number, text in enumerate(cases.values()):
        module = f"m{number}"
        write(f"pkg_pairs/{module}.py", function(name_in(f"pkg_pairs.{module}", held_out=True), text))
    found = held_out_documentation(["pkg_pairs"])
    assert [(entry.summary, entry.description) for entry in found] == [("Return the first of them.", f"It is {words}.")]


def test_methods_classes_and_nested_functions_are_documented(write: WriteFile) -> None:
    write(
        "pkg_nested/sub/m.py",
        'class A:\n    """The class represents many things."""\n'
        '    async def b(self):\n        """The method does nothing at all."""\n'
        '        def c():\n            """The inner function does even less."""\n',
    )
    names = [entry.name for entry in docstring_corpus.documented_in_package("pkg_nested")]
    assert names == [f"pkg_nested.sub.m.{name}" for name in ("A", "A.b", "A.b.c")]


def test_tests_vendored_code_and_broken_files_are_skipped(write: WriteFile, caplog: pytest.LogCaptureFixture) -> None:
    good = function("f", "Return the only sentence that is wanted.")
    bad = function("f", "Return a sentence that nobody ever wanted.")
    write("pkg_skips/m.py", good)
    for name in ("tests/m.py", "test_m.py", "m_test.py", "conftest.py", "_vendor/m.py", "sub/tests/sub/m.py"):
        write(f"pkg_skips/{name}", bad)
    write("pkg_skips/template.py", "def {{ name }}(:\n")
    write("pkg_skips/nul.py", "x = 1\0\n")
    with caplog.at_level(logging.INFO):
        entries = list(docstring_corpus.documented_in_package("pkg_skips"))
    assert [entry.summary for entry in entries] == ["Return the only sentence that is wanted."]
    assert "pkg_skips: skipped 2 files" in caplog.text


@pytest.mark.parametrize("name", ["no_such_package", "numpy.linalg", "scikit-learn", "", "this"])
def test_a_package_that_is_not_installed_is_an_error(name: str) -> None:
    with pytest.raises(LookupError, match=f"{name!r} is not installed"):
        docstring_sentences([name])


def test_the_command_writes_text_and_a_search_set(
    write: WriteFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = name_in("pkg_out.m", held_out=True)
    write(
        "pkg_out/m.py",
        function(name, "Find all of the needles here.\n\nIt looks into every one of the haystacks of a farm."),
    )
    write("pkg_out/n.py", function(name_in("pkg_out.n", held_out=False), "Look into the entire haystack."))
    monkeypatch.setattr(sys, "argv", ["docstring_corpus.py", "pkg_out", "--out", str(tmp_path / "out")])
    docstring_corpus.main()
    assert "pkg_out" not in sys.modules and gc.isenabled()
    assert (tmp_path / "out" / "sentences.txt").read_text() == "Look into the entire haystack.\n"
    found = RetrievalDataset.read(tmp_path / "out" / "search")
    assert found.queries == ["Find all of the needles here."] and found.relevant == [{0: 1.0}]


def test_numpy_is_prose() -> None:
    found = docstring_sentences(["numpy"])
    assert len(found) > 1500 and all(map(is_sentence, found))
    assert len({sentence.lower() for sentence in found}) == len(found)
    assert not any(mark in sentence for sentence in found for mark in ("``", ">>>", ":func:", "]_", "\\"))
    held_out = held_out_documentation(["numpy"])
    excluded = {entry.summary.lower() for entry in held_out}
    assert len(held_out) > 40 and not excluded & {sentence.lower() for sentence in found}
