# SPDX-License-Identifier: Apache-2.0
"""Do vLLM's own metrics and the session agree, and if not, why?

``page`` reads a page of vLLM's ``/metrics``, and ``beside`` compares it with the session's tables.
"""

from __future__ import annotations

from analysis.engine_metrics.beside import Reconciliation, reconcile
from analysis.engine_metrics.figures import Part, Row
from analysis.engine_metrics.page import Page, parse

__all__ = ["Page", "Part", "Reconciliation", "Row", "parse", "reconcile"]
