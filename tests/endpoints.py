"""Embeddings endpoints on a local port."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any


@dataclass(frozen=True)
class Reply:
    """Answer of an endpoint: its text, status and further headers."""

    text: str
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


def reply_with(vectors: Iterable[Sequence[float]], in_order: bool = True) -> Reply:
    """Return the answer of OpenAI's embeddings API, whose entries may be in another order than the texts."""
    entries = [{"index": number, "embedding": list(vector)} for number, vector in enumerate(vectors)]
    return Reply(json.dumps({"data": entries if in_order else entries[::-1]}))


@contextmanager
def open_endpoint(
    answer: Callable[[dict[str, Any], Message], Reply], certificate: Path | None = None, paths: list[str] | None = None
) -> Iterator[str]:
    """Context manager: serve on a local port, with a thread for each request; yield the endpoint's base address.

    Args:
        answer: Maps a request's JSON, empty if there is none, and its headers to the answer.
        certificate: File of a certificate with its key, to serve https. Default: http.
        paths: Gets the path and query of each request.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            if paths is not None:
                paths.append(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reply = answer(json.loads(body or b"{}"), self.headers)
            self.send_response(reply.status)
            for name, value in {"Content-Length": str(len(reply.text.encode())), **reply.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(reply.text.encode())

        do_GET = do_POST

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Print nothing where a client refuses the certificate."""

    with Server(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        Thread(target=server.serve_forever, args=[0.01], daemon=True).start()
        yield f"http{'s' if certificate else ''}://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
