# SPDX-License-Identifier: Apache-2.0
"""Get a page of vLLM's metrics, from a server or out of a file: its text, where it is from, and
its time.

What a server answers is no more to be trusted than what a client sends. The whole exchange has one
deadline, and nothing of the answer but a page gets further than one line.
"""

from __future__ import annotations

import base64
import http.client
import queue
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from analysis.errors import RuleError, SessionError
from profilemate.config import shortened

ANSWER_SEC = 30
"""From looking up the server's address to the last byte of the page."""
LARGEST_BYTES = 64 << 20
PIECE_BYTES = 1 << 20
MOST_REDIRECTS = 5
LONGEST_REASON = 200

_REDIRECTS = (301, 302, 303, 307, 308)


def saved(path: Path) -> tuple[str, str, float]:
    """The page in a file.

    Raises:
        SessionError: the file cannot be read.

    """
    # A pipe or a device may never end.
    if path.exists() and not path.is_file():
        raise SessionError(f"{path} is not a regular file; save the metrics in one")
    try:
        if path.stat().st_size > LARGEST_BYTES:
            raise SessionError(
                f"{path} has more than {LARGEST_BYTES >> 20} MiB; name saved metrics"
            )
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
    asked = _split(url)
    results: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            results.put(_asked(asked))
        except Exception as error:
            results.put(error)

    # In a thread: neither looking an address up nor a server that sends a byte a second keeps to
    # the time limit of a socket. A thread that is left behind ends with the command.
    threading.Thread(target=ask, daemon=True).start()
    try:
        result = results.get(timeout=ANSWER_SEC)
    except queue.Empty:
        result = TimeoutError()
    if isinstance(result, SessionError):
        raise result
    if isinstance(result, Exception):
        reason = getattr(result, "reason", None) or result
        if isinstance(reason, TimeoutError):
            # Here, or in the thread, which has the same limit for each read.
            reason = f"it takes longer than {ANSWER_SEC} s"
        why = shortened(str(reason), LONGEST_REASON)
        raise SessionError(f"cannot get {shown(asked)}: {why}; is the server running?")
    return result.decode("utf-8", "replace"), shown(asked), time.time()


def shown(url: SplitResult) -> str:
    """The URL without what may be secret: user and password, and the values of its query."""
    names = [part.partition("=")[0] + "=***" for part in url.query.split("&") if part]
    host = url.netloc.rpartition("@")[2]
    return f"{url.scheme}://{host}{url.path}" + (f"?{'&'.join(names)}" if names else "")


def _split(url: str) -> SplitResult:
    try:
        found = urlsplit(url)
        is_url = found.scheme in ("http", "https") and bool(found.hostname) and found.port != 0
    except ValueError:
        is_url = False
    if not is_url or not url.isascii() or not url.isprintable() or " " in url:
        raise RuleError("--metrics-url is not a URL; write http://localhost:8000/metrics")
    return found


def _asked(url: SplitResult) -> bytes:
    """The page, from where the server says that it is now."""
    asked = url
    for _ in range(MOST_REDIRECTS + 1):
        try:
            with _opener().open(_request(asked), timeout=ANSWER_SEC) as answer:
                return _whole(answer)
        except urllib.error.HTTPError as error:
            error.close()
            place = error.headers.get("Location") if error.code in _REDIRECTS else None
            if place is None:
                reason = shortened(str(error.reason), LONGEST_REASON)
                raise SessionError(
                    f"cannot get {shown(asked)}: the server answers {error.code} {reason}; give "
                    "the URL of its metrics"
                ) from None
        there = urlsplit(urljoin(asked.geturl(), place))
        if (there.scheme, there.netloc.rpartition("@")[2]) != (
            url.scheme,
            url.netloc.rpartition("@")[2],
        ):
            # Whoever answers here could otherwise have this machine ask any server that it reaches.
            raise SessionError(
                f"cannot get {shown(asked)}: the server sends on to another, "
                f"{shortened(shown(there), LONGEST_REASON)}; give that URL if it is the right one"
            )
        asked = there._replace(netloc=url.netloc, fragment="")
    raise SessionError(
        f"cannot get {shown(url)}: the server sends on more than {MOST_REDIRECTS} times; give the "
        "URL of its metrics"
    )


def _opener() -> urllib.request.OpenerDirector:
    """What asks a server, and follows no redirect by itself."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _request(url: SplitResult) -> urllib.request.Request:
    user, at, host = url.netloc.rpartition("@")
    request = urllib.request.Request(url._replace(netloc=host, fragment="").geturl())
    if at:
        request.add_header(
            "Authorization", f"Basic {base64.b64encode(unquote(user).encode()).decode()}"
        )
    return request


def _whole(answer: http.client.HTTPResponse) -> bytes:
    """All of the answer: a part of a page would look like a page with other figures."""
    content = bytearray()
    while piece := answer.read1(PIECE_BYTES):
        content += piece
        if len(content) > LARGEST_BYTES:
            raise ValueError(f"the page has more than {LARGEST_BYTES >> 20} MiB")
    if answer.length:
        raise http.client.IncompleteRead(bytes(content), answer.length)
    return bytes(content)
