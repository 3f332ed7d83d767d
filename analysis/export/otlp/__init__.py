# SPDX-License-Identifier: Apache-2.0
"""A session as spans for OpenTelemetry: each request, with its phases, and whom it lost blocks to.

Spans are made, and sent or written, in batches. Only the times of the requests that ended, and who
took blocks of whom, are in memory.
"""

from __future__ import annotations

from analysis.export.otlp.file import write
from analysis.export.otlp.sending import send
from analysis.export.otlp.spans import Batch, batches

__all__ = ["Batch", "batches", "send", "write"]
