# SPDX-License-Identifier: Apache-2.0
"""The metrics' server: what it answers, and what clients cannot do to it."""

from __future__ import annotations

import http.client
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from profilemate.collector.endpoint import Endpoint
from profilemate.format.totals import RunTotals
from profilemate.metrics import exposition, server
from profilemate.metrics.server import MAX_CONNECTIONS, MAX_REQUEST, Address, Server
from tests.metrics.stories import recorded, totals_of
from tests.metrics.text import values

QUICK_SEC = 2.0
PATIENCE_SEC = 60.0


def free_address() -> Address:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        host, port = probe.getsockname()
    return host, port


@pytest.fixture(scope="module")
def totals(tmp_path_factory: pytest.TempPathFactory) -> RunTotals:
    return totals_of(recorded(tmp_path_factory.mktemp("metrics")))


@pytest.fixture(scope="module")
def address(totals: RunTotals) -> Address:
    where = free_address()
    Server(where, totals)
    return where


def get(address: Address, path: str = "/metrics", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(*address, timeout=QUICK_SEC)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def said(address: Address, request: bytes) -> bytes:
    """All that comes back for these bytes; nothing where the connection was closed before."""
    try:
        with socket.create_connection(address, timeout=PATIENCE_SEC) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))
    except OSError:
        return b""


def check_answers(address: Address, totals: RunTotals) -> None:
    """A scrape is whole, and quick."""
    began = time.monotonic()
    response = get(address)
    assert response.status == 200
    assert response.read() == exposition.render(totals)
    assert time.monotonic() - began < QUICK_SEC


def test_pages(address: Address, totals: RunTotals) -> None:
    check_answers(address, totals)
    index = get(address, "/")
    assert (index.status, index.read()) == (200, b"profilemate: the metrics are at /metrics\n")
    assert get(address, "/metrics?x=1").status == 200
    assert get(address, "/metrics/x").status == 404
    prometheus = get(address, Accept="application/openmetrics-text;version=1.0.0,text/plain;q=0.5")
    assert (prometheus.getheader("Content-Type") or "").startswith("application/openmetrics-text")
    text = prometheus.read().decode()
    assert text.endswith("# EOF\n")
    assert values(text, as_openmetrics=True).keys() >= {("profilemate_session_ended", frozenset())}


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"POST /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /metrics\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/2\r\n\r\n", b"405"),
        (b"\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\n\n", b"400"),
        (b"GET /../../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /" + b"x" * MAX_REQUEST, b"431"),
    ],
)
def test_nothing_else_is_answered(
    address: Address, totals: RunTotals, request_line: bytes, status: bytes
) -> None:
    assert said(address, request_line).split()[1:2] == [status]
    check_answers(address, totals)


def test_garbage(address: Address, totals: RunTotals) -> None:
    chance = random.Random(1)
    for _ in range(300):
        said(address, chance.randbytes(chance.randrange(200)) + b"\n\n" * chance.randrange(2))
    check_answers(address, totals)


def test_slow_clients_hold_nobody_up(address: Address, totals: RunTotals) -> None:
    """More of them than there are connections: some send nothing, some half a request, and some
    ask and read no answer."""
    with ExitStack() as stack:
        for number in range(3 * MAX_CONNECTIONS):
            slow = stack.enter_context(socket.create_connection(address))
            if number % 3:
                slow.sendall(b"GET /metrics HTTP/1.1\r\n" + b"\r\n" * (number % 3 == 2))
        check_answers(address, totals)


def test_there_are_never_more_than_a_few_connections(address: Address, totals: RunTotals) -> None:
    """The oldest are closed."""
    with ExitStack() as stack:
        clients = [
            stack.enter_context(socket.create_connection(address, timeout=PATIENCE_SEC))
            for _ in range(3 * MAX_CONNECTIONS)
        ]
        for client in clients[:-MAX_CONNECTIONS]:
            assert client.recv(1) == b""
        for client in clients[-MAX_CONNECTIONS:]:
            client.settimeout(0.05)
            assert is_open(client)


def is_open(connection: socket.socket) -> bool:
    """Whether it takes another byte, and has not been closed."""
    try:
        connection.sendall(b"x")
        return connection.recv(1) != b""
    except TimeoutError:
        return True
    except ConnectionError:
        return False


def test_a_client_has_so_long_and_no_longer(
    totals: RunTotals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "TIMEOUT_SEC", 0.3)
    monkeypatch.setattr(server, "PAUSE_SEC", 0.1)
    where = free_address()
    Server(where, totals)
    with socket.create_connection(where, timeout=QUICK_SEC) as slow:
        began = time.monotonic()
        slow.settimeout(0.05)
        # A byte at a time does not make it longer.
        while is_open(slow) and time.monotonic() - began < QUICK_SEC:
            pass
        assert 0.2 < time.monotonic() - began < QUICK_SEC
    check_answers(where, totals)


def test_a_hundred_connections_at_once(address: Address, totals: RunTotals) -> None:
    """Each is answered, or closed since others came after it; never more threads, and the next
    scrape is whole."""
    threads = threading.active_count()
    most: list[int] = []

    def ask(_: int) -> int:
        most.append(sum(thread.name == "metrics" for thread in threading.enumerate()))
        return said(address, b"GET /metrics HTTP/1.1\r\n\r\n").count(b"200 OK")

    with ThreadPoolExecutor(100) as pool:
        answered = sum(pool.map(ask, range(100)))
    assert answered > 0
    assert len({*most}) == 1
    # Those of earlier tests may end meanwhile.
    assert threading.active_count() <= threads
    check_answers(address, totals)


def test_new_figures_are_served_from_then_on(totals: RunTotals) -> None:
    where = free_address()
    serving = Server(where, totals)
    check_answers(where, totals)
    changed = {**totals, "ended": not totals["ended"]}
    serving.show(changed)  # type: ignore[arg-type]
    check_answers(where, changed)  # type: ignore[arg-type]


@pytest.fixture
def taken() -> Iterator[tuple[Address, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        host, port = other.getsockname()
        yield (host, port), other


def test_a_port_in_use_is_one_line_until_it_is_free(
    totals: RunTotals,
    taken: tuple[Address, socket.socket],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("profilemate.collector.endpoint.RETRY_SEC", 0.0)
    where, other = taken
    endpoint = Endpoint(where)
    for _ in range(3):
        endpoint.show(totals)
    (line,) = capfd.readouterr().err.splitlines()
    shown = f"{where[0]}:{where[1]}"
    assert line == (
        f"no metrics: {shown} cannot be used (Address already in use); the session is recorded"
    )
    assert endpoint.state() == {
        "address": shown,
        "problem": f"{shown} cannot be used (Address already in use)",
    }
    other.close()
    endpoint.show(totals)
    assert endpoint.state() == {"address": shown, "problem": None}
    check_answers(where, totals)


def test_without_prometheus_client_there_is_one_line(
    totals: RunTotals, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("profilemate.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    endpoint = Endpoint(free_address())
    for _ in range(3):
        endpoint.show(totals)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("no metrics: prometheus-client cannot be imported for ")


def test_nothing_is_bound_unless_asked(totals: RunTotals) -> None:
    endpoint = Endpoint(None)
    endpoint.show(totals)
    assert endpoint.state() is None
    assert endpoint._server is None
