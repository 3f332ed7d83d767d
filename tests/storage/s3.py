# SPDX-License-Identifier: Apache-2.0
"""A server that speaks S3's protocol, and something in front of it that drops connections."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

BUCKET = "bucket"
SECRET = "a-secret-of-this-test"
_SERVER = """
import time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
while True:
    time.sleep(60)
"""


@dataclass
class Front:
    """Hands requests on. ``drops``: of the next so many answers with content of an object, half is
    sent. ``refuses``: the next so many requests are cut off before an answer. ``sent``: bytes of
    bodies that were handed on whole; ``seen``: the method and path of each request."""

    target: int
    drops: int = 0
    refuses: int = 0
    sent: int = 0
    seen: list[tuple[str, str]] = field(default_factory=list)
    port: int = 0


@contextmanager
def front(target: int) -> Iterator[Front]:
    """Such a front, on a port of its own."""
    known = Front(target)
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_any(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size) if size else None
            with lock:
                known.seen.append((self.command, self.path))
                is_refused = known.refuses > 0
                known.refuses -= is_refused
            if is_refused:
                self.close_connection = True
                self.connection.close()
                return
            asked = http.client.HTTPConnection("127.0.0.1", known.target, timeout=60)
            asked.request(self.command, self.path, body, dict(self.headers))
            answer = asked.getresponse()
            content = answer.read()
            with lock:
                is_object = self.command == "GET" and "list-type=" not in self.path
                is_dropped = is_object and len(content) > 512 and known.drops > 0
                known.drops -= is_dropped
                known.sent += 0 if is_dropped else len(content)
            self.send_response_only(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = answer.getheader("Content-Length") if self.command == "HEAD" else len(content)
            self.send_header("Content-Length", str(length or 0))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2] if is_dropped else content)
            if is_dropped:
                self.wfile.flush()
                self.close_connection = True
                self.connection.close()

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_any  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    known.port = server.server_address[1]
    try:
        yield known
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def server() -> Iterator[int]:
    """The port of an S3 server on this machine, with an empty bucket.

    It is a process of its own: Flask's modules in this one would be in the way of vLLM, which looks
    into all modules that there are.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            asked = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            asked.request("PUT", f"/{BUCKET}")
            assert asked.getresponse().status == 200
            yield port
        finally:
            process.kill()


def environment(patch: pytest.MonkeyPatch, port: int) -> None:
    """What a user sets for such a server."""
    for name, value in variables(port).items():
        patch.setenv(name, value)


def variables(port: int) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "NO_PROXY": "127.0.0.1",
    }
