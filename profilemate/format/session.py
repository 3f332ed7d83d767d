# SPDX-License-Identifier: Apache-2.0
"""The session: its name, its directory, its clock, and who may write there.

A session is one vLLM deployment. Its name is made where vLLM is first imported and reaches
every child through the environment; its directory appears only when a process has something
to record. A second engine of the same rank, or one that starts after the session was
completed, opens a new session beside it.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import sys
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "VLLM_PROFILING_SESSION"
JOURNAL_FOLDER = "journal"
FOUNDING_FILE = "session.json"
CLOSED_FILE = "closed.json"
"""The founding file's name from the moment that no process may join any more."""
METADATA_FILE = "metadata.json"


class SessionError(Exception):
    """The session's folder cannot be used; the text says why and what to do."""


@dataclass(frozen=True)
class Founding:
    """What the first process of a session settled for all of them."""

    session_id: str
    host: str
    origin_ns: int
    """Monotonic clock at second 0 of the session, in nanoseconds."""
    started_at: float
    """Wall clock at second 0, in seconds since 1970."""
    key: bytes
    """Secret that content and prefix ids are made with; gone when the tables are complete."""
    argv: list[str]


@dataclass(frozen=True)
class Place:
    """Where one producer writes."""

    directory: Path
    journal: Path
    fd: int
    founding: Founding


def ensure_name(environ: MutableMapping[str, str]) -> str:
    """The name of the session this process belongs to, made if it has none yet."""
    name = environ.get(VARIABLE, "")
    if not is_name(name):
        stamp = time.strftime("%Y%m%d_%H%M%S")
        name = f"session_{stamp}_{os.getpid()}_{os.urandom(3).hex()}"
        environ[VARIABLE] = name
    return name


def is_name(text: str) -> bool:
    """Whether this is a session's name and nothing that could leave its folder."""
    return re.fullmatch(r"session_[\w.-]+", text) is not None


def claim(base: Path, name: str, producer: str) -> Place:
    """Open the journal of ``producer`` in the session ``name`` under ``base``.

    Where that producer's journal exists already, or the session is complete, a new session with
    a numbered name is opened instead.

    Raises:
        SessionError: the folder cannot be made, or is not safe to write to.

    """
    try:
        make_base(base)
        for number in range(1, 1000):
            attempt = name if number == 1 else f"{name}_{number}"
            place = _claim_in(base / attempt, attempt, producer)
            if place is not None:
                return place
    except OSError as error:
        reason = error.strerror or str(error)
        raise SessionError(
            f"cannot write to {base}: {reason} (set VLLM_PROFILING_DIR to a folder of yours)"
        ) from None
    raise SessionError(f"{base} has a thousand sessions named {name} already")


def make_base(base: Path) -> None:
    """Make the folder that holds the sessions.

    Raises:
        OSError, SessionError: it cannot be made, or is another user's.

    """
    base.parent.mkdir(parents=True, exist_ok=True)
    try:
        base.mkdir(mode=0o700)
    except FileExistsError:
        for info in (os.lstat(base), os.stat(base)):
            if info.st_uid not in (os.geteuid(), 0):
                raise SessionError(
                    f"{base} belongs to another user (set VLLM_PROFILING_DIR to a folder of yours)"
                ) from None


def _claim_in(directory: Path, session_id: str, producer: str) -> Place | None:
    """The place in this very directory, or None where it is taken or complete."""
    journals = directory / JOURNAL_FOLDER
    try:
        directory.mkdir(mode=0o700)
        journals.mkdir(mode=0o700)
    except FileExistsError:
        info = os.lstat(directory)
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
            raise SessionError(f"{directory} is not a folder of yours") from None
    for _ in range(200):
        if journals.is_dir() or (directory / METADATA_FILE).exists():
            break
        time.sleep(0.01)
    founding = _found(journals, session_id)
    if founding is None or founding.host != platform.node():
        return None
    path = journals / f"{producer}.journal"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags, 0o600)
    except (FileExistsError, FileNotFoundError):
        return None
    if not (journals / FOUNDING_FILE).exists():
        # The collector closed the session in this very moment and may not have seen us.
        path.unlink(missing_ok=True)
        os.close(fd)
        return None
    return Place(directory, path, fd, founding)


def _found(journals: Path, session_id: str) -> Founding | None:
    """The session's founding, made if there is none; None where the session is closed."""
    path = journals / FOUNDING_FILE
    if not journals.is_dir() or (journals / CLOSED_FILE).exists():
        return None
    if not path.exists():
        founding = {
            "session_id": session_id,
            "host": platform.node(),
            "origin_ns": time.monotonic_ns(),
            "started_at": time.time(),
            "key": os.urandom(32).hex(),
            "argv": redact(_root_argv(session_id)),
        }
        write_atomically(path, json.dumps(founding).encode(), replace=False)
    return read_founding(journals)


