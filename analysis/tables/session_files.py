# SPDX-License-Identifier: Apache-2.0
"""Which files are a session's tables made of, whether it is as recorded or a Parquet session?"""

from __future__ import annotations

from pathlib import Path

from analysis.tables import parquet_files, parquet_index, segments
from analysis.tables.segments import Files


def find(directory: Path, *, hold: bool) -> Files:
    """The files of a session's tables.

    Args:
        directory: the session's folder.
        hold: see ``segments.find``. A Parquet session does not change.

    Raises:
        SessionError: a part of it is missing or damaged.

    """
    if parquet_index.is_there(directory):
        return parquet_files.find(directory)
    return segments.find(directory, hold=hold)
