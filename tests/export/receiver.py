# SPDX-License-Identifier: Apache-2.0
"""What takes spans by OTLP over HTTP, as a collector does. The official classes read them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Span:
    """A span as it came. Ids are hexadecimal digits; ``above`` is empty for the first of a trace.

    ``events``: names, times and attributes. ``resource``: what the sender says of itself.
    """

    trace: str
    id: str
    above: str
    name: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    resource: dict[str, Any]
    scope: str


def spans_of(message: Any) -> list[Span]:
    """All spans of an ExportTraceServiceRequest."""
    return [
        Span(
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.name,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _attributes(span.attributes),
            [(one.name, one.time_unix_nano, _attributes(one.attributes)) for one in span.events],
            _attributes(of_resource.resource.attributes),
            of_scope.scope.name,
        )
        for of_resource in message.resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@dataclass
class Receiver:
    """``refuses_after``: posts that it takes before it answers with 400; None for no end."""

    endpoint: str = ""
    posts: list[list[Span]] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    headers: list[dict[str, str]] = field(default_factory=list)
    refuses_after: int | None = None

    @property
    def spans(self) -> list[Span]:
        return [span for post in self.posts for span in post]

    def take(self, path: str, headers: dict[str, str], body: bytes) -> bool:
        if self.refuses_after is not None and len(self.posts) >= self.refuses_after:
            return False
        self.paths.add(path)
        self.headers.append(headers)
        self.posts.append(spans_of(ExportTraceServiceRequest.FromString(body)))
        return True


@contextmanager
def receiver(refuses_after: int | None = None) -> Iterator[Receiver]:
    """A receiver on a port of its own of this machine."""
    found = Receiver(refuses_after=refuses_after)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            taken = found.take(self.path, dict(self.headers), body)
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200 if taken else 400)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    # An HTTPServer would ask for the name of this address, which may take seconds.
    server = ThreadingTCPServer(("127.0.0.1", 0), Handler)
    found.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
