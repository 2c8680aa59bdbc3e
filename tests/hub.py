"""A stand-in for the model hub: what a push and a load ask of it, over HTTP, kept in memory."""

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
    """Models by name: file by file; and who was let in."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.asked: list[str] = []
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
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
                hub.models.setdefault(name, {})
                hub.private[name] = bool(asked.get("private") or asked.get("visibility") == "private")
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
            hub.asked.append(self.path)
            parts = self.path.split("?")[0].strip("/").split("/")
            if parts[0] == "api":
                name = "/".join(parts[2:4])
                stranger = self.headers.get("Authorization") != f"Bearer {TOKEN}"
                if name not in hub.models or (hub.private[name] and stranger):
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

        def log_message(self, *told: object) -> None:
            """Nothing on standard error."""

    return Handler


@contextmanager
def standing_in() -> Iterator[Hub]:
    """A hub on a port of this machine; `HF_ENDPOINT` names its `url`."""
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
