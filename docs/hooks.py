"""What the site needs beside the pages: files outside docs/ that pages link to, and notebooks as pages."""

from __future__ import annotations

import json
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\]\(((?:\.\./)+[^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    """Each notebook becomes a page: its text, its code, and what it printed."""
    for notebook in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        page = File.generated(
            config, f"notebooks/{notebook.stem}.md", content=as_markdown(json.loads(notebook.read_text()))
        )
        files.append(page)
    for script in [file for file in files if file.src_path.endswith((".py", ".pyc", ".toml", ".ipynb"))]:
        files.remove(script)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link out of docs/ is no page of the site: it is told as the path it is in the repository."""
    here = posixpath.dirname(page.file.src_path)

    def told(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", here, match[1]))
        return match[0] if path.startswith("docs/") else f"](repository:{path})"

    return re.sub(r"\[([^\]]*)\]\(repository:([^)]*)\)", r"\1 (`\2`)", LINK.sub(told, markdown)).replace(
        ".ipynb)", ".md)"
    )


def as_markdown(notebook: dict[str, Any]) -> str:
    """A notebook's cells as Markdown, with the text and the tables that they gave."""
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
