# SPDX-License-Identifier: Apache-2.0
"""Object storage, by obstore: list, fetch and send.

Credentials come by the usual chains of each provider, and are shown nowhere: what a store answers
is not quoted, as it may hold them. ``docs/pack.md`` says what is tried again, and how often.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from analysis.errors import SessionError

PART_BYTES = 8 << 20
"""Bytes that are fetched at once: a connection that drops costs so many at most."""
TRIES = 6
"""Of one part, or one request."""
FIRST_WAIT_SEC = 0.2
"""Before the second try; twice as long before each further one."""
_ANSWER_SEC = 30
_REQUEST_TRIES = 3
"""Of what obstore tries by itself, within one try."""

_MISSING = (
    "obstore is missing, which reads object storage: in a clone of profilemate, "
    "pip install '.[storage]'"
)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Object:
    """``name`` below the store's URL, ``size`` in bytes, and what changes when it does."""

    name: str
    size: int
    tag: str | None


class Store:
    """A place in object storage.

    Raises:
        SessionError: obstore is missing, or the URL, or what the environment says of the provider,
            makes no sense.

    """

    def __init__(self, url: str) -> None:
        if find_spec("obstore") is None:
            raise SessionError(_MISSING)
        self.url = url
        self._obstore: Any = import_module("obstore")
        with self._in_one_line("open"):
            self._store = import_module("obstore.store").from_url(
                url,
                client_options=_client_options(),
                retry_config={
                    "max_retries": _REQUEST_TRIES - 1,
                    "retry_timeout": timedelta(seconds=_ANSWER_SEC),
                },
                **_credentials(url),
            )

    def objects(self) -> list[Object]:
        """All objects below the URL.

        Raises:
            SessionError: they cannot be listed.

        """

        def listed() -> list[Object]:
            return [
                Object(each["path"], each["size"], each["e_tag"])
                for part in self._obstore.list(self._store)
                for each in part
            ]

        return self._tried("list", listed)

    def folders(self) -> list[str]:
        """The names of what has objects below it, one level down.

        Raises:
            SessionError: they cannot be listed.

        """

        def listed() -> list[str]:
            found = self._obstore.list_with_delimiter(self._store)["common_prefixes"]
            return [str(each).rstrip("/").rpartition("/")[2] for each in found]

        return self._tried("list", listed)

    def fetch(self, source: Object, target: Path, done: Callable[[int], None]) -> None:
        """Fetch an object into a new file, part by part. A part that is cut off is fetched again.

        An object of one part comes as it is now: what a session that still runs has sent anew since
        it was listed is whole all the same.

        Raises:
            SessionError: it cannot be fetched, or changes meanwhile.
            OSError: the file cannot be written.

        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        with open(os.open(target, flags, 0o600), "wb") as file:
            if source.size <= PART_BYTES:
                file.write(self._tried("read", lambda: self._now(source), source.name))
                done(source.size)
                return
            for begin in range(0, source.size, PART_BYTES):
                end = min(begin + PART_BYTES, source.size)
                part = self._tried("read", lambda: self._part(source, begin, end), source.name)  # noqa: B023
                if len(part) != end - begin:
                    raise SessionError(f"{self.url}/{source.name} is cut short; try again")
                file.write(part)
                done(len(part))

    def _now(self, source: Object) -> bytes:
        return bytes(self._obstore.get(self._store, source.name).bytes())

    def _part(self, source: Object, begin: int, end: int) -> bytes:
        options: dict[str, Any] = {"range": (begin, end)}
        if source.tag is not None:
            options["if_match"] = source.tag
        return bytes(self._obstore.get(self._store, source.name, options=options).bytes())

    def send(self, source: Path, name: str) -> None:
        """Send a file, which takes the place of an object of this name.

        Raises:
            SessionError: it cannot be sent.

        """
        self._tried("write", lambda: self._obstore.put(self._store, name, source), name)

    def send_opened(self, opened: Callable[[], BinaryIO], name: str) -> None:
        """The same for a file that is opened anew for each try.

        Raises:
            SessionError: it cannot be sent.
            OSError: it cannot be opened.

        """

        def sent() -> None:
            with opened() as file:
                self._obstore.put(self._store, name, file)

        self._tried("write", sent, name)

    def send_bytes(self, content: bytes, name: str) -> None:
        """The same for bytes.

        Raises:
            SessionError: they cannot be sent.

        """
        self._tried("write", lambda: self._obstore.put(self._store, name, content), name)

    def size_of(self, name: str) -> int | None:
        """An object's size; None where it is not there.

        Raises:
            SessionError: the store does not answer.

        """

        def asked() -> int | None:
            with suppress(FileNotFoundError):
                return int(self._obstore.head(self._store, name)["size"])
            return None

        return self._tried("read", asked, name)

    def remove(self, name: str) -> None:
        """Remove an object, if it is there.

        Raises:
            SessionError: the store does not answer.

        """

        def asked() -> None:
            with suppress(FileNotFoundError):
                self._obstore.delete(self._store, name)

        self._tried("write", asked, name)

    def _tried(self, verb: str, work: Callable[[], _T], name: str = "") -> _T:
        """The result of the work, tried again a bounded number of times where that may help."""
        with self._in_one_line(verb, name):
            for attempt in range(TRIES - 1):
                with _Passing(self._may_pass):
                    return work()
                time.sleep(FIRST_WAIT_SEC * 2**attempt)
            return work()

    def _may_pass(self, error: Exception) -> bool:
        known = self._obstore.exceptions
        lasting = (
            FileNotFoundError,
            PermissionError,
            known.PermissionDeniedError,
            known.UnauthenticatedError,
            known.PreconditionError,
            known.AlreadyExistsError,
            known.InvalidPathError,
        )
        is_missing = "NoSuchBucket" in str(error)
        of_store = (known.BaseError, OSError, TimeoutError)
        return isinstance(error, of_store) and not isinstance(error, lasting) and not is_missing

    @contextmanager
    def _in_one_line(self, verb: str, name: str = "") -> Iterator[None]:
        """Turn what obstore raises into a line that quotes nothing of it."""
        known = self._obstore.exceptions
        place = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except FileNotFoundError:
            raise SessionError(f"cannot {verb} {place}: it is not there") from None
        except known.PreconditionError:
            raise SessionError(f"{place} changed while it was read; try again") from None
        except (PermissionError, known.PermissionDeniedError, known.UnauthenticatedError):
            raise SessionError(
                f"cannot {verb} {place}: the store refuses; check the credentials of the "
                "environment, and what they may do"
            ) from None
        except known.InvalidPathError:
            raise SessionError(
                f"cannot {verb} {place}: a key there is no path, as it has '..' or two slashes in "
                "a row; name a place without such keys"
            ) from None
        except (known.BaseError, OSError, TimeoutError, ValueError, TypeError) as error:
            if "NoSuchBucket" in str(error):
                raise SessionError(f"cannot {verb} {place}: there is no such bucket") from None
            raise SessionError(
                f"cannot {verb} {place}: the store does not answer as it should, after {TRIES} "
                "tries; check the network, the credentials and AWS_ENDPOINT_URL"
            ) from None


class _Passing:
    """A block whose errors are passed over where they may pass."""

    def __init__(self, may_pass: Callable[[Exception], bool]) -> None:
        self._may_pass = may_pass

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        return isinstance(error, Exception) and self._may_pass(error)


def _client_options() -> Mapping[str, Any]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    options: dict[str, Any] = {"timeout": f"{_ANSWER_SEC}s", "connect_timeout": "10s"}
    if endpoint.startswith("http://"):
        options["allow_http"] = True
    return options


def _credentials(url: str) -> Mapping[str, Any]:
    """What obstore does not find by itself: AWS's files and profiles, by boto3 where that is."""
    environ = os.environ
    if not url.startswith("s3://") or "AWS_ACCESS_KEY_ID" in environ:
        return {}
    home = Path(environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")).expanduser()
    if ("AWS_PROFILE" in environ or home.exists()) and find_spec("boto3") is not None:
        provider = import_module("obstore.auth.boto3").Boto3CredentialProvider
        return {"credential_provider": provider()}
    return {}
