"""The pages: every relative link and anchor lands, the site builds without a warning, every page is in its navigation."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import distcse
from tests.conftest import ROOT

LINK = re.compile(r"(?<!\\)!?\[(?:[^\]\[]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.M | re.S)
CODE = re.compile(r"`[^`\n]*`")


def pages() -> list[Path]:
    """All Markdown of the repository that git knows, or would."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [ROOT / line for line in listed.stdout.splitlines()] if listed.returncode == 0 else [*ROOT.glob("*.md")]
    return sorted(page for page in {*found, *(ROOT / "docs").rglob("*.md")} if page.is_file() and not is_template(page))


def is_template(page: Path) -> bool:
    return page.is_relative_to(ROOT / "distcse")


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings, code and links in them taken as their text; and those written as HTML."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found: set[str] = set(re.findall(r'<a (?:id|name)="([^"]+)"', text))
    for heading in re.findall(r"^#{1,6} +(.+?) *#*$", text, re.M):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = "".join(sign for sign in plain.lower() if sign.isalnum() or sign in " -_").strip().replace(" ", "-")
        number = 1
        while (name := slug if number == 1 else f"{slug}-{number - 1}") in found:
            number += 1
        found.add(name)
    return found


def links(page: Path) -> Iterator[str]:
    text = CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in LINK.findall(text):
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield target


def test_every_relative_link_and_anchor_lands() -> None:
    dead = []
    for page in pages():
        for target in links(page):
            path, _, anchor = target.partition("#")
            aim = (page.parent / path).resolve() if path else page
            if not aim.exists():
                dead.append(f"{page.relative_to(ROOT)}: {target}: no such file")
            elif not aim.is_relative_to(ROOT):
                dead.append(f"{page.relative_to(ROOT)}: {target}: outside the repository")
            elif anchor and aim.suffix == ".md" and anchor not in anchors(aim):
                dead.append(
                    f"{page.relative_to(ROOT)}: {target}: no heading {anchor}; there are {sorted(anchors(aim))}"
                )
    assert not dead, "\n".join(dead)


def test_the_check_would_see_it(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two.*` (three)\n## One\n## One\n```\n# no heading, [no](link)\n```\n[x](a.md#b) `[y](z)` [w](http://h)\n"
    )
    assert anchors(page) == {"one-two-three", "one", "one-1"}
    assert list(links(page)) == ["a.md#b"]


def navigation() -> list[str]:
    class Loader(yaml.SafeLoader):
        """mkdocs' tags are no concern here."""

    def leaves(entry: object) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, list):
            for one in entry:
                yield from leaves(one)
        elif isinstance(entry, dict):
            for one in entry.values():
                yield from leaves(one)

    return list(leaves(yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]))


def test_every_page_is_in_the_navigation_once() -> None:
    docs = ROOT / "docs"
    there = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    there |= {f"tutorials/{notebook.stem}.md" for notebook in (docs / "tutorials").glob("*.ipynb")}
    named = navigation()
    assert sorted(named) == sorted(there)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if any(find_spec(name) is None for name in ("mkdocs", "material", "mkdocstrings")):
        pytest.skip("the extra docs is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for page in ("index.html", "methods/rankcse.html", "tutorials/a-run.html", "reference/recipe.html"):
        assert (tmp_path / "site" / page).is_file()
    assert "repository:" not in (tmp_path / "site" / "explanation" / "architecture.html").read_text()


def test_the_python_page_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    named = {name.removeprefix("distcse.") for name in re.findall(r"^::: (\S+)$", page, re.M)}
    assert named == {*distcse.__all__} - {"__version__"} and "`distcse.__version__`" in page


def test_troubleshooting_quotes_messages_that_there_are() -> None:
    sources = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "distcse").rglob("*.py")))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # a message over several lines of code
    page = (ROOT / "docs" / "reference" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [
        message for message in re.findall(r"\*\*`([^`]+)`\*\*", page) if message != "CUDA out of memory"
    ]  # torch's own
    assert len(quoted) > 15
    lost = [part for message in quoted for part in re.split(r"\s*…\s*", message) if part and part not in joined]
    assert not lost
