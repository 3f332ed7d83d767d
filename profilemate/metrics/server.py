# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for one page of metrics, in one daemon thread.

It shows numbers to whoever may connect, so what a client can cost is bounded. Sockets never block,
so a slow client holds up nobody. There are at most ``MAX_CONNECTIONS``; where one more comes, the
oldest goes. Each has ``TIMEOUT_SEC`` for its request and the answer, a request has at most
``MAX_REQUEST`` bytes, and a page is rendered once for all who ask for it.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from profilemate.format.totals import RunTotals
from profilemate.metrics import exposition

MAX_CONNECTIONS = 8
BACKLOG = 128
"""Clients that the system lets wait to be accepted."""
MAX_REQUEST = 8192
TIMEOUT_SEC = 5.0
PAUSE_SEC = 1.0
"""How long nothing is accepted where that has failed, as without a free descriptor."""

Address = tuple[str, int]

_INDEX = b"profilemate: the metrics are at /metrics\n"
_PLAIN = "text/plain; charset=utf-8"


@dataclass
class _Connection:
    socket: socket.socket
    deadline: float
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview | None = None


class Server:
    """Listens at an address until the process ends.

    Raises:
        OSError: the address cannot be used.

    """

    def __init__(self, address: Address, found: RunTotals) -> None:
        self._found = found
        self._pages: tuple[RunTotals, dict[bool, bytes]] = (found, {})
        self._connections: list[_Connection] = []
        self._listener = _listener(address)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="metrics", daemon=True).start()

    def show(self, found: RunTotals) -> None:
        """Hand these figures out from now on."""
        self._found = found

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(PAUSE_SEC if self._connections else None):
                if key.data is None:
                    self._accept()
                else:
                    self._serve(key.data)
            now = time.monotonic()
            for connection in [known for known in self._connections if known.deadline < now]:
                self._drop(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except OSError:
            time.sleep(PAUSE_SEC)
            return
        accepted.setblocking(False)
        if len(self._connections) >= MAX_CONNECTIONS:
            self._drop(self._connections[0])
        connection = _Connection(accepted, time.monotonic() + TIMEOUT_SEC)
        self._connections.append(connection)
        self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _serve(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return  # It was dropped in this very round.
        try:
            if connection.answer is None:
                self._read(connection)
            else:
                self._write(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        received = connection.socket.recv(MAX_REQUEST)
        connection.request += received
        request = bytes(connection.request)
        is_whole = b"\r\n\r\n" in request or b"\n\n" in request
        if len(request) > MAX_REQUEST:
            connection.answer = memoryview(_response("431 Request Header Fields Too Large", b""))
        elif is_whole:
            connection.answer = memoryview(self._answer(request))
        elif not received:
            self._drop(connection)
            return
        else:
            return
        self._selector.modify(connection.socket, selectors.EVENT_WRITE, connection)

    def _write(self, connection: _Connection) -> None:
        assert connection.answer is not None
        sent = connection.socket.send(connection.answer)
        connection.answer = connection.answer[sent:]
        if not connection.answer:
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _answer(self, request: bytes) -> bytes:
        first, _, rest = request.partition(b"\n")
        match first.split():
            case [b"GET", target, version] if version.startswith(b"HTTP/1."):
                path = target.partition(b"?")[0]
            case [method, _, version] if method.isalpha() and version.startswith(b"HTTP/"):
                return _response("405 Method Not Allowed", b"", more="Allow: GET\r\n")
            case _:
                return _response("400 Bad Request", b"")
        if path == b"/":
            return _response("200 OK", _INDEX)
        if path != b"/metrics":
            return _response("404 Not Found", b"")
        try:
            return self._page(as_openmetrics=b"application/openmetrics-text" in rest.lower())
        except Exception:
            return _response("500 Internal Server Error", b"")

    def _page(self, *, as_openmetrics: bool) -> bytes:
        found = self._found
        of, pages = self._pages
        if of is not found:
            pages = {}
            self._pages = (found, pages)
        if as_openmetrics not in pages:
            pages[as_openmetrics] = _response(
                "200 OK",
                exposition.render(found, as_openmetrics=as_openmetrics),
                exposition.content_type(as_openmetrics=as_openmetrics),
            )
        return pages[as_openmetrics]


def _listener(address: Address) -> socket.socket:
    host, port = address
    host = "127.0.0.1" if host == "localhost" else host
    (family, *_, resolved), *_ = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port that a server used a moment ago can be used again.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(resolved)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener


def _response(status: str, body: bytes, kind: str = _PLAIN, more: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        f"{more}Connection: close\r\nX-Content-Type-Options: nosniff\r\n\r\n"
    )
    return head.encode() + body
