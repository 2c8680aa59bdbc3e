"""What the site needs besides the pages: links to files outside docs/, and notebooks as pages."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
NOTEBOOKS = "tutorials"
LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each notebook: its text, its code and its output."""
    for notebook in sorted((ROOT / "docs" / NOTEBOOKS).glob("*.ipynb")):
        page = File.generated(
            config, f"{NOTEBOOKS}/{notebook.stem}.md", content=as_markdown(json.loads(notebook.read_text()))
        )
        files.append(page)
    for script in [file for file in files if file.src_path.endswith((".py", ".pyc", ".toml", ".ipynb"))]:
        files.remove(script)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace each link to a file outside docs/, which is no page of the site, by the file's path in the repository."""
    here = posixpath.dirname(page.file.src_path)

    def as_path(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", here, match[1]))
        return match[0] if path.startswith("docs/") else f"](repository:{path})"

    def as_text(match: re.Match[str]) -> str:
        text, path = match[1], match[2]
        return f"`{path}`" if text.strip("`") in (path, posixpath.basename(path)) else f"{text} (`{path}`)"

    linked = LINK.sub(as_path, markdown)
    return re.sub(r"\[([^\]]*)\]\(repository:([^)]*)\)", as_text, linked).replace(".ipynb)", ".md)")


def as_markdown(notebook: dict[str, Any]) -> str:
    """Format a notebook's cells as Markdown, with their text outputs and tables."""
    parts: list[str] = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "text/markdown" in data:
                parts.append("".join(data["text/markdown"]))
            elif shown := "".join(output.get("text") or data.get("text/plain", [])):
                parts.append(f"```text\n{shown.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
