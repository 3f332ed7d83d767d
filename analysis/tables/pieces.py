# SPDX-License-Identifier: Apache-2.0
"""A file with rows of a table. Most tables are one; those of long sessions are several.

Of a Parquet session a table is one Parquet file, whose text is that of all files that it stands
for; what is kept as text there is as the file that it was.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import chain
from pathlib import Path

from analysis.errors import unreadable
from analysis.tables.files import Held, opened
from analysis.tables.kept_text import KeptText, Parts
from analysis.tables.parquet_table import ParquetTable
from analysis.tables.unpacking import AsFile, Packed, Unpacker

_BUFFER = 1 << 16


@dataclass(frozen=True)
class Piece:
    """``in_segment``: it is a segment's. Then it is there, and no symbolic link is followed.

    ``packed``: what the segment's index says of a packed file; None for a plain one.
    ``before_sec``: where the rows are an opening, the moment at which things stood so. ``held``:
    the open file, where it may be renamed or removed while the session is read. ``kept``: the text
    that a Parquet session has of the file. ``rows``: the table as a Parquet file.
    """

    path: Path
    in_segment: bool = False
    packed: Packed | None = None
    before_sec: float | None = None
    held: Held | None = None
    kept: KeptText | None = None
    rows: ParquetTable | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the file's bytes are its text."""
        return self.packed is None and self.kept is None and self.rows is None

    def is_there(self) -> bool:
        """Whether there is something to read, even if it turns out to be no file."""
        if self.in_segment or self.held is not None:
            return True
        try:
            os.stat(self.path)
        except FileNotFoundError:
            return False
        except OSError:
            pass
        return True

    def text_bytes(self) -> int:
        """Bytes of the file's text; 0 where there is no file."""
        if self.packed is not None:
            return self.packed.plain_bytes
        if self.kept is not None:
            return self.kept.size
        if self.rows is not None:
            return self.rows.text_bytes
        try:
            info = os.stat(self.path if self.held is None else self.held.fileno())
        except OSError:
            return 0
        return info.st_size if stat.S_ISREG(info.st_mode) else 0

    @contextmanager
    def text(self) -> Iterator[BufferedReader]:
        """The file's text, until the ``with`` block ends.

        Raises:
            SessionError: it cannot be read, or is damaged.

        """
        if self.rows is not None:
            parts = chain([self.rows.header], self.rows.text())
            yield BufferedReader(AsFile(Parts(parts)), _BUFFER)
            return
        if self.kept is not None:
            yield BufferedReader(AsFile(Parts(self.kept.text())), _BUFFER)
            return
        with self._naming(), self._opened() as file:
            if self.packed is None:
                yield file
            else:
                with Unpacker(file, self.path, self.packed) as unpacker:
                    yield BufferedReader(AsFile(unpacker), _BUFFER)

    def check(self) -> None:
        """Read a file that is not plain to its end, where it shows that it is whole.

        Raises:
            SessionError: it cannot be read, or is damaged.

        """
        if self.rows is not None:
            self.rows.check()
        elif not self.is_plain:
            for _ in self.unpacked():
                pass

    def unpacked(self) -> Iterator[bytes]:
        """The text of a packed file, or of one that is kept, in parts of a megabyte at most.

        Raises:
            SessionError: it cannot be read, or is damaged.

        """
        if self.kept is not None:
            yield from self.kept.text()
            return
        if self.packed is None:
            raise ValueError(f"{self.path} is not packed")
        with self._naming(), self._opened() as file:
            yield from Unpacker(file, self.path, self.packed).parts()

    def _opened(self) -> BufferedReader:
        if self.held is None:
            return opened(self.path, follow=not self.in_segment)
        return self.held.reader()

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unreadable(self.path, error) from None
