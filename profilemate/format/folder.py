# SPDX-License-Identifier: Apache-2.0
"""A folder that is held open: whatever its path comes to lead to, its files are these.

Who may rename a folder above a session could put a symbolic link, or a folder of somebody else, in
its place between two steps. So a session's folder is opened once and must be the user's own. Every
name in it is looked up from there, and no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path

from profilemate.format.errors import SessionError
from profilemate.format.files import write_atomically

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class Folder:
    """A folder, open until the ``with`` block ends. ``path`` is what messages call it.

    Each method takes the name of a file in it, and raises an OSError that names the whole path.
    """

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.path.absolute().name

    @classmethod
    def anyones(cls, path: Path) -> Folder:
        """Open a folder that may be another user's, or be reached by links."""
        return cls(os.open(path, _FOLDER), path)

    @classmethod
    def own(cls, path: Path) -> Folder:
        """Open a folder of the user's own.

        Raises:
            SessionError: it is another user's, a link, or no folder.
            OSError: it cannot be opened.

        """
        return _own(path, str(path), None)

    def folder(self, name: str) -> Folder:
        """Open a folder in this one, which must be the user's own, too; raises as ``own`` does."""
        return _own(self.path / name, name, self.fd)

    def anyones_folder(self, name: str) -> Folder:
        """Open a folder in this one, which may be another user's; a link to one is none."""
        with self._naming(name):
            fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=self.fd)
        return Folder(fd, self.path / name)

    def parent(self) -> Folder:
        """Open the folder that this one lies in, wherever its path leads to by now."""
        with self._naming(""):
            return Folder(os.open("..", _FOLDER, dir_fd=self.fd), self.path.parent)

    def names(self) -> list[str]:
        """What is in it, sorted."""
        with self._naming(""):
            return sorted(os.listdir(self.fd))

    def size(self, *, without: str = "") -> int:
        """Bytes that its files take, but for one of them and those of folders in it: each file's
        length, or the room that it has on the disk, where that is more. Files that go meanwhile do
        not count."""
        infos = (self.stat(name) for name in self.names() if name != without)
        return sum(
            max(i.st_size, 512 * i.st_blocks) for i in infos if i and stat.S_ISREG(i.st_mode)
        )

    def stat(self, name: str) -> os.stat_result | None:
        """What is known of the entry, or of the link that it is; None where there is none."""
        with self._naming(name):
            try:
                return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
            except FileNotFoundError:
                return None

    def has(self, name: str) -> bool:
        return self.stat(name) is not None

    def has_folder(self, name: str) -> bool:
        """Whether there is a folder of this name; a link to one is none."""
        found = self.stat(name)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def holds(self, folder: Folder, name: str) -> bool:
        """Whether this very folder lies here under this name."""
        found = self.stat(name)
        return found is not None and os.path.samestat(found, os.fstat(folder.fd))

    def open(self, name: str, flags: int) -> int:
        """Open a file; one that it makes has the mode 0600."""
        with self._naming(name):
            return os.open(name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=self.fd)

    def read(self, name: str) -> bytes:
        """All of a file."""
        with open(self.open(name, os.O_RDONLY), "rb") as file:
            return file.read()

    def write(self, name: str, content: bytes, *, replace: bool = True) -> None:
        """Write a file as ``write_atomically`` does."""
        with self._naming(name):
            write_atomically(Path(name), content, replace=replace, dir_fd=self.fd)

    def make_folder(self, name: str) -> None:
        """Make a folder that only the user can read."""
        with self._naming(name):
            os.mkdir(name, 0o700, dir_fd=self.fd)

    def rename(self, name: str, to: str, folder: Folder | None = None) -> None:
        """Give an entry another name, here or in another folder, in place of a file there."""
        with self._naming(name):
            os.rename(name, to, src_dir_fd=self.fd, dst_dir_fd=(folder or self).fd)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with self._naming(name), contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def remove_folder(self, name: str) -> None:
        """Remove a folder of the user's own and all that is in it."""
        with self.folder(name) as folder:
            for entry in folder.names():
                if folder.has_folder(entry):
                    folder.remove_folder(entry)
                else:
                    folder.remove(entry)
        with self._naming(name):
            os.rmdir(name, dir_fd=self.fd)

    def close(self) -> None:
        os.close(self.fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path / name)) from None


def owner_of(info: os.stat_result) -> str:
    """The name of the user whose file or folder this is."""
    try:
        return pwd.getpwuid(info.st_uid).pw_name
    except KeyError:
        return f"user {info.st_uid}"


def _own(path: Path, name: str, dir_fd: int | None) -> Folder:
    try:
        fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise SessionError(f"{path} is not a folder of yours: it is a link or a file") from None
        error.filename = str(path)
        raise
    info = os.fstat(fd)
    if info.st_uid != os.geteuid():
        os.close(fd)
        raise SessionError(f"{path} is not a folder of yours: it belongs to {owner_of(info)}")
    return Folder(fd, path)
