# SPDX-License-Identifier: Apache-2.0
"""The text of a file that a Parquet session keeps as text, in a column of ``texts.parquet``.

It is checked at its end, as that of a packed segment is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from analysis.errors import SessionError, unreadable
from analysis.tables.files import opened

TEXT_COLUMN, FILE_COLUMN = "text", "file"
PART_BYTES = 1 << 20
"""Bytes of a file's text in one row."""


@dataclass(frozen=True)
class KeptText:
    """Where a file's text is.

    ``path``: the Parquet file. ``name``: what the file was called. ``first``, ``parts``: its first
    row there, and how many it has. ``size``, ``sha256``: of the text. ``lines_end``: the byte after
    its last line end.
    """

    path: Path
    name: str
    first: int
    parts: int
    size: int
    sha256: str
    lines_end: int

    def text(self) -> Iterator[bytes]:
        """The text, in parts of a megabyte at most.

        Raises:
            SessionError: it is damaged, or cannot be read.

        """
        known, size = hashlib.sha256(), 0
        # Polars would wait for what a pipe or a device gives, and follow a link.
        with self._failures_in_one_line(), opened(self.path, follow=False):
            pass
        for number in range(self.first, self.first + self.parts):
            with self._failures_in_one_line():
                scan = pl.scan_parquet(self.path, glob=False)
                rows = scan.slice(number, 1).select(TEXT_COLUMN).collect()
                part = rows.item() if rows.height == 1 else None
            if not isinstance(part, bytes) or size + len(part) > self.size:
                raise self._damaged("it is not the text that the index describes")
            known.update(part)
            size += len(part)
            yield part
        if size != self.size or known.hexdigest() != self.sha256:
            raise self._damaged("it is not the text that the index describes")

    @contextmanager
    def _failures_in_one_line(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unreadable(self.path, error) from None
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            raise self._damaged(f"Polars cannot read it ({str(error)[:200]})") from None

    def _damaged(self, what: str) -> SessionError:
        return SessionError(
            f"{self.path} is damaged, at {self.name}: {what}; restore the recorded file"
        )


class Parts:
    """Parts of a text, read as if they were a file."""

    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = parts
        self._rest = b""

    def read(self, most: int) -> bytes:
        """The next bytes; none at the end."""
        while not self._rest and (part := next(self._parts, None)) is not None:
            self._rest = part
        taken, self._rest = self._rest[:most], self._rest[most:]
        return taken

    def close(self) -> None:
        """Nothing is open."""
