# SPDX-License-Identifier: Apache-2.0
"""Which requests arrived, when, how long, and with which contents?

Read out of a session's requests.jsonl, or out of a trace in the Mooncake format (one JSON object
a line with ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``; a ``block_size`` if
an id does not stand for 512 tokens).
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from analysis.errors import SessionError
from analysis.gpu import memory
from analysis.gpu.memory import StartUp
from analysis.stats import quantiles
from analysis.tables import facts, lookups
from analysis.tables.facts import Facts
from analysis.tables.schema import TABLES
from analysis.tables.session import Session, open_session
from analysis.whatif.ids import Ids, Ints, offsets
from analysis.whatif.outcome import Outcome

MOST_TOKENS = 100_000_000
"""Of a prompt or an answer in a trace: no model takes more."""

TRACE_BLOCK_TOKENS = 512
"""What an id of a trace stands for, where the trace does not say."""

UNIQUE = -1
"""Ids from here down stand for contents that nothing else has; other ids are not negative."""

TABLE = TABLES["requests"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class NothingToTry(SessionError):  # noqa: N818 - it is no error of the session's
    """No request ended, or their contents are not told in one size, or more than is wanted."""


@dataclass(frozen=True)
class Measured:
    """What the session itself was, and did.

    ``facts``: its configuration. ``num_blocks``: usable blocks of an engine's pool, without the
    null block, and ``block_size`` in tokens, None where it does not tell. ``start_up``: where the
    memory of the worker with the least of it went. ``outcome``: the result; None where the session
    does not tell how large the pool was.
    """

    facts: Facts
    num_blocks: int | None
    block_size: int | None
    start_up: StartUp | None
    outcome: Outcome | None


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival; every array and list has one entry for each.

    ``name``: the folder or file, as given. ``measured``: None for a plain trace. ``block_size``:
    tokens that an id stands for. ``told``: whether the contents are known; not for a session with
    prefix caching off.

    ``arrival_sec``: since the session or the trace began. ``input_tokens`` and ``output_tokens``:
    lengths; ``computed_tokens``: tokens that were ever computed or found. A request's last output
    token never is, and one that was aborted while it waited has none.

    ``prompt_ids``: contents of the prompt's blocks; a last partial one has an id that occurs once.
    ``output_ids``: contents of the full blocks that follow, first the one that the end of the
    prompt and the output share. An id stands for all content up to the end of its block.

    ``admitted_sec``, ``first_token_sec`` and ``finish_sec``: NaN where not known. ``engine``: its
    data-parallel rank; ``tenant``: a number for its cache salt, -1 without; ``priority``.
    ``aborted``: its client went away. ``counts``: not part of the warm-up.
    """

    name: str
    measured: Measured | None
    block_size: int
    told: bool
    arrival_sec: Floats
    input_tokens: Ints
    output_tokens: Ints
    computed_tokens: Ints
    prompt_ids: Ids
    output_ids: Ids
    admitted_sec: Floats
    first_token_sec: Floats
    finish_sec: Floats
    engine: Ints
    tenant: Ints
    priority: Ints
    aborted: Bools
    counts: Bools

    def __len__(self) -> int:
        return len(self.arrival_sec)

    @property
    def engines(self) -> tuple[int, ...]:
        """The data-parallel ranks that have requests."""
        return tuple(np.unique(self.engine).tolist())

    def take(self, chosen: Ints) -> Workload:
        """These requests, in this order."""
        arrays = {
            field.name: getattr(self, field.name)[chosen]
            for field in fields(self)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        return replace(
            self,
            **arrays,
            prompt_ids=self.prompt_ids.take(chosen),
            output_ids=self.output_ids.take(chosen),
        )

    def of_engine(self, engine: int) -> Workload:
        """The requests of one data-parallel rank."""
        return self.take(np.flatnonzero(self.engine == engine))

    def chains(self) -> Ids:
        """Of each request, the contents of all full blocks that were computed or found, in order:
        those of the prompt, then those of the output; ones that are not told are like no other."""
        full = self.prompt_ids.head(self.input_tokens // self.block_size)
        return _padded(full + self.output_ids, self.computed_tokens // self.block_size)

    def resized(self, block_size: int) -> Workload:
        """The same requests with ids that stand for ``block_size`` tokens.

        Where a new block ends inside an old one, two requests are taken to share it only if they
        share the old one to its end: what is less than a block in common is not known. So the
        result is exact for multiples of the old size, and a lower bound for others.
        """
        if block_size == self.block_size:
            return self
        old = self.prompt_ids.head(self.input_tokens // self.block_size) + self.output_ids
        total = self.input_tokens + self.output_tokens
        known = np.minimum(old.lengths, total // self.block_size)
        lengths = total // block_size
        new = Ids(np.empty(lengths.sum(), np.int64), offsets(lengths))
        index, row = new.positions, new.rows
        # The old block that holds the new one's last token.
        holder = ((index + 1) * block_size - 1) // self.block_size
        inside = holder < known[row]
        pairs = np.stack([old.values[(old.offsets[:-1][row] + holder)[inside]], index[inside]])
        values = _unique(len(index))
        values[inside] = np.unique(pairs, axis=1, return_inverse=True)[1].ravel()
        new = Ids(values, new.offsets)
        prompt = self.input_tokens // block_size
        partial = (self.input_tokens % block_size > 0).astype(np.int64)
        ends = Ids(_unique(int(partial.sum()), len(values) + 1), offsets(partial))
        after = new.positions >= np.repeat(prompt, new.lengths)
        output = Ids(new.values[after], offsets(new.lengths - prompt))
        return replace(
            self, block_size=block_size, prompt_ids=new.head(prompt) + ends, output_ids=output
        )


def read_workload(
    path: str | os.PathLike[str] | None = None, *, engine: int | None = None
) -> Workload:
    """The requests of a session's folder (or as ``analysis.open_session`` takes it), or of
    a trace, which is a file; with ``engine``, those of this data-parallel rank.

    Raises:
        SessionError: neither is there, it cannot be read, or it holds no request.

    """
    if path is not None and Path(path).is_file():
        found = _of_trace(Path(path))
        if engine:
            raise SessionError(f"{path} is a trace: it has no engine {engine}")
        return found
    return of_session(open_session(path), engine=engine)


def of_session(
    session: Session, *, engine: int | None = None, most_blocks: int | None = None
) -> Workload:
    """The requests of a session that have ended, its warm-up included; with ``engine``, those of
    this data-parallel rank.

    Raises:
        NothingToTry: there is none, or together they held more than ``most_blocks``.
        SessionError: a table cannot be read.

    """
    known = facts.read(session)
    own = pl.lit(True) if engine is None else pl.col("engine").fill_null(0) == engine
    found = _workload(str(session.directory), _batches(session, own, most_blocks), known)
    if not len(found):
        whose = "" if engine is None else f" of engine {engine}"
        raise NothingToTry(
            f"{session.directory}: {TABLE.file} tells of no request{whose} that ended, so there "
            "is nothing to try again"
        )
    found = replace(found, counts=found.arrival_sec >= session.begin_sec)
    return replace(found, measured=_measured(session, known, found, own))


def _batches(session: Session, own: pl.Expr, most_blocks: int | None) -> Iterator[pl.DataFrame]:
    blocks = 0
    for batch in session.batches(TABLE.name, COLUMNS, history=True):
        rows = batch.filter(own)
        yield rows
        blocks += int(rows.select(pl.col(*LISTS).list.len().sum()).sum_horizontal().item() or 0)
        if most_blocks is not None and blocks > most_blocks:
            raise NothingToTry(f"its requests held more than {most_blocks:,} blocks")


LISTS = ("hash_ids", "output_hash_ids")

COLUMNS = (
    "timestamp",
    "input_length",
    "output_length",
    "hash_ids",
    "block_size",
    "engine",
    "output_hash_ids",
    "queue_sec",
    "first_token_sec",
    "finish_sec",
    "finish_reason",
    "computed_tokens",
    "tenant",
    "priority",
)
"""Of requests.jsonl."""

_TRACE = ("timestamp", "input_length", "output_length", "hash_ids")
"""Of a trace: what every line must have."""


def _of_trace(path: Path) -> Workload:
    schema = {name: TABLE.columns[name] for name in (*_TRACE, "block_size")}
    try:
        content = path.read_bytes()
        if content.startswith(b"\x1f\x8b"):
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        said = getattr(error, "strerror", None) or error
        raise SessionError(f"cannot read {path}: {said}") from None
    if not content.strip():
        raise SessionError(f"{path} is empty; name a trace with one request a line")
    try:
        rows = pl.read_ndjson(io.BytesIO(content), schema=schema)
    except pl.exceptions.PolarsError as error:
        raise SessionError(_fault(path, content) or f"{path} is malformed: {error}") from None
    size = pl.col("block_size").fill_null(TRACE_BLOCK_TOKENS)
    sound = pl.all_horizontal(
        *(pl.col(name).is_not_null() for name in _TRACE),
        pl.col("timestamp", "input_length", "output_length") >= 0,
        pl.col("input_length", "output_length") <= MOST_TOKENS,
        pl.col("input_length") > 0,
        size > 0,
        pl.col("hash_ids").list.len() >= pl.col("input_length") // size,
    )
    if not rows.select(sound.fill_null(False).all()).item():
        raise SessionError(_fault(path, content) or f"{path} is malformed")
    more = [pl.lit(None, TABLE.columns[name]).alias(name) for name in COLUMNS if name not in schema]
    return _workload(str(path), [rows.with_columns(size, *more).select(COLUMNS)], None)


def _fault(path: Path, content: bytes) -> str | None:
    """The first line of a trace that is none, and why."""
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip() and (what := _line_fault(line)):
            return f"{path}, line {number}: {what}; repair or remove that line"
    return None


def _line_fault(line: bytes) -> str | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return "it is not JSON"
    if not isinstance(row, Mapping):
        return "it is not an object"
    for name in _TRACE[:3]:
        value = row.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            return f"{name} is missing or not a number from 0 on"
        if name != "timestamp" and (value > MOST_TOKENS or value != int(value)):
            return f"{name} is no number of tokens, or over {MOST_TOKENS:,}"
    if not row["input_length"]:
        return "input_length is 0: a request has a prompt"
    return _ids_fault(row)


def _ids_fault(row: Mapping[str, Any]) -> str | None:
    size = row.get("block_size", TRACE_BLOCK_TOKENS)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        return "block_size is not a number from 1 on"
    ids = row.get("hash_ids")
    if not isinstance(ids, list) or any(type(number) is not int for number in ids):
        return "hash_ids is not a list of whole numbers"
    if any(not -(2**63) <= number < 2**63 for number in ids):
        return "hash_ids has numbers of more than 64 bits"
    full = int(row["input_length"]) // size
    if len(ids) < full:
        return f"hash_ids has {len(ids):,} ids where the prompt has {full:,} blocks of {size:,}"
    return None


def _workload(name: str, batches: Iterable[pl.DataFrame], known: Facts | None) -> Workload:
    """The requests of these rows, sorted by arrival."""
    parts: dict[str, list[Any]] = {column: [] for column in COLUMNS}
    for batch in batches:
        for column in COLUMNS:
            values = batch[column]
            parts[column].append(_lists(values) if column in LISTS else values)
    ids = {column: _joined(parts[column]) for column in LISTS}
    columns = {
        column: pl.concat([pl.Series([], dtype=TABLE.columns[column]), *parts[column]])
        for column in COLUMNS
        if column not in ids
    }
    # A trace has ids for all full blocks, if there are any.
    told = known is None or bool(ids["hash_ids"].values.size)
    size = _block_size(name, columns["block_size"], known)
    lengths, outputs = (_ints(columns[f"{what}_length"]) for what in ("input", "output"))
    arrival = _floats(columns["timestamp"]) * TABLE.time_unit
    generated = lengths + np.maximum(outputs, 1) - 1
    computed = columns["computed_tokens"]
    found = Workload(
        name=name,
        measured=None,
        block_size=size,
        told=told,
        arrival_sec=arrival,
        input_tokens=lengths,
        output_tokens=outputs,
        computed_tokens=np.where(computed.is_null().to_numpy(), generated, _ints(computed)),
        prompt_ids=_padded(ids["hash_ids"], -(-lengths // size)),
        output_ids=ids["output_hash_ids"],
        admitted_sec=arrival + _floats(columns["queue_sec"]),
        first_token_sec=_floats(columns["first_token_sec"]),
        finish_sec=_floats(columns["finish_sec"]),
        engine=_ints(columns["engine"]),
        tenant=_ints(columns["tenant"], -1),
        priority=_ints(columns["priority"]),
        aborted=(columns["finish_reason"] == "abort").fill_null(False).to_numpy(),
        counts=np.ones(len(arrival), np.bool_),
    )
    return found.take(np.argsort(arrival, kind="stable"))


def _ints(column: pl.Series, otherwise: int = 0) -> Ints:
    return np.asarray(column.fill_null(otherwise), np.int64)


def _floats(column: pl.Series) -> Floats:
    return np.asarray(column.cast(pl.Float64).fill_null(float("nan")), np.float64)


def _lists(column: pl.Series) -> Ids:
    lengths = column.list.len().fill_null(0).cast(pl.Int64).to_numpy()
    values = column.drop_nulls().explode(empty_as_null=False)
    return Ids(_ints(values), offsets(lengths))


def _joined(parts: list[Ids]) -> Ids:
    """The lists of all parts, one part after the other."""
    if not parts:
        return Ids.of([])
    values = np.concatenate([part.values for part in parts])
    return Ids(values, offsets(np.concatenate([part.lengths for part in parts])))


def _padded(ids: Ids, lengths: Ints) -> Ids:
    """Lists of these lengths: what is not told is like nothing else."""
    kept = ids.head(lengths)
    missing = lengths - kept.lengths
    made = int(-min(kept.values.min(initial=0), 0))
    return kept + Ids(_unique(int(missing.sum()), made), offsets(missing))


def _unique(count: int, before: int = 0) -> Ints:
    """Ids that nothing else has; none is as low as ``-before``."""
    return UNIQUE - before - np.arange(count)


def _block_size(name: str, sizes: pl.Series, known: Facts | None) -> int:
    told = sizes.filter(sizes > 0).unique().sort()
    if len(told) > 1:
        raise NothingToTry(
            f"{name}: ids stand for {told[0]:,} tokens in one line and for {told[1]:,} in another; "
            "one size is needed"
        )
    if len(told):
        return int(told[0])
    groups = known.groups if known else ()
    return next((group.block_size for group in groups if group.block_size), TRACE_BLOCK_TOKENS)


def _measured(session: Session, known: Facts, found: Workload, own: pl.Expr) -> Measured:
    """What the session did; of its rows, those that are ``own``."""
    size = next((group.block_size for group in known.groups if group.block_size), None)
    blocks = known.pool_blocks - 1 if known.pool_blocks else None
    start_up = memory.measure(session, known).start_up
    if blocks is None or size is None:
        return Measured(known, blocks, size, start_up, None)
    asked = lookups.admitted(session).filter(own)
    steps = session.collect(
        "scheduler_steps",
        lambda table: table.filter(own).select(
            pl.col("preempted_reqs").sum(), steps=(pl.col("scheduled_tokens") > 0).sum()
        ),
    )
    evictions = session.collect(
        "kv_cache_evictions", lambda table: table.filter(own).select(pl.len())
    )
    waited = (found.admitted_sec - found.arrival_sec)[found.counts]
    waited = np.sort(waited[np.isfinite(waited)])
    ended = found.finish_sec[found.counts]
    span = np.nanmax(ended) - found.arrival_sec[found.counts].min() if _any(ended) else None
    outcome = Outcome(
        engine="measured",
        label="as it ran",
        num_blocks=blocks,
        block_size=size,
        policy="lru",
        requests=asked.height,
        query_tokens=int(asked["query_tokens"].sum()),
        hit_tokens=int(asked["hit_tokens"].sum()),
        evictions=int(evictions.item()),
        preemptions=int(steps["preempted_reqs"].sum()),
        steps=int(steps["steps"].sum()),
        queue_mean_sec=float(waited.mean()) if len(waited) else None,
        queue_p99_sec=quantiles.of_sample(pl.Series(waited), 99),
        span_sec=None if span is None else float(span),
    )
    return Measured(known, blocks, size, start_up, outcome)


def _any(values: Floats) -> bool:
    return bool(np.isfinite(values).any())
