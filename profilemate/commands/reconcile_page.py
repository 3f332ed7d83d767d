# SPDX-License-Identifier: Apache-2.0
"""Get a page of vLLM's metrics, from a server or out of a file: its text, where it is from, and
its time."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from pathlib import Path

from analysis.errors import RuleError, SessionError

ANSWER_SEC = 30
LARGEST_BYTES = 64 << 20
PIECE_BYTES = 1 << 20


def saved(path: Path) -> tuple[str, str, float]:
    """The page in a file.

    Raises:
        SessionError: the file cannot be read.

    """
    # A pipe or a device may never end.
    if path.exists() and not path.is_file():
        raise SessionError(f"{path} is not a regular file; save the metrics in one")
    try:
        return path.read_text("utf-8"), str(path), path.stat().st_mtime
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise SessionError(f"cannot read {path}: {why}") from None


def scraped(url: str) -> tuple[str, str, float]:
    """The page that a server answers with.

    Raises:
        RuleError: it is not a URL.
        SessionError: the server gives no page, or not all of it.

    """
    if not url.startswith(("http://", "https://")):
        raise RuleError(f"{url!r} is not a URL; write http://localhost:8000/metrics")
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SEC) as answer:
            content = _whole(answer)
    except urllib.error.HTTPError as error:
        raise SessionError(
            f"cannot get {url}: the server answers {error.code} {error.reason}; give the URL of "
            "its metrics"
        ) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        why = getattr(error, "reason", None) or error
        raise SessionError(f"cannot get {url}: {why}; is the server running?") from None
    return content.decode("utf-8", "replace"), url, time.time()


def _whole(answer: http.client.HTTPResponse) -> bytes:
    """All of the answer: a part of a page would look like a page with other figures."""
    content = bytearray()
    deadline = time.monotonic() + ANSWER_SEC
    while piece := answer.read1(PIECE_BYTES):
        content += piece
        if len(content) > LARGEST_BYTES:
            raise ValueError(f"the page has more than {LARGEST_BYTES >> 20} MiB")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the page takes longer than {ANSWER_SEC} s")
    if answer.length:
        raise http.client.IncompleteRead(bytes(content), answer.length)
    return bytes(content)
