# SPDX-License-Identifier: Apache-2.0
"""Is an index file a JSON object of the version that this analyzer reads?"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from analysis.errors import SessionError
from analysis.tables.faults import no_number, shown
from analysis.tables.metadata import whole


def parsed(
    content: bytes,
    *,
    longest: int,
    key: str,
    version: int,
    refused: Callable[[str], SessionError],
) -> Mapping[str, Any]:
    """The object. ``longest``: bytes of a sound one at most. ``key``: what has the version.

    Raises:
        SessionError: what ``refused`` makes of the reason.

    """
    if len(content) > longest:
        raise refused(f"it is larger than {longest >> 20} MiB")
    try:
        index = json.loads(content, parse_constant=no_number)
    except (ValueError, RecursionError):
        raise refused("it is not JSON") from None
    if not isinstance(index, Mapping):
        raise refused("it is not a JSON object")
    found = whole(index.get(key))
    if found != version:
        raise refused(f"its {key} is {shown(str(found))}, and this analyzer reads {version}")
    return index
