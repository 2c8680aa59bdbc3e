"""An embeddings endpoint on a local port."""

from __future__ import annotations

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread


class EmbeddingsServer:
    """A server of OpenAI's embeddings API: context manager whose value is its URL.

    Args:
        vector_of: Returns a text's vector.
    """

    def __init__(self, vector_of: Callable[[str], list[float]]) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input"]
                rows = [{"index": index, "embedding": vector_of(text)} for index, text in enumerate(texts)]
                body = json.dumps({"data": rows}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                """Log nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_port}/v1"

    def __exit__(self, *raised: object) -> None:
        self._server.shutdown()
        self._server.server_close()
