# SPDX-License-Identifier: Apache-2.0
"""A table as a Parquet file: check that it is what the index says, and read its rows or its text.

``docs/pack.md`` has the format. Rows are read in groups of bounded size, and of each group only the
columns that are asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from analysis.errors import SessionError, unreadable
from analysis.tables import canonical, stored
from analysis.tables.files import opened
from analysis.tables.schema import Table

PARQUET_VERSION = 1
"""The version of how tables are stored in Parquet that this release reads and writes."""

KEY = "profilemate"
"""Under it a file's own metadata has what ``described`` gives, as JSON."""

MOST_ROWS_OF_A_GROUP = 1 << 17
_PART = 1 << 20


@dataclass(frozen=True)
class ParquetTable:
    """A table's file, as the index describes it.

    ``path``: the file. ``rows``, ``size`` in bytes, ``sha256``: of it. ``group_rows``: the rows of
    each of its row groups but the last. ``decimals``: digits behind the point, of the columns that
    are stored as decimals. ``columns``: those of the table that the file has, as an older release
    had fewer; the others are null. ``appended``: columns of a newer release. ``keys``: of a
    JSON-lines table, those that its lines have, in order. ``text_bytes``: of the files that it
    stands for.
    """

    path: Path
    table: Table
    rows: int
    size: int
    sha256: str
    group_rows: int
    columns: tuple[str, ...]
    decimals: Mapping[str, int]
    appended: tuple[str, ...]
    keys: tuple[str, ...]
    text_bytes: int

    @cached_property
    def header(self) -> bytes:
        """The first line of the text; empty where there is none."""
        names = (*self.columns, *self.appended)
        return f"{','.join(names)}\n".encode() if self.table.is_csv else b""

    def check(self) -> None:
        """Compare the file with what the index and this release say of it.

        Raises:
            SessionError: it cannot be read, is damaged, or is of another version.

        """
        self._compare_bytes()
        with self.failures_in_one_line():
            described = pl.read_parquet_metadata(self.path).get(KEY, "")
            schema = pl.read_parquet_schema(self.path)
            # The count is in the file's own metadata: no row is read.
            rows = pl.scan_parquet(self.path, glob=False).select(pl.len()).collect().item()
        try:
            said = json.loads(described)
            version, name = said["parquet_version"], said["table"]
        except (ValueError, LookupError, TypeError):
            raise self.damaged("its metadata does not describe a table of profilemate") from None
        if version != PARQUET_VERSION:
            raise self.damaged(
                f"its parquet_version is {str(version)[:20]}, and this analyzer reads "
                f"{PARQUET_VERSION}"
            )
        if name != self.table.name:
            raise self.damaged("it is another table's")
        if rows != self.rows:
            raise self.damaged(f"it has {rows:,} rows, not the {self.rows:,} of the index")
        for column, kind in self._kinds().items():
            if schema.get(column) != kind:
                raise self.damaged(f"{column} is {schema.get(column)}, not {kind}")

    def _kinds(self) -> Mapping[str, Any]:
        return stored.kinds(self.table, self.columns, self.decimals, self.appended)

    def _compare_bytes(self) -> None:
        known, size = hashlib.sha256(), 0
        try:
            with opened(self.path, follow=False) as file:
                while part := file.read(_PART):
                    known.update(part)
                    size += len(part)
        except OSError as error:
            raise unreadable(self.path, error) from None
        if size != self.size:
            raise self.damaged(f"it has {size:,} bytes, not the {self.size:,} of the index")
        if known.hexdigest() != self.sha256:
            raise self.damaged("its bytes are not those that were written")

    def lazy(self) -> pl.LazyFrame:
        """All rows as a lazy frame with the table's own types, but for ids stored as places."""
        return pl.scan_parquet(self.path, glob=False).select(
            self._column(name) for name in self.table.columns
        )

    def frames(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """These columns, with the table's own types, a row group at a time.

        Raises:
            SessionError: the file is damaged.

        """
        placed = stored.places_apply(self.table) and stored.PLACED in columns
        needed = [*columns, *([stored.PLACES_IN] if placed else [])]
        wanted = [self._column(name) for name in dict.fromkeys(needed)]
        for rows in self._groups(wanted):
            with self.failures_in_one_line():
                found = stored.with_ids(rows) if placed else rows
            yield found.select(columns)

    def text(self) -> Iterator[bytes]:
        """The lines of the rows, a row group at a time, without the header.

        Raises:
            SessionError: the file is damaged.

        """
        for rows in self.stored_rows():
            yield self.lines_of(rows)

    def stored_rows(self) -> Iterator[pl.DataFrame]:
        """All columns as they are stored, but with ids in place of places, by row group.

        Raises:
            SessionError: the file is damaged.

        """
        names = [*self.columns, *self.appended]
        for rows in self._groups([pl.col(name) for name in names]):
            with self.failures_in_one_line():
                yield stored.with_ids(rows) if stored.places_apply(self.table) else rows

    def lines_of(self, rows: pl.DataFrame) -> bytes:
        """The text of such rows."""
        if self.table.is_csv:
            return canonical.csv_rows(rows)
        return canonical.json_rows(rows, self.keys)

    def last_time(self) -> float | None:
        """The time of the last row, in the column's unit; None without one.

        Raises:
            SessionError: the file is damaged.

        """
        time = self._column(self.table.time)
        with self.failures_in_one_line():
            scan = pl.scan_parquet(self.path, glob=False)
            last = scan.slice(max(0, self.rows - 1), 1).select(time).collect()
        return None if last.is_empty() else last.item()

    def _groups(self, columns: Sequence[pl.Expr]) -> Iterator[pl.DataFrame]:
        for begin in range(0, self.rows, self.group_rows):
            with self.failures_in_one_line():
                scan = pl.scan_parquet(self.path, glob=False)
                rows = scan.slice(begin, self.group_rows).select(columns).collect()
            expected = min(self.group_rows, self.rows - begin)
            if rows.height != expected:
                raise self.damaged(f"{rows.height:,} rows are where {expected:,} should be")
            yield rows

    def _column(self, name: str) -> pl.Expr:
        if name not in self.columns:
            return pl.repeat(None, pl.len(), dtype=self.table.columns[name]).alias(name)
        column = pl.col(name)
        return column.cast(pl.Float64) if name in self.decimals else column

    @contextmanager
    def failures_in_one_line(self) -> Iterator[None]:
        """Turn what Polars says of a damaged file, or of a forged one, into one line."""
        try:
            yield
        except OSError as error:
            raise unreadable(self.path, error) from None
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            what = str(error).partition("\n")[0][:200]
            raise self.damaged(f"Polars cannot read it ({what})") from None

    def damaged(self, what: str) -> SessionError:
        return SessionError(f"{self.path} is damaged: {what}; restore the recorded file")


def described(table: Table, names: Sequence[str], decimals: Mapping[str, int]) -> dict[str, Any]:
    """What a file's own metadata says of it: the version, and each column's unit."""
    columns = {
        name: {
            "unit": stored.unit(table, name),
            **({"decimals": decimals[name]} if name in decimals else {}),
            **(
                {"stored_as": f"-1 less the place in {stored.PLACES_IN}, or the id"}
                if stored.places_apply(table) and name == stored.PLACED
                else {}
            ),
        }
        for name in names
    }
    return {"parquet_version": PARQUET_VERSION, "table": table.name, "columns": columns}
