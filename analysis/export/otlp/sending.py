# SPDX-License-Identifier: Apache-2.0
"""Send spans to a collector, by OTLP over HTTP.

What the exporter of OpenTelemetry reads from the environment holds: headers, certificates,
compression and how long it tries (``OTEL_EXPORTER_OTLP_…``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from analysis.errors import SessionError
from analysis.export.otlp.spans import Batch


def send(batches: Iterable[Batch], endpoint: str) -> int:
    """Send the spans; returns of how many requests they are.

    Raises:
        SessionError: the collector took no more. It says from which time on spans are missing.

    """
    requests = 0
    exporter = OTLPSpanExporter(endpoint=endpoint)
    with _said_by_exporter() as said:
        try:
            for batch in batches:
                if exporter.export(batch.spans) is not SpanExportResult.SUCCESS:
                    raise SessionError(
                        f"cannot send spans to {without_user(endpoint)}: {_reason(said)}; "
                        f"{_taken(requests, batch)}"
                    )
                requests += batch.requests
        finally:
            exporter.shutdown()
    return requests


def _taken(requests: int, missing: Batch) -> str:
    if not requests:
        return "it took none"
    return (
        f"it took those of {requests:,} requests; go on with --window {missing.begin_sec:.6f}s:, "
        "as spans that come twice are the same"
    )


def without_user(endpoint: str) -> str:
    """The address without a name and a password."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


@contextmanager
def _said_by_exporter() -> Iterator[list[logging.LogRecord]]:
    """What the exporter logs meanwhile, which nobody else sees."""
    said: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record)

    logger, kept = logging.getLogger("opentelemetry"), Kept()
    logger.addHandler(kept)
    others, logger.propagate = logger.propagate, False
    try:
        yield said
    finally:
        logger.removeHandler(kept)
        logger.propagate = others


def _reason(said: list[logging.LogRecord]) -> str:
    """Why it failed: what the last line with a reason says."""
    for record in reversed(said):
        values = record.args if isinstance(record.args, tuple) else ()
        for value in values:
            if isinstance(value, Exception):
                return _of_exception(value)
        if record.msg.startswith("Failed to export %s batch code"):
            return " ".join(str(value) for value in values[1:])
        if record.msg.startswith("Transient error"):
            return str(values[0])
    return "it did not answer in time"


def _of_exception(error: BaseException) -> str:
    """The system's words for it, where it is an error of the system's."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        reason = getattr(cause, "reason", None)
        cause = (
            reason if isinstance(reason, BaseException) else cause.__cause__ or cause.__context__
        )
    return type(error).__name__
