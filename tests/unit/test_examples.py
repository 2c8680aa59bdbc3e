"""Text of docstrings and of code, what is held out of it, and packages that are parsed without being imported."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distcse.evaluation.tasks.retrieval import RetrievalDataset
from examples import code_corpus, docstring_corpus
from examples.docstring_corpus import DocumentedObject, held_out_documentation, training_texts

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


def test_texts_with_a_held_out_sentence_are_excluded(write: WriteFile) -> None:
    shared = "This one sentence stands in both of the places."
    held_out = f"Find all of the needles here.\n\n{shared} It continues with a description of some length."
    write("pkg_held/m.py", function(name_in("pkg_held.m", held_out=True), held_out))
    learned = f"Look into the entire haystack.\n\n{shared.replace('one', 'ONE')} Nothing else is here now."
    write("pkg_learned/m.py", function(name_in("pkg_learned.m", held_out=False), learned))
    other = "Look into a barn.\n\nEverything that anybody has ever lost is somewhere in this barn."
    write("pkg_learned/n.py", function(name_in("pkg_learned.n", held_out=False), other))
    queries, documents = training_texts(["pkg_learned"])
    assert len(queries) == len(documents) == 2
    assert training_texts(["pkg_learned", "pkg_held"]) == (
        ["Look into a barn."],
        ["Everything that anybody has ever lost is somewhere in this barn."],
    )
    [entry] = held_out_documentation(["pkg_learned", "pkg_held"])
    assert entry.summary == "Find all of the needles here." and entry.description.startswith(shared)
    assert entry.name.startswith("pkg_held.m.f")


@pytest.mark.parametrize("name", ["no_such_package", "numpy.linalg", ""])
def test_a_package_that_is_not_installed_is_an_error(name: str) -> None:
    with pytest.raises(LookupError, match=f"{name!r} is not installed"):
        training_texts([name])


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
    assert (tmp_path / "out" / "queries.txt").read_text() == "Look into the entire haystack.\n"
    assert (tmp_path / "out" / "documents.txt").read_text() == ""
    found = RetrievalDataset.read(tmp_path / "out" / "retrieval" / "docstrings")
    assert found.queries == ["Find all of the needles here."] and found.relevant == [{0: 1.0}]


def test_numpy_is_prose() -> None:
    queries, documents = training_texts(["numpy"])
    found = [*queries, *documents]
    assert len(queries) > 1000 and len(documents) > 200
    assert len({text.lower() for text in queries}) == len(queries)
    assert not any(mark in text for text in found for mark in ("``", ">>>", ":func:", "]_"))
    held_out = held_out_documentation(["numpy"])
    excluded = {entry.summary.lower() for entry in held_out}
    assert len(held_out) > 40 and not excluded & {text.lower() for text in found}


def test_functions_become_queries_documents_and_a_search_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is held out with all its functions; their documents say nothing of the summary."""
    for number in range(40):
        source = f'def find_{number}(hay):\n    """Find needle {number} in\n    the hay.\n\n    More."""\n'
        source += f"    return hay[{number}]\n"
        source += f'def short_{number}(hay):\n    """Needle {number}."""\n    return hay\n'
        (tmp_path / f"m{number}.py").write_text(source)
    (tmp_path / "template.py").write_text("def {{ name }}():")
    (tmp_path / "latin.py").write_bytes(b"# \xff")
    (tmp_path / "lost.py").symlink_to("nowhere")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "hidden.py").write_text(source)
    monkeypatch.setattr(sys, "argv", ["code_corpus.py", str(tmp_path), "--out", str(tmp_path / "out")])
    code_corpus.main()
    queries, documents = (
        (tmp_path / "out" / f"{name}.txt").read_text().splitlines() for name in ("queries", "documents")
    )
    found = RetrievalDataset.read(tmp_path / "out" / "retrieval" / "code")
    assert len(queries) == len(documents) and 1 <= len(found.queries) <= 12 and len(queries) + len(found.queries) == 40
    assert {*queries, *found.queries} == {f"Find needle {number} in the hay." for number in range(40)}
    number = int(queries[0].split()[2])
    assert f'def find_{number}(hay): """Find needle {number} in the hay. More.""" return hay[{number}]' in documents
    number = int(found.queries[0].split()[2])
    [document] = [found.documents[place] for place in found.relevant[0]]
    assert document == f"def find_{number}(hay): return hay[{number}]"
    assert f"{len(queries)} queries, {len(documents)} documents, and a set of" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["code_corpus.py", str(tmp_path / "empty"), "--out", str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"no documented function in .*empty"):
        code_corpus.main()
    assert not (tmp_path / "none").exists()


def test_code_without_its_docstring_is_as_python_reads_it(tmp_path: Path) -> None:
    """In the file's encoding, with a form feed; empty where the docstring shares a line with something else."""
    file = tmp_path / "m.py"
    file.write_bytes(
        b'# coding: latin-1\n\x0cdef find(hay):\n    """Find the n\xe4\xefve needle."""\n    return hay\n'
        b'def stub(hay):\n    """Find all of the needles."""\n'
        b'def two(hay,\n        straw): """Find two of the needles."""; return hay\n'
        b'def more(hay):\n    """Find more of the needles."""; straw = 1\n    return straw\n'
    )
    found = {each.summary: each.code for each in code_corpus.functions([tmp_path])}
    assert found == {
        "Find the n\xe4\xefve needle.": "\x0cdef find(hay):\n    return hay",
        "Find all of the needles.": "",
        "Find two of the needles.": "",
        "Find more of the needles.": "",
    }


def test_too_few_files_for_a_set_are_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = 'def find(hay):\n    """Find the needle in the hay."""\n    return hay\n'
    sources = (body + f"# {number}" for number in range(100))
    monkeypatch.setattr(sys, "argv", ["code_corpus.py", str(tmp_path), "--out", str(tmp_path / "out")])
    for source in sources:
        (tmp_path / "m.py").write_text(source)
        [entry] = code_corpus.functions([tmp_path])
        if not entry.is_held_out:
            break
    code_corpus.main()
    assert capsys.readouterr().out.startswith("1 queries and 1 documents in ")
    assert not (tmp_path / "out" / "retrieval").exists()
