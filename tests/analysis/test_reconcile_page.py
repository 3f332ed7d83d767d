# SPDX-License-Identifier: Apache-2.0
"""Where ``reconcile`` gets vLLM's metrics from: servers, hostile ones too, and files."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from socketserver import StreamRequestHandler, TCPServer, ThreadingTCPServer

import pytest

from analysis import SessionError
from profilemate.commands import reconcile_page
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.test_engine_metrics import BEGAN, lookups, page


@pytest.fixture
def session(tmp_path: Path) -> SessionBuilder:
    return SessionBuilder(tmp_path / "session")


@contextmanager
def server(content: str) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/metrics"
        finally:
            http.shutdown()
            thread.join()


@contextmanager
def raw_server(answer: bytes) -> Iterator[str]:
    """Sends these bytes, whatever they are, and closes."""

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(answer)

    with TCPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_address[1]}/metrics"
        finally:
            listening.shutdown()
            thread.join()


WHOLE = page(prefix_cache_queries_total=150).encode()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "SSH-2.0-OpenSSH"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n" + WHOLE, "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "IncompleteRead"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"# x" * (1 << 19), "the page has more than 1 MiB"),
    ],
    ids=["no HTTP", "cut off", "no chunks", "too long"],
)
def test_a_page_that_is_not_whole_is_refused(
    session: SessionBuilder, answer: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part that arrived could be read as a page with other figures."""
    monkeypatch.setattr(reconcile_page, "LARGEST_BYTES", 1 << 20)
    lookups(session)
    with raw_server(answer) as url:
        done = invoke("reconcile", session.folder, "--metrics-url", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"profilemate: cannot get {url}: ")
    assert said in done.stderr


def test_a_missing_page_is_one_line(session: SessionBuilder) -> None:
    lookups(session)
    with raw_server(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n") as url:
        done = invoke("reconcile", session.folder, "--metrics-url", url)
    says = f"cannot get {url}: the server answers 404 Not Found; give the URL of its metrics"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"profilemate: {says}\n")


STATUS = b"HTTP/1.1 200 OK\r\n"


