# SPDX-License-Identifier: Apache-2.0
"""What was found, as JSON for programs. ``docs/json.md`` documents every key of a summary,
``docs/compare-and-check.md`` those of a comparison and of a check, ``docs/sweep.md`` a sweep's,
``docs/whatif.md`` those of a simulation and of a miss-ratio curve, ``docs/routing.md`` those of
routing, ``docs/plan.md`` a plan's, ``docs/head-room.md`` a deployment's, ``docs/fleet.md`` a
fleet's.

The keys are the names of the dataclasses' fields. A figure that is not known, or of which there
is none, is null; there is no NaN and no infinity.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from analysis.engine_metrics import Reconciliation
from analysis.fleet.merging import Fleet
from analysis.headroom.deployment import Deployment
from analysis.judgement.check import Checked
from analysis.judgement.comparison import Comparison
from analysis.judgement.measures import Measure
from analysis.judgement.siblings import Siblings
from analysis.plan import Plan
from analysis.plan.reality import Reality
from analysis.requests.by_whom import Split
from analysis.summary import Summary
from analysis.sweep import Sweep
from analysis.whatif.curve import Curve
from analysis.whatif.routing.answer import Routing
from analysis.whatif.simulated import Simulated

VERSION = 1
"""Goes up when a key changes its meaning or goes away, not when one is added."""


KINDS: Mapping[type, str] = {
    Summary: "summary",
    Siblings: "siblings",
    Comparison: "comparison",
    Checked: "check",
    Sweep: "sweep",
    Reconciliation: "reconciliation",
    Simulated: "whatif",
    Curve: "curve",
    Routing: "routing",
    Plan: "plan",
    Split: "split",
    Reality: "plan",
    Deployment: "deployment",
    Fleet: "fleet",
}

Found = (
    Summary
    | Siblings
    | Comparison
    | Checked
    | Sweep
    | Reconciliation
    | Simulated
    | Curve
    | Routing
    | Plan
    | Split
    | Reality
    | Deployment
    | Fleet
)


def render(found: Found) -> str:
    """What was found as one JSON object, indented."""
    kind = KINDS[type(found)]
    content = {f"{kind}_version": VERSION, **_plain(dataclasses.asdict(found))}
    return json.dumps(content, indent=2, allow_nan=False)


def catalogue(measures: Sequence[Measure]) -> str:
    """The measures that there are, as one JSON list, indented."""
    keys = ("name", "unit", "better", "says")
    return json.dumps([{key: getattr(one, key) for key in keys} for one in measures], indent=2)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
