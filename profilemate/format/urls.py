# SPDX-License-Identifier: Apache-2.0
"""Places in object storage: what is such a URL, and what of it may be said?"""

from __future__ import annotations

import os
import re

from profilemate.format.errors import SessionError

SCHEMES = ("s3", "gs", "az")

_URL = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}(?=[^/])(.*)", re.DOTALL)
"""A path that was made of a URL has one slash less."""


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether this names a place in object storage, and no folder.

    >>> is_url("s3://bucket/runs"), is_url("runs/s3"), is_url("s3:/bucket")
    (True, False, True)
    """
    return _URL.fullmatch(os.fspath(path)) is not None


def url_of(path: str | os.PathLike[str]) -> str:
    """The URL, without a slash at its end.

    Raises:
        SessionError: it has a password, a query or a fragment, or its path leads upwards. The
            message does not show these.

    >>> url_of("s3:/bucket/runs/")
    's3://bucket/runs'
    """
    match = _URL.fullmatch(os.fspath(path))
    if match is None:
        raise SessionError(f"{os.fspath(path)!r} is no URL of object storage")
    scheme, rest = match[1], match[2].rstrip("/")
    bucket = rest.partition("/")[0]
    if "@" in bucket:
        shown = f"{scheme}://***@{rest.rpartition('@')[2]}"
        raise SessionError(
            f"{redacted(shown)} has a user or a password in it; leave them out: credentials come "
            "from the environment"
        )
    if "?" in rest or "#" in rest:
        raise SessionError(
            f"{redacted(f'{scheme}://{rest}')} has a query, which may hold a secret; leave it out: "
            "credentials come from the environment"
        )
    if any(part in ("", ".", "..") for part in rest.split("/")) or not rest.isprintable():
        raise SessionError(f"{scheme}://{bucket}/… is no URL of object storage")
    return f"{scheme}://{rest}"


def redacted(text: str) -> str:
    """The text without what may be a secret in a URL: before an @, and from a ? on.

    >>> redacted("s3://me:secret@bucket/a?key=b"), redacted("s3://bucket/a")
    ('s3://***@bucket/a', 's3://bucket/a')
    """
    match = _URL.fullmatch(text)
    if match is None:
        return text
    rest = re.split(r"[?#]", match[2], maxsplit=1)[0]
    user, at, place = rest.rpartition("@")
    return f"{match[1]}://{'***@' if at or user else ''}{place}"
