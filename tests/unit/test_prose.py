"""The prose check of `.ci/prose.py`: what counts as prose, at which line, and exceptions."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT

WORDS = """
[banned]
"zorp|zorps" = "value"
"of old times" = "former"
"Zilch" = "NewName"
"""
EXCEPTION = """
[[exceptions]]
file = "{file}"
word = "{word}"
reason = "quoted"
"""
Check = Callable[[dict[str, str]], list[str]]


@pytest.fixture(scope="module")
def prose() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("prose_check", ROOT / ".ci" / "prose.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in {".ci/prose.toml": WORDS, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.fixture
def check(prose: ModuleType, tmp_path: Path) -> Check:
    """Write files, check them, and return `file:line: word` of each finding."""

    def check(files: dict[str, str]) -> list[str]:
        write(tmp_path, files)
        rules = prose.Rules.load(tmp_path / ".ci" / "prose.toml")
        return [f"{found.file}:{found.line}: {found.word}" for found in prose.find_all(tmp_path, rules)]

    return check


def test_python_docstrings_comments_and_messages(check: Check) -> None:
    source = '''"""A module.

A Zorp here.
"""
x = 1  # things of old
# times, in two lines of comment
def f():
    """zorp"""
    raise ValueError(
        f"{x!r} is bad, "
        f"and {x:>{4}} zorps are {'no zorp' if x else 'one of'}"
        f" old times"
    )
message = "first line\\nzorp"
'''
    assert check({"distcse/a.py": source}) == [
        "distcse/a.py:3: zorp",
        "distcse/a.py:5: of old times",
        "distcse/a.py:8: zorp",
        "distcse/a.py:11: zorps",
        "distcse/a.py:11: zorp",
        "distcse/a.py:14: zorp",
    ]


def test_python_code_is_no_prose(check: Check) -> None:
    source = '''"""Call `zorp`, or ``zorp of old times``; zorp_s, a.zorp and --zorp are names."""
zorp = {"zorp": 1}
print(f"the {zorp} and {zorp['zorp']} of {{x}}", zorp, 'see `zorp`')
print(f"{{{zorp}}}" f"a {zorp}")
of, old = "of", "old times"
'''
    assert check({"tests/a.py": source, "other/a.py": '"""zorp"""'}) == []


def test_markdown(check: Check) -> None:
    page = """# Zorps

Things of old
times, `zorp`, [a link](zorp.md#zorp) and ``zorp``.

```bash
zorp
```
An odd ` and a zorp.

- ~~~
  zorp
  ~~~
- another `zorp`
"""
    assert check({"docs/a.md": page}) == ["docs/a.md:1: zorps", "docs/a.md:3: of old times", "docs/a.md:9: zorp"]


def test_output_and_exit_status(prose: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"docs/a.md": "No words.\n"})
    assert prose.main([], tmp_path) == 0
    write(tmp_path, {"docs/a.md": "One zorp.\n", "README.md": "\nTwo zorps.\n"})
    capsys.readouterr()
    assert prose.main([], tmp_path) == 1
    assert capsys.readouterr().out.splitlines() == [
        "README.md:2: 'zorps': write value instead",
        "docs/a.md:1: 'zorp': write value instead",
        "per word: zorps 1, zorp 1",
        "per folder: . 1, docs 1",
        "words to replace: 2",
    ]
    assert prose.main(["docs"], tmp_path) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "words to replace: 1"


def test_exceptions(prose: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    used = EXCEPTION.format(file="docs/*.md", word="zorp")
    write(tmp_path, {".ci/prose.toml": WORDS + used, "docs/a.md": "One zorp.\n"})
    assert prose.main([], tmp_path) == 0
    unused = EXCEPTION.format(file="README.md", word="zorp")
    write(tmp_path, {".ci/prose.toml": WORDS + used + unused})
    assert prose.main([], tmp_path) == 1
    assert ".ci/prose.toml: exception for 'zorp' in README.md is unused: remove it" in capsys.readouterr().out
    write(tmp_path, {".ci/prose.toml": WORDS + EXCEPTION.format(file="docs/*.md", word="other")})
    with pytest.raises(SystemExit, match="an exception has a file, a word of"):
        prose.main([], tmp_path)