@contextmanager
def scripted(*answers: Iterable[bytes]) -> Iterator[tuple[str, list[bytes]]]:
    """Answers the first request with the first answer, piece by piece; and what was asked."""
    asked: list[bytes] = []
    left = list(answers)

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                asked.append(line.strip())
            with suppress(OSError):
                for piece in left.pop(0) if left else ():
                    self.wfile.write(piece)

    class Server(ThreadingTCPServer):
        daemon_threads = True
        block_on_close = False

    with Server(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"127.0.0.1:{listening.server_address[1]}", asked
        finally:
            listening.shutdown()
            thread.join()


def endless(*pieces: bytes) -> Iterator[bytes]:
    """The pieces, and then the last one again and again."""
    yield from pieces
    for _ in range(1_000):
        time.sleep(0.02)
        yield pieces[-1]


@pytest.mark.parametrize(
    "pieces",
    [
        (b"H",),
        (STATUS, b"X"),
        (STATUS, b"X-Header: 1\r\n"),
        (b"HTTP/1.1 100 Continue\r\n\r\n",),
        (STATUS + b"Content-Length: 9999\r\n\r\n", b"#"),
        (STATUS + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n#\r\n"),
        (STATUS + b"Transfer-Encoding: chunked\r\n\r\n", b"0"),
        (b"",),
    ],
    ids=["status", "header", "headers", "continue", "body", "chunks", "size", "nothing"],
)
def test_a_server_that_takes_its_time_is_given_up(
    session: SessionBuilder, pieces: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it spreads its bytes: each comes long before a socket's own limit."""
    monkeypatch.setattr(reconcile_page, "ANSWER_SEC", 0.3)
    with scripted(endless(*pieces)) as (host, _):
        began = time.monotonic()
        with pytest.raises(SessionError) as caught:
            reconcile_page.scraped(f"http://{host}/metrics")
    said = str(caught.value)
    # Too many header lines end it before.
    assert "it takes longer than 0.3 s" in said or "more than 100 headers" in said
    assert time.monotonic() - began < 5


def found_at(place: str) -> list[bytes]:
    return [
        b"HTTP/1.1 307 Temporary Redirect\r\nContent-Length: 0\r\nLocation: ",
        place.encode(),
        b"\r\n\r\n",
    ]


def test_a_server_sends_on_within_itself_alone(session: SessionBuilder) -> None:
    lookups(session)
    whole = [STATUS + b"\r\n" + page(prefix_cache_queries_total=150).encode()]
    with scripted(found_at("/metrics/"), whole) as (host, asked):
        done = invoke("reconcile", session.folder, "--metrics-url", f"http://{host}/metrics")
    assert (done.returncode, done.stderr) == (0, "")
    assert asked[0].startswith(b"GET /metrics HTTP")
    assert any(line.startswith(b"GET /metrics/ HTTP") for line in asked)
    with scripted(whole) as (elsewhere, reached):
        for place in (
            f"http://{elsewhere}/metrics",
            f"//{elsewhere}/metrics",
            "file:///etc/passwd",
            "ftp://u:s3cret@host/x?token=s3cret",
            f"http://u:s3cret@{elsewhere}/\x1b[31m",
        ):
            with scripted(found_at(place)) as (host, _):
                done = invoke("reconcile", session.folder, "--metrics-url", f"http://{host}/m")
            assert (done.returncode, done.stdout) == (2, "")
            (line,) = done.stderr.splitlines()
            assert line.startswith(f"profilemate: cannot get http://{host}/m: the server sends on")
            assert "s3cret" not in line
            assert line.isprintable()
        assert reached == []
    with scripted(*[found_at("/again")] * 9) as (host, asked):
        done = invoke("reconcile", session.folder, "--metrics-url", f"http://{host}/m")
    assert "sends on more than 5 times" in done.stderr
    assert sum(line.startswith(b"GET ") for line in asked) == 6


def test_a_url_is_shown_without_its_secrets(session: SessionBuilder) -> None:
    lookups(session)
    whole = [STATUS + b"\r\n" + page(prefix_cache_queries_total=150).encode()]
    with scripted(whole, [b"HTTP/1.1 403 No \x1b]0;x\x07 \x9b1m\r\n\r\n"], [b"\x1b[2J s3\r\n"]) as (
        host,
        asked,
    ):
        url = f"http://me:s3cret%40@{host}/metrics?token=s3cret&x#s3cret"
        plain = f"http://{host}/metrics?token=***&x=***"
        done = invoke("reconcile", session.folder, "--metrics-url", url, "--json")
        assert json.loads(done.stdout)["source"] == plain
        # Base 64 of me:s3cret@
        assert b"Authorization: Basic bWU6czNjcmV0QA==" in asked
        for says in ("the server answers 403 No", "\\x1b[2J s3"):
            done = invoke("reconcile", session.folder, "--metrics-url", url)
            assert (done.returncode, done.stdout) == (2, "")
            (line,) = done.stderr.splitlines()
            assert line.startswith(f"profilemate: cannot get {plain}: ")
            assert says in line
            assert line.isprintable()
    for url in ("http://me:s3cret@/x", "ftp://me:s3cret@host/", "http://me:s3cret@host:port/"):
        done = invoke("reconcile", session.folder, "--metrics-url", url)
        assert done.returncode == 2
        assert "is not a URL" in done.stderr
        assert "s3cret" not in done.stderr


def test_the_command(session: SessionBuilder, tmp_path: Path) -> None:
    lookups(session)
    content = page(prefix_cache_queries_total=150, prefix_cache_hits_total=40)
    with server(content) as url:
        done = invoke("reconcile", session.folder, "--metrics-url", url)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert done.returncode == 1
    assert "prefix_cache_queries 150 150 equal" in lines
    assert "prefix_cache_hits 40 32 unexplained" in lines
    assert "+8 unexplained" in lines
    assert lines[-1] == "Not explained: prefix_cache_hits."
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    saved = tmp_path / "metrics.txt"
    saved.write_text(content.replace(" 40", " 32"))
    os.utime(saved, (BEGAN + 20, BEGAN + 20))
    done = invoke("reconcile", session.folder, "--metrics-file", saved, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["agrees"] is True


def test_an_input_that_cannot_be_read_is_one_line(session: SessionBuilder, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(reconcile_page.LARGEST_BYTES + 1)
    for options, said in (
        ([], "give either --metrics-url URL or --metrics-file FILE"),
        (["--metrics-file", tmp_path / "none"], "cannot read"),
        (["--metrics-file", tmp_path / "pipe"], "is not a regular file"),
        (["--metrics-file", tmp_path / "large"], "has more than 64 MiB"),
        (["--metrics-url", "localhost:8000"], "is not a URL"),
        (["--metrics-url", "http://local host:8000"], "is not a URL"),
        (["--metrics-url", "file:///etc/hostname"], "is not a URL"),
        (["--metrics-url", "ftp://127.0.0.1/metrics"], "is not a URL"),
        (["--metrics-url", "http://[::1/metrics"], "is not a URL"),
        (["--metrics-url", "http:///metrics"], "is not a URL"),
        (["--metrics-url", "http://127.0.0.1:1/metrics"], "is the server running?"),
    ):
        done = invoke("reconcile", session.folder, *options)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert said in done.stderr
