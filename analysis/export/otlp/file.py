# SPDX-License-Identifier: Apache-2.0
"""Spans as a file of OTLP's JSON: a line for each batch, as the collector's receiver
``otlpjsonfile`` reads them."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Iterable
from typing import Any, BinaryIO

import orjson
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from analysis.export.otlp.spans import Batch

_IDS = ("traceId", "spanId", "parentSpanId")


def write(batches: Iterable[Batch], file: BinaryIO) -> int:
    """Write the spans; returns of how many requests they are."""
    requests = 0
    for batch in batches:
        message = MessageToDict(encode_spans(batch.spans), use_integers_for_enums=True)
        file.write(orjson.dumps(_with_plain_ids(message)) + b"\n")
        requests += batch.requests
    return requests


def _with_plain_ids(message: dict[str, Any]) -> dict[str, Any]:
    """OTLP wants ids as hexadecimal digits, where protobuf's JSON has base64."""
    for of_resource in message["resourceSpans"]:
        for of_scope in of_resource["scopeSpans"]:
            for span in of_scope["spans"]:
                for name in _IDS:
                    if name in span:
                        span[name] = b64decode(span[name]).hex()
    return message
