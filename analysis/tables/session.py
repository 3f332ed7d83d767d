# SPDX-License-Identifier: Apache-2.0
"""Open a session, and read its tables, as lazy frames or batch by batch.

Reading checks the tables. No table is held in memory. Of a session that is still being written,
the tables are read up to their last finished line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl
from polars.io.plugins import register_io_source

from analysis.errors import SessionError, unreadable
from analysis.tables import (
    completing,
    labels,
    marks,
    pauses,
    remote,
    run_totals,
    session_files,
    window,
)
from analysis.tables.completing import State as State
from analysis.tables.faults import first_fault, shown
from analysis.tables.find import find_session
from analysis.tables.labels import Label
from analysis.tables.metadata import number, part, parts, text, wall_clock, whole
from analysis.tables.metadata import read as metadata_of
from analysis.tables.owner import another as owner_of_another
from analysis.tables.pauses import Period
from analysis.tables.pieces import Piece
from analysis.tables.reading import (
    Extent,
    ahead,
    csv_schema,
    extent,
    frames,
    last_line,
    of_csv,
    text_of,
)
from analysis.tables.remote import Copy
from analysis.tables.schema import LONGEST_SEC, TABLES, Table
from analysis.tables.segments import Files
from analysis.tables.snapshot import Snapshot
from analysis.tables.snapshot import of as snapshot_of
from analysis.tables.soundness import DAMAGED, Order, is_damaged
from analysis.tables.window import Window
from profilemate.format.segments import folder_name
from profilemate.format.session import JOURNAL_FOLDER, KEPT_FOLDER, METADATA_FILE
from profilemate.format.urls import is_url

_ROWS = 100_000

QUIET_SEC = 60.0
"""Of a session that runs, metadata.json is never older than this, even on a busy machine."""


@dataclass(frozen=True)
class Session:
    """A session's folder, opened for reading.

    ``state``: ``complete`` (every event is in the tables), ``running`` (a process still records)
    or ``cut off`` (it ended, and events that were only in the journal are lost).
    ``note``: one sentence on a session that is not complete, is another user's or a snapshot, else
    None.
    ``metadata``: metadata.json as it is; empty where the file is missing.
    ``begin_sec``: the end of the warm-up, which figures leave out; 0 leaves nothing out. Never
    before the beginning of the window.
    ``window``: what is left of the run; None where all of it is.
    ``period``: between which pauses of the recording the figures are; None where it never paused.
    ``files``: what the tables are made of.
    ``labels``: the names that the user gives to requests.
    ``copy``: what keeps the folder, where the session was fetched from object storage.
    """

    directory: Path
    metadata: Mapping[str, Any]
    state: State
    note: str | None = None
    begin_sec: float = 0.0
    window: Window | None = None
    period: Period | None = None
    files: Files = field(default_factory=Files, repr=False)
    labels: tuple[Label, ...] = ()
    copy: Copy | None = field(default=None, repr=False)

    @property
    def outputs(self) -> Path:
        """Where a command puts a file about the session, unless it is told: beside its tables, or
        in the current folder where these are a copy."""
        return self.directory if self.copy is None else Path.cwd()

    @property
    def url(self) -> str | None:
        """Where it is in object storage; None for a folder."""
        return None if self.copy is None else self.copy.url

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """Of which session it is a snapshot; None if it is none."""
        return snapshot_of(self.metadata)

    @property
    def missing_bytes(self) -> int | None:
        """Bytes of tables that the collector wrote and that are not there; None where the session
        is not complete."""
        if self.state != "complete":
            return None
        written = whole(part(self.metadata, "cost").get("table_bytes")) or 0
        removed = 0 if self.window is None else self.window.removed_bytes
        return max(0, written - removed - self.files.text_bytes())

    @property
    def goes_on(self) -> bool:
        """Whether vLLM ran when the tables were written: they need not reach equally far then, and
        requests had not ended."""
        return self.state == "running" or bool(self.snapshot and self.snapshot.was_running)

    @property
    def has_tables(self) -> bool:
        """Whether there is a file of a table."""
        return any(map(self.has_table, TABLES))

    def has_table(self, table: str) -> bool:
        """Whether there is a file of this table."""
        return any(piece.is_there() for piece in self._pieces(TABLES[table]))

    def after(self, begin_sec: float) -> Session:
        """The session without what came before this time, or before the beginning of the window."""
        earliest = 0.0 if self.window is None else self.window.begin_sec
        if self.period is not None:
            earliest = max(earliest, self.period.begin_sec)
        return replace(self, begin_sec=max(begin_sec, earliest))

    def scan(self, table: str, *, history: bool = False) -> pl.LazyFrame:
        """A table as a lazy frame, in the file's order; an empty one where the file is missing.

        ``docs/tables.md`` describes the columns and their units. They have the types of
        ``analysis.tables.schema``, whatever the values. To collect it, use ``collect``, which
        turns an error of Polars into one line that names the file and the line.

        Args:
            table: its name, such as ``kv_cache_evictions``.
            history: include the rows from before ``begin_sec``, which explain what came after.

        Raises:
            SessionError: the file cannot be read, or its header is not the table's.

        """
        known = TABLES[table]
        whole = self._scan(known)
        if self.period is not None:
            whole = whole.filter(_of_period(self.period, known))
        if history or not self.begin_sec:
            return whole
        return whole.filter(self.in_window(table))

    def in_window(self, table: str) -> pl.Expr:
        """Whether a row of this table is not part of the warm-up."""
        known = TABLES[table]
        return pl.col(known.time) * known.time_unit >= self.begin_sec

    def _scan(self, known: Table) -> pl.LazyFrame:
        extents = self._extents(known)
        columns = list(known.columns)
        if not extents:
            return pl.LazyFrame(schema=dict(known.columns))
        first = extents[0]
        is_one = len(extents) == 1 and known.is_csv and _is_utf8(first.piece.path)
        if is_one and first.piece.rows is not None:
            return first.piece.rows.lazy()
        if self.state == "complete" and is_one and first.piece.is_plain:
            return pl.scan_csv(
                first.piece.path,
                has_header=False,
                skip_rows=1,
                schema=csv_schema(known, first),
                glob=False,
            ).select(of_csv(known, first, columns))

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
        """The result of a query over a table, computed by Polars' streaming engine.

        The first query checks the table. An empty required value means that a line is cut short;
        a number out of bounds, a row that breaks a rule of ``analysis.tables.rules``, or rows out
        of order, mean damage.

        Args:
            table: its name.
            query: makes a lazy frame out of that of ``scan``.
            history: include the rows from before ``begin_sec``.

        Raises:
            SessionError: the file cannot be read, or a line of it is malformed.

        """
        known = TABLES[table]
        with self._reading(known):
            # Checked apart from the query, which then reads only the columns that it needs.
            if self._is_slow(known):
                self._short_columns(known)
            elif table not in self._checked:
                for _ in self.batches(table, known.checked, history=True):
                    pass
            return query(self.scan(table, history=history)).collect(engine="streaming")

    def batches(
        self, table: str, columns: Sequence[str], *, history: bool = False
    ) -> Iterator[pl.DataFrame]:
        """These columns of a table, in the file's order, some 100,000 rows at a time.

        Args:
            table: its name.
            columns: of the table, in the wanted order.
            history: include the rows from before ``begin_sec``.

        Raises:
            SessionError: the file cannot be read, or a line of it is malformed.

        """
        known = TABLES[table]
        with self._reading(known):
            kept = self._kept(known, history=history)
            needed = [] if kept is None else kept.meta.root_names()
            wanted = list(dict.fromkeys([*columns, *needed]))
            in_order = Order(known, wanted if self._is_ordered(known) else ())
            openings = self._openings(known)
            for count, frame in enumerate(ahead(self._frames(known, wanted))):
                # Numbers in an opening, which sums up, need not rise.
                goes_on = count < openings or in_order.goes_on(frame)
                if is_damaged(known, frame) or not goes_on:
                    raise self._malformed(known, DAMAGED)
                yield frame if kept is None else frame.filter(kept).select(columns)
            if {*known.checked} <= {*wanted}:
                self._checked.add(table)

    def _kept(self, known: Table, *, history: bool) -> pl.Expr | None:
        """Which rows count; None where all do."""
        parts = [] if self.period is None else [_of_period(self.period, known)]
        if self.begin_sec and not history:
            parts.append(self.in_window(known.name))
        return pl.all_horizontal(parts) if parts else None

    @cached_property
    def _checked(self) -> set[str]:
        """Tables whose rows have all been read and were sound."""
        return set()

    def _is_ordered(self, table: Table) -> bool:
        """Not with a KV connector: a lookup that waits for a transfer is recorded when it ends."""
        return not (
            table.in_order_where and text(part(self.metadata, "scheduler").get("connector"))
        )

    def _frames(self, table: Table, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        is_read = table.name in self._read_columns and not table.lists.isdisjoint(columns)
        if is_read or not self._is_slow(table):
            yield from self._read(table, columns)
        elif table.lists.isdisjoint(columns):
            yield from self._short_columns(table).select(columns).iter_slices(_ROWS)
        else:
            yield from self._with_short_columns(table, columns)

    def _is_slow(self, table: Table) -> bool:
        """Whether reading some of its columns takes as long as reading all: it is JSON."""
        return not table.is_csv and all(one.piece.rows is None for one in self._extents(table))

    def _read(self, table: Table, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        return frames(self._extents(table), table, columns)

    def _short_columns(self, table: Table) -> pl.DataFrame:
        """The columns of a JSON-lines table that are no lists, kept in memory.

        They are a small part of it, many modules ask for a few of them, and JSON is slow to read.
        """
        if table.name not in self._read_columns:
            for _ in self._with_short_columns(table, ()):
                pass
        return self._read_columns[table.name]

    def _with_short_columns(self, table: Table, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """These columns; also read and keep the columns that are no lists."""
        short = {name: kind for name, kind in table.columns.items() if name not in table.lists}
        parts = [pl.DataFrame(schema=short)]
        for frame in self._read(table, list(dict.fromkeys([*short, *columns]))):
            parts.append(frame.select(short.keys()))
            if is_damaged(table, parts[-1]):
                raise self._malformed(table, DAMAGED)
            yield frame.select(columns)
        self._read_columns[table.name] = pl.concat(parts)

    @cached_property
    def _read_columns(self) -> dict[str, pl.DataFrame]:
        return {}

    @cached_property
    def end_sec(self) -> float:
        """When the session ended, in seconds since it began.

        For a session that is not complete, the last time in any table. Never before that time.
        Where the recording paused later, the end of the period.
        """
        if self.period is not None and self.period.end_sec is not None:
            return self.period.end_sec
        last = max((self._last_time(table) for table in TABLES.values()), default=0.0)
        if self.state != "complete":
            return last
        began = wall_clock(self.metadata.get("started_at"))
        ended = wall_clock(self.metadata.get("ended_at"))
        if began is None or ended is None or ended - began > LONGEST_SEC:
            return last
        return max(last, ended - began)

    def plain_text(self, table: str) -> Iterator[bytes]:
        """The text of a table's files that are not packed, as of one file, up to the last finished
        line; nothing where there is no row.

        Raises:
            SessionError: a file cannot be read.

        """
        known = TABLES[table]
        plain = [one for one in self._extents(known) if one.piece.is_plain]
        return text_of(plain)

    def _pieces(self, table: Table) -> tuple[Piece, ...]:
        """The table's files. What comes while the session is read is left for the next time."""
        if table.name in self.files.plain:
            return self.files.of(table)
        return (Piece(self.directory / table.file),)

    def _extents(self, table: Table) -> tuple[Extent, ...]:
        """Which bytes of its files are read. They are the same in every pass over them."""
        if table.name not in self._known_extents:
            is_whole = self.state == "complete"
            with self._reading(table):
                found = [extent(piece, table, whole=is_whole) for piece in self._pieces(table)]
            self._known_extents[table.name] = tuple(one for one in found if not one.is_empty)
        return self._known_extents[table.name]

    @cached_property
    def _known_extents(self) -> dict[str, tuple[Extent, ...]]:
        return {}

    def _openings(self, table: Table) -> int:
        """How many of the first frames of a CSV table are openings."""
        is_opening = (one.piece.before_sec is not None for one in self._extents(table))
        return sum(is_opening) if table.is_csv else 0

    def _last_time(self, table: Table) -> float:
        if not table.is_csv or next(iter(table.columns)) != table.time:
            return 0.0
        for piece in reversed(self._pieces(table)):
            if piece.packed is not None:
                return piece.packed.last_sec or 0.0
            if piece.rows is not None:
                self._extents(table)  # It is checked before any of it counts.
                last = piece.rows.last_time() or 0.0
                return last if 0 <= last <= LONGEST_SEC else 0.0
            if piece.is_there() and (time := self._last_time_in(piece, table)) is not None:
                return time
        return 0.0

    def _last_time_in(self, piece: Piece, table: Table) -> float | None:
        """The last time in a file of lines; None where it has no row."""
        with self._reading(table):
            cell = last_line(piece, table).partition(b",")[0]
        try:
            last = float(cell)
        except ValueError:
            # It is the header, or a malformed line, which reading the table reports.
            return None
        return last if 0 <= last <= LONGEST_SEC else 0.0

    @contextmanager
    def _reading(self, table: Table) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise unreadable(self.directory / table.file, error) from None
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
            raise self._malformed(table, str(error).partition("\n")[0]) from None

    def _malformed(self, table: Table, otherwise: str) -> SessionError:
        known = table if self._is_ordered(table) else replace(table, in_order=())
        with self._reading(table):
            fault = first_fault([(one.piece, one.end) for one in self._extents(table)], known)
        if fault is None:
            return SessionError(f"{self.directory / table.file} is malformed: {otherwise}")
        remedy = (
            "restore the recorded file"
            if not fault.is_plain
            else "repair or remove that line, or make the table again with 'profilemate finalize' "
            f"if {JOURNAL_FOLDER}/ is still there"
        )
        return SessionError(f"{fault.path}, line {fault.line}: {fault.what}; {remedy}")


