"""A real S3-compatible server (moto's), and a proxy in front of it that refuses requests on demand."""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread

from tests.ports import free_port

BUCKET = "bucket"
RUNS, CACHE = f"s3://{BUCKET}/runs", f"s3://{BUCKET}/cache"
IN_THE_BUCKET = (f"storage.runs={RUNS}", f"storage.cache={CACHE}")
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "SentinelOfTheBucket", "AWS_SECRET_ACCESS_KEY": "SentinelOfItsSecret"}
"""moto accepts any credentials; nothing that is stored or printed may contain these."""


def environment(port: int, mirror: Path, host: str = "127.0.0.1") -> dict[str, str]:
    """Environment variables to use the server at a port, with a separate folder of mirrors."""
    return {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "2",
        "DISTCSE_MIRROR": str(mirror),
        **CREDENTIALS,
    }


@dataclass
class Server:
    """moto's server as a process, with one bucket."""

    port: int
    process: subprocess.Popen[bytes]

    def objects(self) -> dict[str, bytes]:
        """Return all objects by key, read with pyarrow."""
        return {key: self.read(key) for key in self.stored()}

    def stored(self) -> list[str]:
        """Return the keys of all objects, without markers of empty folders."""
        from pyarrow import fs

        selector = fs.FileSelector(BUCKET, recursive=True)
        found = _system(self.port).get_file_info(selector)
        return [entry.path.removeprefix(f"{BUCKET}/") for entry in found if entry.type == fs.FileType.File]

    def read(self, key: str) -> bytes:
        """Return an object's content."""
        content: bytes = _system(self.port).open_input_stream(f"{BUCKET}/{key}").read()
        return content

    def write(self, key: str, content: bytes) -> None:
        """Write an object without distcse, as another program would."""
        with _system(self.port).open_output_stream(f"{BUCKET}/{key}") as out:
            out.write(content)

    def delete(self, key: str) -> None:
        """Delete an object without distcse, as another program would."""
        _system(self.port).delete_file(f"{BUCKET}/{key}")


def _system(port: int):  # type: ignore[no-untyped-def]
    from pyarrow import fs

    keys = {"access_key": "other", "secret_key": "other", "region": "us-east-1"}
    patience = {"connect_timeout": 60, "request_timeout": 60}
    return fs.S3FileSystem(endpoint_override=f"http://127.0.0.1:{port}", **keys, **patience)


@contextmanager
def serving(log: Path, port: int | None = None, host: str = "127.0.0.1") -> Iterator[Server]:
    """Context manager: run the server, which listens at a host's addresses. Skips the test if moto is not installed."""
    import pytest

    pytest.importorskip("moto", reason="moto's server is not installed: pip install 'moto[s3]' flask flask-cors")
    port = port or free_port()
    environ = {**os.environ, **CREDENTIALS}
    with open(log, "wb") as out:
        command = [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)
    try:
        _wait(port, process)
        bucket = urllib.request.Request(f"http://127.0.0.1:{port}/{BUCKET}", method="PUT")
        urllib.request.urlopen(bucket, timeout=60).close()
        yield Server(port, process)
    finally:
        process.kill()
        process.wait()


@contextmanager
def emulating_google(log: Path) -> Iterator[int]:
    """Context manager: run an emulator of Google Cloud Storage with one bucket, and yield its port.

    Skips the test if the emulator is not installed.
    """
    import pytest

    pytest.importorskip(
        "gcp_storage_emulator", reason="gcp-storage-emulator is not installed: pip install gcp-storage-emulator"
    )
    port = free_port()
    command = [sys.executable, "-m", "gcp_storage_emulator", "start", "--host", "127.0.0.1", "--port", str(port)]
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*command, "--in-memory", "--default-bucket", BUCKET], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        _wait(port, process)
        yield port
    finally:
        process.kill()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None, "the server ended"
            time.sleep(0.05)
    raise AssertionError("the server does not answer")


@dataclass
class Gate:
    """Forwards requests to the server, except those to refuse."""

    port: int
    server_port: int
    refuses: Callable[[str, str], tuple[int, str] | None] = field(default=lambda method, path: None)
    """Maps a request's method and path to None (forward it), or to the status and code of an S3 error. Status 0 closes the
    connection."""
    changes: list[str] = field(default_factory=list)
    """Forwarded changes: `PUT /bucket/key`, `DELETE /bucket/key`."""
    lock: Lock = field(default_factory=Lock)

    def refuse_from(self, number: int, status: int = 403, code: str = "AccessDenied") -> None:
        """Forward the given number of changes from now on, then refuse all."""
        self.changes.clear()

        def refuses(method: str, path: str) -> tuple[int, str] | None:
            return (status, code) if method != "GET" and method != "HEAD" and len(self.changes) >= number else None

        self.refuses = refuses

    def open(self) -> None:
        """Forward all requests from now on."""
        self.refuses = lambda method, path: None


@contextmanager
def gated(server: Server) -> Iterator[Gate]:
    """Context manager: run a gate in front of the server."""
    gate = Gate(0, server.port)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _handle(self) -> None:
            body = self._body()
            with gate.lock:  # one request after the other, so that changes are counted in order
                refused = gate.refuses(self.command, self.path)
                if refused is None:
                    status, headers, content = self._forward(body)
                    if self.command in ("PUT", "DELETE", "POST"):
                        gate.changes.append(f"{self.command} {self.path}")
                else:
                    status, code = refused
                    if not status:
                        self.close_connection = True
                        self.connection.close()
                        return
                    content = f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode()
                    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(content)))]
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", gate.server_port, timeout=30)
            request_headers = {
                k: v
                for k, v in self.headers.items()
                if k.lower() not in ("transfer-encoding", "expect", "content-length")
            }
            connection.request(self.command, self.path, body, request_headers)
            answer = connection.getresponse()
            content = answer.read()
            dropped = ("connection", "transfer-encoding", "content-length", "date", "server")
            headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in dropped]
            length = answer.getheader("Content-Length") if self.command == "HEAD" else None
            connection.close()
            return answer.status, [*headers, ("Content-Length", length or str(len(content)))], content

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _handle

        def log_message(self, format: str, *arguments: object) -> None:
            """Log nothing."""

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    gate.port = proxy.server_address[1]
    thread = Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield gate
    finally:
        proxy.shutdown()
        proxy.server_close()
