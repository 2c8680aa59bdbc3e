"""Writes the tree of a release to build/package, for `make dist`.

    python .ci/package.py https://github.com/OWNER/distcse

With the address of the repository, which is no part of the sources, it has project URLs, and a README whose links work on a
package page.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "build" / "package"
_FILES = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", "distcse")
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:]+)(#[^)]*)?\)")


def absolute_links(text: str, url: str, version: str) -> str:
    """Replace relative links of a Markdown text by the repository's pages of a version, and pictures by its raw files."""

    def replaced(link: re.Match[str]) -> str:
        picture, title, path, anchor = link.groups()
        return f"{picture}[{title}]({url}/{'raw' if picture else 'blob'}/v{version}/{path}{anchor or ''})"

    return _LINK.sub(replaced, text)


def with_urls(project: str, url: str) -> str:
    """Add the project's URLs to the text of pyproject.toml."""
    urls = {"Repository": url, "Documentation": f"{url}/blob/main/docs/index.md", "Issues": f"{url}/issues"}
    lines = "\n".join(f'{name} = "{address}"' for name, address in urls.items())
    return project.replace(
        "[project.optional-dependencies]", f"[project.urls]\n{lines}\n\n[project.optional-dependencies]"
    )


def write_package(url: str | None, target: Path) -> None:
    """Copy what a release contains, as git has it, and add the address of the repository, if there is one."""
    shutil.rmtree(target, ignore_errors=True)
    command = ["git", "-C", str(ROOT), "ls-files", *_FILES]
    for name in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copyfile
        copy(ROOT / name, target / name)  # a link becomes the file or folder
    if url is None:
        return
    project = target / "pyproject.toml"
    version = re.search(r'^version = "(.*)"', project.read_text(), re.M)
    assert version is not None
    project.write_text(with_urls(project.read_text(), url))
    readme = target / "README.md"
    readme.write_text(absolute_links(readme.read_text(), url, version[1]))


if __name__ == "__main__":
    if len(sys.argv) > 2 or not all(url.startswith("https://") for url in sys.argv[1:]):
        sys.exit("usage: python .ci/package.py [https://HOST/OWNER/REPOSITORY]")
    write_package(sys.argv[1].rstrip("/") if sys.argv[1:] else None, TARGET)