def _of_period(period: Period, known: Table) -> pl.Expr:
    """Which rows of a table are of this period of the recording."""
    time = pl.col(known.time) * known.time_unit
    parts = [pl.lit(True)]
    if "engine" in known.columns and period.since:
        since = pl.col("engine").replace_strict(
            dict(period.since), default=0.0, return_dtype=pl.Float64
        )
        parts.append(time >= since)
    if period.end_sec is not None:
        parts.append(time.fill_null(0.0) <= period.end_sec)
        if "finish_sec" in known.columns:
            parts.append(pl.col("finish_sec") <= period.end_sec)
    return pl.all_horizontal(parts)


def _is_utf8(path: Path) -> bool:
    """Whether Polars can open the file by its name, which must be UTF-8."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def open_session(
    path: str | os.PathLike[str] | None = None,
    *,
    complete: bool = True,
    after_sec: float = 0.0,
    after_requests: int = 0,
    last_half: bool = False,
    after_mark: str | None = None,
    period: int | None = None,
    label_rules: str | os.PathLike[str] | None = None,
) -> Session:
    """Open a session.

    If its processes have ended and its tables are not complete, they are completed first. Where
    that cannot be done, or the session is another user's, it is read as it is.

    Args:
        path: a session's folder, or a folder of sessions, of which the newest is opened; None for
            the default folder of sessions. Or the same as a URL of object storage, or a glob of
            such URLs: then the session is fetched first.
        complete: complete the tables where that is needed.
        after_sec: leave the first so many seconds out, as warm-up.
        after_requests: leave out what came before the arrival of the request that follows the
            first so many.
        after_mark: leave out what came before the user made this mark.
        last_half: leave out what came before the second half of its requests. The latest of these
            moments counts.
        period: the part of the recording between two pauses, counted from 1; None for the last.
        label_rules: a file of rules that name requests, as ``analysis.tables.labels`` reads it.

    Raises:
        SessionError: there is no session, its metadata cannot be read or is of another format,
            nothing is left of it, there is no such period, the warm-up is not a number from 0 on,
            or a rule is none.

    """
    if not after_sec >= 0:
        raise SessionError(f"after_sec is {after_sec}; give a number of seconds from 0 on")
    if after_requests < 0:
        raise SessionError(f"after_requests is {after_requests}; give a number from 0 on")
    rules = () if label_rules is None else labels.read(Path(label_rules))
    session = _with_files(_found(path, complete=complete), period)
    session = replace(session, labels=rules)
    marked_sec = 0.0 if after_mark is None else marks.moment_of(session.directory, after_mark)
    asked_sec = max(after_sec, marked_sec, _arrival(session, after_requests, last_half=last_half))
    if asked_sec and asked_sec >= session.end_sec:
        raise SessionError(
            f"nothing is left of {session.directory}: it ends at {session.end_sec:.6g} s, and what "
            f"came before {asked_sec:.6g} s is to be left out; leave out less"
        )
    return session.after(asked_sec)


def _found(path: str | os.PathLike[str] | None, *, complete: bool) -> Session:
    """The session that is meant, without its files."""
    if path is None or not is_url(path):
        return _opened(find_session(path), complete=complete)
    copy = remote.fetch(remote.sessions_at(path)[0])
    metadata = metadata_of(copy.directory)
    state: State = "complete"
    note = f"it was fetched from {copy.url}"
    if metadata.get("complete") is not True:
        is_on_its_way = remote.is_on_its_way(copy)
        state = "running" if is_on_its_way else "cut off"
        why = _without_journal(copy.directory, metadata)
        if is_on_its_way:
            why = "it is still being uploaded, and what follows is what is there so far"
        note = f"{note}; {why}"
    if copy.left_out:
        note = (
            f"{note}; a segment after {folder_name(copy.left_out[-1])} is missing there, and what "
            "follows is what came after it"
        )
    notes = [note, _of_snapshot(metadata)]
    return Session(copy.directory, metadata, state, "; ".join(filter(None, notes)), copy=copy)


def _with_files(session: Session, period: int | None) -> Session:
    """The session with its files, and what is left of its run.

    Raises:
        SessionError: a segment is missing or damaged, there is no such period, or nothing has come
            since all before the window was removed.

    """
    files = session_files.find(session.directory, hold=session.state != "complete")
    session = replace(
        session,
        files=files,
        window=window.of(files, session.metadata),
        period=pauses.period(session.metadata, period),
    )
    if session.window is not None and session.window.begin_sec >= session.end_sec:
        raise SessionError(
            f"nothing is left of {session.directory}: what came before "
            f"{session.window.begin_sec:.6g} s was removed, and nothing has come since"
        )
    if session.period is not None and session.period.begin_sec >= session.end_sec:
        raise SessionError(
            f"nothing is left of {session.directory}: its recording went on at "
            f"{session.period.begin_sec:.6g} s, and nothing has come since; 'profilemate summary "
            "--period 1' shows what came before"
        )
    return session.after(0)


def _arrival(session: Session, number: int, *, last_half: bool) -> float:
    """When the request arrived that follows the first ``number`` ones, in seconds, or the first one
    of the last half, where that is later."""
    if not number and not last_half:
        return 0.0
    requests = TABLES["requests"]
    arrivals = pl.Series([], dtype=pl.Float64)
    for batch in session.batches(requests.name, [requests.time], history=True):
        arrivals.append(batch.to_series())
    removed = _removed(session, len(arrivals))
    if last_half:
        number = max(number, (removed + len(arrivals)) // 2)
    if number >= removed + len(arrivals):
        raise SessionError(
            f"nothing is left of {session.directory}: of its requests "
            f"{removed + len(arrivals):,} have ended, and {number:,} are to be left out; leave out "
            "fewer"
        )
    if number < removed:
        return 0.0
    arrival: float = arrivals.sort()[number - removed] * requests.time_unit
    return arrival


def _removed(session: Session, left: int) -> int:
    """How many requests ended whose rows were removed; 0 where it was not counted."""
    if session.window is None:
        return 0
    run = run_totals.read(session.directory)
    return 0 if run is None else max(0, run.ended - left)


def _opened(directory: Path, *, complete: bool) -> Session:
    # Looked for first: the collector removes it after metadata.json says that all is complete.
    has_journal = (directory / JOURNAL_FOLDER).is_dir()
    metadata = metadata_of(directory)
    owner = owner_of_another(directory)
    if metadata.get("complete") is True:
        notes = [
            _of_hosts(metadata),
            _of_snapshot(metadata),
            "" if owner is None else f"it belongs to {owner}",
        ]
        return Session(directory, metadata, "complete", "; ".join(filter(None, notes)) or None)
    if owner is not None:
        return Session(
            directory, metadata, _state_of_anothers(directory, metadata), _anothers(owner)
        )
    if not has_journal:
        notes = [_of_snapshot(metadata), _without_journal(directory, metadata)]
        return Session(directory, metadata, "cut off", "; ".join(filter(None, notes)))
    if not complete:
        return Session(directory, metadata, "cut off", f"read as it is, without {JOURNAL_FOLDER}/")
    state, note = completing.complete(directory)
    metadata = metadata_of(directory)
    if state == "complete" and metadata.get("complete") is not True:
        state, note = "cut off", _without_journal(directory, metadata)
    return Session(directory, metadata, state, note)


def _of_hosts(metadata: Mapping[str, Any]) -> str:
    """Which sessions were joined, and how sure their times are; empty where none were."""
    joined = part(metadata, "joined")
    hosts = [shown(text(one.get("host")) or "an unknown host") for one in parts(joined, "parts")]
    if not hosts:
        return ""
    error = number(joined.get("error_sec"))
    sure = (
        "how far their clocks are apart is not known, as no time service (NTP) is known to set them"
        if error is None
        else f"their clocks agree to within {1000 * error:.3g} ms, as their kernels say"
    )
    name = shown(str(metadata.get("deployment")))
    return f"{len(hosts)} sessions of deployment {name}, on {', '.join(hosts)}; {sure}"


def _of_snapshot(metadata: Mapping[str, Any]) -> str:
    snapshot = snapshot_of(metadata)
    if snapshot is None:
        return ""
    reason = f" ({snapshot.reason})" if snapshot.reason else ""
    return f"it is a snapshot of {snapshot.of}, taken {snapshot.taken_at}{reason}"


def _anothers(owner: str) -> str:
    return (
        f"it belongs to {owner} and has not been completed; once vLLM has ended, 'profilemate "
        "finalize' as that user does it"
    )


def _state_of_anothers(directory: Path, metadata: Mapping[str, Any]) -> State:
    """Whether another user's session runs: its collector then writes metadata.json all the time."""
    if metadata.get("ended_at") is not None:
        return "cut off"
    try:
        quiet_sec = time.time() - (directory / METADATA_FILE).stat().st_mtime
    except FileNotFoundError:
        return "cut off"
    return "running" if quiet_sec < QUIET_SEC else "cut off"


def _without_journal(directory: Path, metadata: Mapping[str, Any]) -> str:
    if (directory / KEPT_FOLDER).is_dir():
        return (
            f"not all of its journal could be read; {KEPT_FOLDER}/ has it, for a later release "
            "that may read more"
        )
    if metadata.get("ended_at") is None:
        return f"{JOURNAL_FOLDER}/ is missing, so what only it held is not in the tables"
    return "all that was recorded is in the tables, but the record has gaps (see the warnings)"
