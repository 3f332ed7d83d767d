# SPDX-License-Identifier: Apache-2.0
"""Read the secret that content ids of several sessions have in common.

It is in a file of the user's, or in one that profilemate makes for a deployment, beside the
sessions. No other file, no message and no command line ever has it.
"""

from __future__ import annotations

import contextlib
import os
import stat
from hashlib import blake2b
from pathlib import Path

from profilemate.config import CONTENT_KEY, DEPLOYMENT, OF_DEPLOYMENT, Config
from profilemate.format.content_key import derive_secret
from profilemate.format.errors import SessionError
from profilemate.format.folder import Folder, owner_of

LEAST_BYTES = 16
MOST_BYTES = 1 << 16
MADE_BYTES = 32


class SecretError(Exception):
    """The secret cannot be used, or there is none; the text says why."""


def read(settings: Config, deployment: str | None) -> bytes:
    """What a session keeps of the secret; empty where none is asked for.

    ``deployment`` is the deployment's id. Its secret is made where there is none yet.

    Raises:
        SecretError: it cannot be used.

    """
    asked = settings.content_key
    if not asked:
        return b""
    try:
        if asked != OF_DEPLOYMENT:
            # A FIFO would wait for a writer.
            path = Path(os.path.expanduser(asked))
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            return derive_secret(_secret_in(fd, path))
        if deployment is None:
            raise SecretError(f"the deployment has no id; set {DEPLOYMENT}")
        return derive_secret(_of_deployment(settings.directory, deployment))
    except OSError as error:
        raise SecretError(f"{error.filename or asked}: {error.strerror}") from None
    except SessionError as error:
        raise SecretError(str(error)) from None


def _secret_in(fd: int, path: Path) -> bytes:
    """The secret in an open file, which is closed."""
    try:
        _check(path, os.fstat(fd))
        content = os.read(fd, MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(content) > MOST_BYTES:
        raise SecretError(f"{path} has more than {MOST_BYTES:,} bytes")
    # Editors and echo put a line's end behind it, on one host and not on another.
    secret = content.rstrip(b"\r\n")
    if len(secret) < LEAST_BYTES:
        raise SecretError(f"{path} has {len(secret)} bytes; {LEAST_BYTES} are the least")
    return secret


def _check(path: Path, info: os.stat_result) -> None:
    """Nobody else may know or change the secret. The group may read a file of root's: that is how
    Kubernetes gives one to a user."""
    if not stat.S_ISREG(info.st_mode):
        raise SecretError(f"{path} is no plain file")
    if info.st_uid not in (os.geteuid(), 0):
        raise SecretError(f"{path} belongs to {owner_of(info)}")
    foreign = stat.S_IRWXO | stat.S_IWGRP
    if info.st_uid != 0 or os.geteuid() == 0:
        foreign |= stat.S_IRGRP
    if info.st_mode & foreign:
        raise SecretError(f"others may read or change {path}; chmod 600 {path}")


def _of_deployment(sessions: Path, deployment: str) -> bytes:
    """The secret in a file that the deployment's sessions in this folder share."""
    # Each user has files of their own: a folder of sessions may be everybody's.
    name = f".content-keys-{os.geteuid()}"
    file = f"{blake2b(deployment.encode(), digest_size=8).hexdigest()}.key"
    with Folder.anyones(sessions) as base:
        if not base.has(name):
            with contextlib.suppress(FileExistsError):
                base.make_folder(name)
        with base.folder(name) as keys:
            if not keys.has(file):
                keys.write(file, os.urandom(MADE_BYTES).hex().encode(), replace=False)
            return _secret_in(keys.open(file, os.O_RDONLY), keys.path / file)


def problem_of(reason: str) -> str:
    """The line that says that there is no secret."""
    return f"{CONTENT_KEY}: {reason}; this session's content ids are its own"
