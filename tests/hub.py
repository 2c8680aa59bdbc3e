"""A fake model hub with the HTTP requests of a push and a load, in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_standin"


class Hub:
    """Files of models, by name, and the paths of all GET and HEAD requests."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.requested_paths: list[str] = []
        self.url = ""

    def commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["key"] == "file":
                self.models[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = self.path.split("?")[0].strip("/").split("/")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._json({"error": "Invalid credentials in Authorization header"}, 401)
            if parts == ["api", "validate-yaml"]:
                return self._json({"errors": [], "warnings": []})
            if parts == ["api", "repos", "create"]:
                repo = json.loads(body)
                name = f"{repo['organization']}/{repo['name']}" if repo.get("organization") else repo["name"]
                hub.models.setdefault(name, {})
                hub.private[name] = bool(repo.get("private") or repo.get("visibility") == "private")
                return self._json({"url": f"{hub.url}/{name}"})
            name = "/".join(parts[2:4])
            if parts[4] == "preupload":
                files = [
                    {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for f in json.loads(body)["files"]
                ]
                return self._json({"files": files})
            assert parts[4] == "commit", self.path
            hub.commit(name, [json.loads(line) for line in body.splitlines()])
            return self._json(
                {"commitUrl": f"{hub.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT, "pullRequestUrl": None}
            )

        def do_GET(self) -> None:
            self._answer()

        def do_HEAD(self) -> None:
            self._answer()

        def _answer(self) -> None:
            hub.requested_paths.append(self.path)
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[0] == "api":
                name = "/".join(parts[2:4])
                is_anonymous = self.headers.get("Authorization") != f"Bearer {TOKEN}"
                if name not in hub.models or (hub.private[name] and is_anonymous):
                    return self._json({"error": "Repository not found"}, 401, {"X-Error-Code": "RepoNotFound"})
                files = [
                    {"type": "file", "path": f, "rfilename": f, "oid": sha1(c).hexdigest(), "size": len(c)}
                    for f, c in hub.models[name].items()
                ]
                if len(parts) > 4 and parts[4] == "tree":
                    return self._json(files)
                return self._json(
                    {"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": [], "downloads": 0}
                )
            content = hub.models.get("/".join(parts[:2]), {}).get("/".join(parts[4:]))
            if content is None:
                return self._json({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})
            self._send(content, 200, {"ETag": f'"{sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

        def _json(self, answer: Any, status: int = 200, more: dict[str, str] | None = None) -> None:
            self._send(json.dumps(answer).encode(), status, {"Content-Type": "application/json", **(more or {})})

        def _send(self, content: bytes, status: int, headers: dict[str, str]) -> None:
            self.send_response(status)
            for header, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(header, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            """Log nothing to standard error."""

    return Handler


@contextmanager
def run_hub() -> Iterator[Hub]:
    """Context manager: run a hub on a local port. Set `HF_ENDPOINT` to its `url`."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
