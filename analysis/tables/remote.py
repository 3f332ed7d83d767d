# SPDX-License-Identifier: Apache-2.0
"""A session in object storage: which one is meant, and a copy of it on this machine."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from pathlib import Path

from analysis.errors import SessionError
from analysis.tables.schema import TABLES
from analysis.tables.storage import Object, Store
from profilemate.format.marks import MARKS_FILE
from profilemate.format.parquet import INDEX_FILE, TEXTS_FILE, table_file
from profilemate.format.segments import INDEX_FILE as SEGMENT_FILE
from profilemate.format.session import METADATA_FILE, SEGMENTS_FOLDER
from profilemate.format.totals import TOTALS_FILE
from profilemate.format.upload import UPLOAD_FILE
from profilemate.format.urls import url_of

_AT_ONCE = 4
_STAMP = re.compile(r"session_(\d{8}_\d{6})")
_WILD = re.compile(r"[*?\[]")
_IN_SEGMENT = re.compile(r"segments/([0-9]{4,9})/(segment\.json|[a-z0-9_.]+\.(csv|jsonl)\.gz)")


@dataclass(frozen=True)
class Copy:
    """A session's files on this machine. ``directory`` is there as long as the copy lives.
    ``left_out``: the numbers of closed segments that come before a gap, and are not read."""

    url: str
    directory: Path
    left_out: tuple[int, ...]
    _held: tempfile.TemporaryDirectory[str] = field(repr=False)


def sessions_at(path: str | os.PathLike[str]) -> list[str]:
    """The URLs of the sessions that are meant, the newest first.

    Args:
        path: the URL of a session, or of a place with sessions below it, or a glob of such URLs,
            whose ``*`` stands for anything but a slash.

    Raises:
        SessionError: there is none, or the store does not answer.

    """
    url = url_of(path)
    found = _below(url) if _WILD.search(url) is None else _matching(url)
    if not found:
        raise SessionError(
            f"there is no session at {url}: nothing there has a {METADATA_FILE}, or all of a "
            f"Parquet session; name a session's URL, or that of a place with sessions"
        )
    return sorted(found, key=_age, reverse=True)


def fetch(url: str) -> Copy:
    """Fetch a session into a temporary folder.

    Raises:
        SessionError: it cannot be fetched, or there is no room.

    """
    store = Store(url)
    wanted, left_out = _after_gaps(
        _whole([each for each in store.objects() if _is_wanted(each.name)])
    )
    if not _is_session([each.name for each in wanted]):
        raise SessionError(f"{url} is no session, or not all of it is there yet")
    held = tempfile.TemporaryDirectory(prefix="profilemate-")
    directory = Path(held.name, url.rpartition("/")[2])
    try:
        directory.mkdir(0o700)
        for folder in sorted({(directory / each.name).parent for each in wanted}):
            folder.mkdir(0o700, parents=True, exist_ok=True)
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            # The largest first, so that none is left to be fetched alone.
            for _ in threads.map(
                lambda each: store.fetch(each, directory / each.name, lambda _: None),
                sorted(wanted, key=_size, reverse=True),
            ):
                pass
    except OSError as error:
        held.cleanup()
        raise SessionError(
            f"cannot fetch {url} into {held.name}: {error.strerror or error}; TMPDIR names another "
            "folder"
        ) from None
    except BaseException:
        held.cleanup()
        raise
    return Copy(url, directory, left_out, held)


def _whole(found: Sequence[Object]) -> list[Object]:
    """Without the files of a segment that is still being sent: its index comes last."""
    indexed = {
        each.name.rpartition("/")[0] for each in found if each.name.endswith(f"/{SEGMENT_FILE}")
    }
    return [
        each
        for each in found
        if not each.name.startswith(f"{SEGMENTS_FOLDER}/")
        or each.name.rpartition("/")[0] in indexed
    ]


def _after_gaps(found: Sequence[Object]) -> tuple[list[Object], tuple[int, ...]]:
    """The files without those of segments before a gap, as an upload leaves one where a segment was
    removed before it was sent; and the numbers of these segments."""
    number_of = {each: _segment_of(each.name) for each in found}
    numbers = sorted({number for number in number_of.values() if number is not None})
    gaps = [after for before, after in pairwise(numbers) if after != before + 1]
    first = max(gaps, default=0)
    kept = [each for each, number in number_of.items() if number is None or number >= first]
    return kept, tuple(number for number in numbers if number < first)


def _segment_of(name: str) -> int | None:
    match = _IN_SEGMENT.fullmatch(name)
    return None if match is None else int(match[1])


def is_on_its_way(copy: Copy) -> bool:
    """Whether the session is still being uploaded: its upload has begun and not ended."""
    try:
        content = (copy.directory / UPLOAD_FILE).read_bytes()
        return bool(json.loads(content).get("complete") is False)
    except (OSError, ValueError, AttributeError, RecursionError):
        return False


def _size(each: Object) -> int:
    return each.size


def _is_wanted(name: str) -> bool:
    """Whether it is a file of a session that the analyzer reads. A name leads nowhere else."""
    known = {
        *(METADATA_FILE, TOTALS_FILE, MARKS_FILE, INDEX_FILE, TEXTS_FILE, UPLOAD_FILE),
        *(table.file for table in TABLES.values()),
        *(table_file(table) for table in TABLES),
    }
    return name in known or _IN_SEGMENT.fullmatch(name) is not None


def _is_session(names: Sequence[str]) -> bool:
    """Whether these files are a session; of a Parquet session the index is the last one to come."""
    is_parquet = any(name.endswith(".parquet") for name in names)
    return INDEX_FILE in names if is_parquet else METADATA_FILE in names or INDEX_FILE in names


def _below(url: str) -> list[str]:
    """The session at this URL, or those one level below it."""
    if "/" not in url.partition("://")[2]:
        names: list[str] = []
    else:
        names = [each.name for each in Store(url).objects()]
        if _is_session(names):
            return [url]
    children: dict[str, list[str]] = {}
    if names:
        for name in names:
            child, _, rest = name.partition("/")
            children.setdefault(child, []).append(rest)
        return [
            f"{url}/{child}"
            for child, rest in children.items()
            if _is_session(rest) and _is_name(child)
        ]
    folders = filter(_is_name, Store(url).folders())
    return [f"{url}/{each}" for each in folders if _is_session_at(f"{url}/{each}")]


def _is_name(name: str) -> bool:
    """Whether a part of a key may be the last part of a URL. A bucket's keys can be anything."""
    try:
        return url_of(f"s3://bucket/{name}") == f"s3://bucket/{name}" and "%" not in name
    except SessionError:
        return False


def _is_session_at(url: str) -> bool:
    return _is_session([each.name for each in Store(url).objects()])


def _matching(pattern: str) -> list[str]:
    """The sessions whose URLs match."""
    scheme, _, rest = pattern.partition("://")
    bucket, *parts = rest.split("/")
    if _WILD.search(bucket):
        raise SessionError(f"{pattern}: the name of a bucket has no wildcard; name one bucket")
    places = [f"{scheme}://{bucket}"]
    for part in parts:
        if _WILD.search(part) is None:
            places = [f"{place}/{part}" for place in places]
        else:
            places = [
                f"{place}/{name}"
                for place in places
                for name in Store(place).folders()
                if fnmatchcase(name, part) and _is_name(name)
            ]
    return [place for place in places if _is_session_at(place)]


def _age(url: str) -> tuple[str, str]:
    name = url.rpartition("/")[2]
    match = _STAMP.match(name)
    return (match[1] if match else "", name)
