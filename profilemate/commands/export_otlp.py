# SPDX-License-Identifier: Apache-2.0
"""``profilemate export otlp``: a session as spans for OpenTelemetry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from analysis.errors import RuleError
from profilemate.commands.shared.exported import RequestsOption, WindowOption, part_of
from profilemate.commands.shared.files import writable, written
from profilemate.commands.shared.options import Period, SessionArgument, output_file
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show_line

FILE = "spans.otlp.jsonl"
_PATH = "/v1/traces"


def address(text: str) -> str:
    """The address that takes traces. Of an address without a path it is the usual one.

    >>> address("http://127.0.0.1:4318")
    'http://127.0.0.1:4318/v1/traces'
    """
    try:
        parts = urlsplit(str(text))
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        known = False
    if not known:
        # It is not quoted, as a password may stand in it.
        raise typer.BadParameter("it is no address; write http://127.0.0.1:4318")
    return parts.geturl() if parts.path.strip("/") else parts._replace(path=_PATH).geturl()


@dataclass(frozen=True)
class OtlpOptions:
    session: SessionArgument = None
    output: Annotated[Path | None, output_file("A file of OTLP's JSON.", FILE)] = None
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="URL",
            parser=address,
            help="Send the spans there, and write no file: a collector's address for OTLP over "
            "HTTP, such as http://127.0.0.1:4318.",
            show_default=False,
        ),
    ] = None
    window: WindowOption = None
    requests: RequestsOption = None
    period: Period = None


def otlp(options: OtlpOptions) -> int:
    """Write or send a session's requests as OpenTelemetry's spans.

    They go to a file, or with --endpoint to a collector.

    Each request that ended is a span with its phases below it: queued, prefill, decode, preempted.
    It joins the trace that its client put it into (traceparent), beside vLLM's own span; any other
    request is a trace of its own. It holds no prompt and no answer.

    Headers, certificates and how long to try come from the environment, as OpenTelemetry has it:
    OTEL_EXPORTER_OTLP_HEADERS and others.

    \b
    Examples:
      profilemate export otlp           the newest session, into its folder
      profilemate export otlp ~/runs --endpoint http://127.0.0.1:4318
      profilemate export otlp --window 10s:20s -o slow.jsonl

    \b
    Exit codes:
      0   done; the last line is the file's path, or says what was sent
      2   no such session or request, the session cannot be read, the file
          cannot be written, the collector took not all, or a wrong option
    """
    if options.output is not None and options.endpoint is not None:
        raise RuleError("-o FILE writes, and --endpoint URL sends; give one of them")
    from analysis import open_session
    from analysis.export import otlp as spans

    with status("opening the session"):
        session = open_session(options.session, period=options.period)
    part = part_of(options.window, options.requests)
    if options.endpoint is not None:
        with status("sending spans"):
            sent = spans.send(spans.batches(session, part), options.endpoint)
        show_line(f"sent the spans of {sent:,} requests")
        return 0
    path = options.output or session.outputs / FILE
    target = writable(path, "-o")
    with status("writing spans"), written(target) as file:
        spans.write(spans.batches(session, part), file)
    show_line(str(path))
    return 0
