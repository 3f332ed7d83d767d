# SPDX-License-Identifier: Apache-2.0
"""What does metadata.json say, where any entry may be missing or of a wrong kind?

``read`` reads the file. The other functions read one entry each; they return None, or something
empty, for a value of another kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from analysis.errors import SessionError, unreadable
from analysis.tables.faults import no_number, shown
from analysis.tables.files import opened
from analysis.tables.schema import FORMAT_VERSION
from profilemate.format.session import METADATA_FILE

_MOST = 10**12
"""Larger numbers, and negative ones, are damage."""

_LONGEST = 16 << 20
"""More bytes are damage."""

_REMEDY = "restore the recorded file"

_LATEST_SEC = 253402300799
"""The end of the year 9999."""


def read(directory: Path) -> Mapping[str, Any]:
    """All of a session's metadata.json; empty where there is none.

    Raises:
        SessionError: the file cannot be read, is not a JSON object, or is of another version.

    """
    path = directory / METADATA_FILE
    try:
        with opened(path) as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise SessionError(f"{path}: larger than {_LONGEST >> 20} MiB; {_REMEDY}")
        metadata = json.loads(content, parse_constant=no_number)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from None
    except json.JSONDecodeError as error:
        raise SessionError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except UnicodeDecodeError:
        raise SessionError(f"{path}: not UTF-8 text") from None
    except RecursionError:
        raise SessionError(f"{path}: not JSON (nested too deeply)") from None
    except ValueError as error:
        # NaN or an infinity, or a number of thousands of digits.
        what = str(error).partition(":")[0]
        raise SessionError(f"{path}: not JSON ({what})") from None
    if not isinstance(metadata, dict):
        raise SessionError(f"{path}: not a JSON object")
    version = metadata.get("format_version")
    if version != FORMAT_VERSION and not is_newer(metadata):
        raise SessionError(
            f"{path}: format_version is {shown(str(version))}, and this analyzer reads "
            f"{FORMAT_VERSION}; {_REMEDY}"
        )
    return metadata


def is_newer(metadata: Mapping[str, Any]) -> bool:
    """Whether a newer profilemate wrote the session, in a format that this one only half knows."""
    return (whole(metadata.get("format_version")) or 0) > FORMAT_VERSION


def part(whole: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object under this name."""
    value = whole.get(name)
    return value if isinstance(value, Mapping) else {}


def parts(whole: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The objects in the list under this name."""
    return [value for value in listed(whole.get(name)) if isinstance(value, Mapping)]


def listed(value: Any) -> list[Any]:
    """The list; an empty one for any other value."""
    return value if isinstance(value, list) else []


def text(value: Any) -> str | None:
    """Text, or the first text of a list: a model may be served under several names."""
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else None


def whole(value: Any) -> int | None:
    """A whole number from 0 to 10**12."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return value if is_whole and 0 <= value <= _MOST else None


def number(value: Any) -> float | None:
    """A number from 0 to 10**12."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= _MOST else None


def flag(value: Any) -> bool | None:
    """True or false."""
    return value if isinstance(value, bool) else None


def wall_clock(moment: Any) -> float | None:
    """A time in seconds since 1970, given as such a number or as ISO 8601 text."""
    if isinstance(moment, (int, float)) and not isinstance(moment, bool):
        return float(moment) if 0 <= moment <= _LATEST_SEC else None
    try:
        return datetime.fromisoformat(str(moment).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None
