# SPDX-License-Identifier: Apache-2.0
"""Open a session, check it, hand out its tables as lazy frames or batch by batch.

Nothing here holds a table in memory. A session that is still being written is read up to its
last finished line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
from polars.io.plugins import register_io_source

from analysis.errors import SessionError, unreadable
from analysis.tables import completing
from analysis.tables.completing import State as State
from analysis.tables.faults import first_fault, no_number
from analysis.tables.find import JOURNAL, METADATA, find_session
from analysis.tables.metadata import part, text
from analysis.tables.reading import Extent, ahead, csv_schema, extent, frames, last_line
from analysis.tables.schema import FORMAT_VERSION, LONGEST_SEC, TABLES, Table

_ROWS = 100_000


@dataclass(frozen=True)
class Session:
    """A session's folder, opened for reading.

    ``state``: ``complete`` (every event is in the tables), ``running`` (a process still
    records) or ``cut off`` (ended, and what the journal still held could not be added).
    ``note``: one sentence on a session that is not complete, else None.
    ``metadata``: metadata.json as it is; empty where the file is missing.
    ``begin_sec``: what came before this moment is left out, as warm-up; 0 leaves nothing out.
    """

    directory: Path
    metadata: Mapping[str, Any]
    state: State
    note: str | None = None
    begin_sec: float = 0.0

    def scan(self, table: str, *, history: bool = False) -> pl.LazyFrame:
        """A table, lazily, in the file's order; a missing one is empty.

        Rows from before ``begin_sec`` are left out unless ``history`` is asked for: what was in
        the cache then explains what came after.

        Collect it through ``collect``, which turns what Polars says of a malformed file into
        one line that names the file and the line.

        Raises:
            SessionError: the file cannot be read, or its header is not the table's.

        """
        known = TABLES[table]
        whole = self._scan(known)
        if history or not self.begin_sec:
            return whole
        return whole.filter(self.in_window(table))

    def in_window(self, table: str) -> pl.Expr:
        """Whether a row of this table is not part of the warm-up."""
        known = TABLES[table]
        return pl.col(known.time) * known.time_unit >= self.begin_sec

    def _scan(self, known: Table) -> pl.LazyFrame:
        part = self._extent(known)
        columns = list(known.columns)
        if part.begin == part.end:
            return pl.LazyFrame(schema=dict(known.columns))
        path = self._path(known)
        if self.state == "complete" and known.is_csv and _is_utf8(path):
            return pl.scan_csv(
                path,
                has_header=False,
                skip_rows=1,
                schema=csv_schema(known, part),
                glob=False,
            ).select(columns)

        def read(
            wanted: list[str] | None, predicate: pl.Expr | None, rows: int | None, _: int | None
        ) -> Iterator[pl.DataFrame]:
            for frame in self._frames(known, wanted or columns):
                taken = frame if rows is None else frame.head(rows)
                yield taken if predicate is None else taken.filter(predicate)
                if rows is not None:
                    rows -= taken.height

        return register_io_source(read, schema=dict(known.columns))

    def collect(
        self,
        table: str,
        query: Callable[[pl.LazyFrame], pl.LazyFrame],
        *,
        history: bool = False,
    ) -> pl.DataFrame:
        """The result of a query over a table, computed by the streaming engine.

        The table is checked before, once: a required value that is empty is a line that is cut
        short, a number out of bounds is damage, and so are rows out of order.

        Raises:
            SessionError: the file cannot be read, or a line of it is malformed.

        """
        known = TABLES[table]
        with self._reading(known):
            # Apart from the query, which then reads what it needs alone.
            if not known.is_csv:
                self._short_columns(known)
            elif table not in self._checked:
                for _ in self.batches(table, known.checked, history=True):
                    pass
            return query(self.scan(table, history=history)).collect(engine="streaming")

    def batches(
        self, table: str, columns: Sequence[str], *, history: bool = False
    ) -> Iterator[pl.DataFrame]:
        """These columns of a table, in the file's order, some 100,000 rows at a time.

        Raises:
            SessionError: the file cannot be read, or a line of it is malformed.

        """
        known = TABLES[table]
        with self._reading(known):
            every = history or not self.begin_sec
            wanted = columns if every else list(dict.fromkeys([*columns, known.time]))
            in_order = _InOrder(known, wanted if self._tells_order(known) else ())
            for frame in ahead(self._frames(known, wanted)):
                if _is_damaged(known, frame) or not in_order.goes_on(frame):
                    raise self._malformed(known, _DAMAGED)
                yield frame if every else frame.filter(self.in_window(table)).select(columns)
            if {*known.required} <= {*wanted}:
                self._checked.add(table)

    @cached_property
    def _checked(self) -> set[str]:
        """Tables that went by batch by batch and were sound."""
        return set()

    def _tells_order(self, table: Table) -> bool:
        """Lookups of requests that wait for a KV connector's transfer are told when it ends."""
        return not (
            table.in_order_where and text(part(self.metadata, "scheduler").get("connector"))
        )

    def _frames(self, table: Table, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        if table.is_csv or (
            table.name in self._read_columns and not table.lists.isdisjoint(columns)
        ):
            yield from self._read(table, columns)
        elif table.lists.isdisjoint(columns):
            yield from self._short_columns(table).select(columns).iter_slices(_ROWS)
        else:
            yield from self._with_short_columns(table, columns)

    def _read(self, table: Table, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        return frames(self._path(table), table, self._extent(table), columns)

    def _short_columns(self, table: Table) -> pl.DataFrame:
        """What of a JSON-lines table is no list, which is a small part of it: JSON is slow to
        read, and many ask for a few of its columns."""
        if table.name not in self._read_columns:
            for _ in self._with_short_columns(table, ()):
                pass
        return self._read_columns[table.name]

    def _with_short_columns(self, table: Table, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """These columns; those that are no lists are read and kept beside."""
        short = {name: kind for name, kind in table.columns.items() if name not in table.lists}
        parts = [pl.DataFrame(schema=short)]
        for frame in self._read(table, list(dict.fromkeys([*short, *columns]))):
            parts.append(frame.select(short.keys()))
            if _is_damaged(table, parts[-1]):
                raise self._malformed(table, _DAMAGED)
            yield frame.select(columns)
        self._read_columns[table.name] = pl.concat(parts)

    @cached_property
    def _read_columns(self) -> dict[str, pl.DataFrame]:
        return {}

    @cached_property
    def end_sec(self) -> float:
        """When the session ended, in seconds since it began.

        The last time in any table for one that is not complete; never before that time.
        """
        last = max((self._last_time(table) for table in TABLES.values()), default=0.0)
        if self.state != "complete":
            return last
        began = wall_clock(self.metadata.get("started_at"))
        ended = wall_clock(self.metadata.get("ended_at"))
        if began is None or ended is None or ended - began > LONGEST_SEC:
            return last
        return max(last, ended - began)

    def _path(self, table: Table) -> Path:
        return self.directory / table.file

    def _extent(self, table: Table) -> Extent:
        """What of the file is read, the same in every pass over it."""
        if table.name not in self._extents:
            whole = self.state == "complete"
            with self._reading(table):
                self._extents[table.name] = extent(self._path(table), table, whole=whole)
        return self._extents[table.name]

    @cached_property
    def _extents(self) -> dict[str, Extent]:
        return {}

    def _last_time(self, table: Table) -> float:
        path = self._path(table)
        if not table.is_csv or not path.exists():
            return 0.0
        with self._reading(table):
            field = last_line(path).partition(b",")[0]
        try:
            time = float(field)
        except ValueError:
            # The header, or a malformed line that reading the table will tell of.
            return 0.0
        return time if 0 <= time <= LONGEST_SEC else 0.0

    @contextmanager
    def _reading(self, table: Table) -> Iterator[None]:
        path = self._path(table)
        try:
            yield
        except OSError as error:
            raise unreadable(path, error) from None
        except pl.exceptions.PolarsError as error:
            raise self._malformed(table, str(error).partition("\n")[0]) from None

    def _malformed(self, table: Table, otherwise: str) -> SessionError:
        path = self._path(table)
        known = table if self._tells_order(table) else replace(table, in_order=())
        with self._reading(table):
            fault = first_fault(path, known, self._extent(table).end)
        if fault is None:
            return SessionError(f"{path} is malformed: {otherwise}")
        line, what = fault
        return SessionError(
            f"{path}, line {line}: {what}; repair or remove that line, or make the table anew "
            f"with 'profilemate finalize' if {JOURNAL}/ is still there"
        )


def _is_utf8(path: Path) -> bool:
    """Whether Polars can open the file by its name: it takes no other than UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


_DAMAGED = "a line is cut short, a number out of range, or a row earlier than those before it"


def _is_damaged(table: Table, rows: pl.DataFrame) -> bool:
    """Whether a required value is missing, or a number is not one that its column may have."""
    sound = [
        *(pl.col(name).is_not_null().all() for name in table.required if name in rows.columns),
        *(
            # NaN is above every number here.
            pl.col(name).is_between(*bounds).all()
            for name, bounds in table.bounds.items()
            if name in rows.columns
        ),
    ]
    return bool(sound) and not all(rows.select(pl.all_horizontal(*sound)).row(0))


class _InOrder:
    """The order of a table's rows, one frame after the other."""

    def __init__(self, table: Table, columns: Sequence[str]) -> None:
        self._time, self._alike = table.time, table.in_order
        self._where = [
            pl.col(name).cast(pl.String).is_in(values)
            for name, values in table.in_order_where.items()
        ]
        needed = {self._time, *self._alike, *table.in_order_where}
        self._is_told = bool(self._alike) and needed <= {*columns}
        self._last: pl.DataFrame | None = None

    def goes_on(self, frame: pl.DataFrame) -> bool:
        """Whether each row is no earlier than the one before it that is alike."""
        if not self._is_told:
            return True
        rows = frame.filter(self._where) if self._where else frame
        rows = rows.select(self._time, *self._alike)
        if self._last is not None:
            rows = pl.concat([self._last, rows])
        in_order = rows[self._time].is_sorted()
        if in_order and all(rows[name].min() == rows[name].max() for name in self._alike):
            # One engine, as most sessions have: faster than to group the rows.
            self._last = rows.tail(1)
            return True
        self._last = rows.group_by(self._alike, maintain_order=True).last().select(rows.columns)
        if in_order:
            return True
        return not rows.select((pl.col(self._time).diff().over(self._alike) < 0).any()).item()


def open_session(
    path: str | os.PathLike[str] | None = None,
    *,
    complete: bool = True,
    after_sec: float = 0.0,
    after_requests: int = 0,
) -> Session:
    """Open a session: ``path`` as ``analysis.tables.find.find_session`` takes it.

    A session whose processes have ended but whose tables are not complete is completed first,
    unless ``complete`` is false; where that cannot be done it is read as it is.

    Warm-up is left out: the first ``after_sec`` seconds, and what came before the arrival of the
    request that follows the first ``after_requests`` ones. Where both are given, the later counts.

    Raises:
        SessionError: no session there, its metadata cannot be read or is of another format,
            nothing is left of it, or the warm-up is not a number from 0 on.

    """
    if not after_sec >= 0:
        raise SessionError(f"after_sec is {after_sec}; give a number of seconds from 0 on")
    if after_requests < 0:
        raise SessionError(f"after_requests is {after_requests}; give a number from 0 on")
    session = _opened(find_session(path), complete=complete)
    begin_sec = max(after_sec, _arrival(session, after_requests))
    if begin_sec and begin_sec >= session.end_sec:
        raise SessionError(
            f"nothing is left of {session.directory}: it ends at {session.end_sec:.6g} s, and what "
            f"came before {begin_sec:.6g} s is to be left out; leave out less"
        )
    return replace(session, begin_sec=begin_sec)


def _arrival(session: Session, number: int) -> float:
    """When the request arrived that ``number`` others came before, in seconds."""
    if not number:
        return 0.0
    requests = TABLES["requests"]
    arrivals = pl.Series([], dtype=pl.Float64)
    for batch in session.batches(requests.name, [requests.time]):
        arrivals.append(batch.to_series())
    if number >= len(arrivals):
        raise SessionError(
            f"nothing is left of {session.directory}: of its requests {len(arrivals):,} have "
            f"ended, and {number:,} are to be left out; leave out fewer"
        )
    arrival: float = arrivals.sort()[number] * requests.time_unit
    return arrival


def _opened(directory: Path, *, complete: bool) -> Session:
    # Looked for first: the journal goes only after the metadata says that the tables are complete.
    has_journal = (directory / JOURNAL).is_dir()
    metadata = _metadata(directory)
    if metadata.get("complete") is True:
        return Session(directory, metadata, "complete")
    if not has_journal:
        return Session(directory, metadata, "cut off", _without_journal(metadata))
    if not complete:
        return Session(directory, metadata, "cut off", f"read as it is, without {JOURNAL}/")
    state, note = completing.complete(directory)
    metadata = _metadata(directory)
    if state == "complete" and metadata.get("complete") is not True:
        state, note = "cut off", _without_journal(metadata)
    return Session(directory, metadata, state, note)


def _without_journal(metadata: Mapping[str, Any]) -> str:
    if metadata.get("ended_at") is None:
        return f"{JOURNAL}/ is missing, so what only it held is not in the tables"
    return "all that was recorded is in the tables, but the record has gaps (see the warnings)"


def _metadata(directory: Path) -> Mapping[str, Any]:
    path = directory / METADATA
    try:
        metadata = json.loads(path.read_bytes(), parse_constant=no_number)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise unreadable(path, error) from None
    except json.JSONDecodeError as error:
        raise SessionError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from None
    except UnicodeDecodeError:
        raise SessionError(f"{path}: not UTF-8 text") from None
    except RecursionError:
        raise SessionError(f"{path}: not JSON (nested too deeply)") from None
    except ValueError as error:
        # NaN and its like, or a number of thousands of digits.
        what = str(error).partition(":")[0]
        raise SessionError(f"{path}: not JSON ({what})") from None
    if not isinstance(metadata, dict):
        raise SessionError(f"{path}: not a JSON object")
    version = metadata.get("format_version")
    if version != FORMAT_VERSION:
        raise SessionError(
            f"{path}: format_version is {version!r}, and this analyzer reads {FORMAT_VERSION}; "
            "use the profilemate that wrote the session, or a newer one"
        )
    return metadata


def wall_clock(moment: Any) -> float | None:
    """Seconds since 1970 of a time in metadata.json: a number already, or ISO 8601 text."""
    if isinstance(moment, (int, float)) and not isinstance(moment, bool):
        return float(moment) if 0 <= moment <= _LATEST_SEC else None
    try:
        return datetime.fromisoformat(str(moment).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None


_LATEST_SEC = 253402300799
"""The end of the year 9999."""
