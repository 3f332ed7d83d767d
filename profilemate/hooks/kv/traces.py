# SPDX-License-Identifier: Apache-2.0
"""Which trace of OpenTelemetry's does a request belong to?

A client that traces its calls sends the header ``traceparent`` of W3C's Trace Context. vLLM hands
it on to the engine where it was started with ``--otlp-traces-endpoint``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from profilemate.format.events import SPAN_ID, TRACE_ID

# A version after 00 may append more.
_PARENT = re.compile(
    rf"[ \t]*(?:00-({TRACE_ID})-({SPAN_ID})-[0-9a-f]{{2}}"
    rf"|(?!ff|00)[0-9a-f]{{2}}-({TRACE_ID})-({SPAN_ID})-[0-9a-f]{{2}}(?:-.*)?)[ \t]*"
)


def parent(headers: Mapping[str, str]) -> tuple[str, str] | None:
    """The ids of the trace and of the span above, in lower-case hexadecimal digits; None where the
    headers name none. It raises nothing: a client writes these headers.

    >>> parent({"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
    ('0af7651916cd43dd8448eb211c80319c', 'b7ad6b7169203331')
    """
    try:
        match = _PARENT.fullmatch(headers["traceparent"])
    except (KeyError, TypeError):
        return None
    if match is None:
        return None
    trace, span = match[1] or match[3], match[2] or match[4]
    return (trace, span) if trace.strip("0") and span.strip("0") else None
