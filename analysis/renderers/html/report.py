# SPDX-License-Identifier: Apache-2.0
"""What the page is made from."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.series import Series
from analysis.summary import Summary


@dataclass(frozen=True)
class Report:
    """A session's summary, and the series for its charts."""

    summary: Summary
    series: Series
