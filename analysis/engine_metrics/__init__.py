# SPDX-License-Identifier: Apache-2.0
"""Do vLLM's own metrics agree with the session, and if not, why?

``page`` reads vLLM's ``/metrics``. ``beside`` compares its figures with the session's tables.
"""

from __future__ import annotations

from analysis.engine_metrics.beside import Reconciliation, reconcile
from analysis.engine_metrics.figures import Explanation, Row
from analysis.engine_metrics.page import Page, parse

__all__ = ["Explanation", "Page", "Reconciliation", "Row", "parse", "reconcile"]