def read_founding(journals: Path) -> Founding:
    """What the session's first process settled.

    Raises:
        SessionError: the file is missing or damaged.

    """
    closed = journals / CLOSED_FILE
    path = closed if closed.exists() else journals / FOUNDING_FILE
    try:
        founding = json.loads(path.read_bytes())
        return Founding(**{**founding, "key": bytes.fromhex(founding["key"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SessionError(f"{path} cannot be read: {error}") from None


def close_to_newcomers(journals: Path) -> None:
    """From now on a process that starts opens a session of its own."""
    if not (journals / CLOSED_FILE).exists():
        os.rename(journals / FOUNDING_FILE, journals / CLOSED_FILE)


def reopen(journals: Path) -> None:
    """Undo ``close_to_newcomers``: one came just before."""
    os.rename(journals / CLOSED_FILE, journals / FOUNDING_FILE)


def write_atomically(path: Path, content: bytes, *, replace: bool = True) -> None:
    """Write a file of mode 0600 that is there whole or not at all.

    With ``replace=False`` a file that is already there stays as it is.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(3).hex()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(scratch, flags, 0o600)
    try:
        with open(fd, "wb") as file:
            file.write(content)
        if replace:
            os.replace(scratch, path)
        else:
            _rename_unless_there(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)


def _rename_unless_there(scratch: Path, path: Path) -> None:
    try:
        os.link(scratch, path)
    except FileExistsError:
        pass
    except OSError:
        # No hard links on this file system: the last of two founders that race here wins.
        if not path.exists():
            os.replace(scratch, path)


_SECRET_WORDS = frozenset(
    (
        "apikey",
        "auth",
        "credential",
        "credentials",
        "key",
        "keys",
        "passphrase",
        "passwd",
        "password",
        "secret",
        "token",
    )
)
_SECRET_VALUE = re.compile(
    r"""(?ix) ( ["']? [\w-]* (?: api_?key | secret | password | passwd | token ) ["']? \s* [:=] \s*
    ["'] ) [^"']* """
)
_URL_PASSWORD = re.compile(r"(://[^/@\s:]*):[^/@\s]+@")
REDACTED = "***"


def redact(argv: list[str]) -> list[str]:
    """The command line without its secrets.

    >>> redact(["vllm", "serve", "m", "--api-key", "a", "b", "--hf-token=c", "--max-tokens", "5"])
    ['vllm', 'serve', 'm', '--api-key', '***', '***', '--hf-token=***', '--max-tokens', '5']
    """
    redacted = []
    secret = False
    for argument in argv:
        if argument.startswith("-"):
            flag, equals, _ = argument.partition("=")
            secret = not _SECRET_WORDS.isdisjoint(re.split(r"[-_.]+", flag.lower()))
            if secret and equals:
                secret = False
                redacted.append(f"{flag}={REDACTED}")
                continue
        elif secret:
            redacted.append(REDACTED)
            continue
        redacted.append(_redact_within(argument))
    return redacted


def _redact_within(argument: str) -> str:
    """An argument without the passwords in its JSON or its URL."""
    argument = _SECRET_VALUE.sub(rf"\g<1>{REDACTED}", argument)
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}@", argument)


def _root_argv(session_id: str) -> list[str]:
    """The command line of the process that made the session's name, if it is an ancestor.

    An engine runs in a child whose own command line says nothing; elsewhere than on Linux, it
    has to do.
    """
    match = re.match(r"session_\d+_\d+_(\d+)_", session_id)
    own = list(getattr(sys, "orig_argv", None) or getattr(sys, "argv", None) or [])
    if match is None:
        return own
    root, pid = int(match[1]), os.getpid()
    try:
        while pid > 1 and pid != root:
            pid = _parent_of(pid)
        if pid == root:
            cmdline = Path(f"/proc/{pid}/cmdline").read_bytes()
            return [os.fsdecode(argument) for argument in cmdline.split(b"\0")[:-1]] or own
    except (OSError, ValueError):
        pass
    return own


def _parent_of(pid: int) -> int:
    return int(_process_stat(pid)[1])


def _process_stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the command's name may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def process_start(pid: int) -> str:
    """What tells this process from a later one with the same pid; empty where unknown."""
    try:
        return _process_stat(pid)[19]
    except (OSError, IndexError):
        return ""


def process_alive(pid: int, start: str) -> bool:
    """Whether the process is still running: neither ended, nor a zombie, nor another by now."""
    if not start:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True
    try:
        fields = _process_stat(pid)
    except OSError:
        return False
    return fields[0] not in "ZX" and fields[19] == start
