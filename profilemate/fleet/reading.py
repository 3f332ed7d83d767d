# SPDX-License-Identifier: Apache-2.0
"""Read one session of a fleet: the task of a process here, or of a node of a cluster."""

from __future__ import annotations

from analysis.errors import SessionError
from analysis.fleet.merging import Failed
from analysis.fleet.partial import Partial, of_session
from profilemate.messages import cause

Read = Partial | Failed


def read(path: str) -> Read:
    """The session's partial, or why there is none."""
    from analysis import open_session

    try:
        return of_session(open_session(path), path)
    except SessionError as error:
        return Failed(path, " ".join(str(error).split()))
    except Exception as error:
        # One bad session must not cost all others.
        return Failed(path, f"it cannot be read ({cause(error)})")
