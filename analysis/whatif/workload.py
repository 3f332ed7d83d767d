# SPDX-License-Identifier: Apache-2.0
"""Which requests arrived, when, how long were they, and with which contents?

The requests come from a session's requests.jsonl, or from a trace (``analysis.whatif.trace``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from analysis.errors import SessionError
from analysis.gpu import memory
from analysis.gpu.memory import StartUp
from analysis.pool.lifetimes import FOR_ROOM
from analysis.stats import quantiles
from analysis.tables import facts, lookups
from analysis.tables.facts import Facts
from analysis.tables.schema import TABLES
from analysis.tables.session import Session, open_session
from analysis.whatif import answers, drops, trace
from analysis.whatif.clock import DEFAULT_SEC
from analysis.whatif.drops import Drops
from analysis.whatif.host_memory import HostOutcome
from analysis.whatif.ids import Ids, Ints, offsets
from analysis.whatif.outcome import Outcome
from analysis.whatif.trace import TimeUnit
from analysis.whatif.trace_tokens import USUAL

UNIQUE = -1
"""Ids from here down stand for contents that no other block has; other ids are not negative."""

TABLE = TABLES["requests"]

MOST_MADE_UP = 1 << 25
"""Blocks without recorded contents that fit into memory. Recorded ones take more room in their
file."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


class NothingToTry(SessionError):  # noqa: N818 - it is no error of the session's
    """No request ended, or their block sizes differ, or they hold more blocks than is wanted."""


@dataclass(frozen=True)
class Measured:
    """What the session itself was, and did.

    ``facts``: its configuration. ``num_blocks``: usable blocks of an engine's pool, without the
    null block; ``block_size``: in tokens; both None where not known. ``start_up``: where the memory
    of the worker with the least memory went. ``outcome``: the result, None where the size of the
    pool is not known.
    """

    facts: Facts
    num_blocks: int | None
    block_size: int | None
    start_up: StartUp | None
    outcome: Outcome | None


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival. Every array and list has one entry for each.

    ``name``: the folder or file, as given. ``measured``: None for a trace. ``block_size``: tokens
    that an id stands for. ``has_contents``: whether the contents are known; they are not for a
    session with prefix caching off, and for a trace of lengths alone. ``notes``: how a trace was
    read, where that is no matter of course, or that a session begins in the midst of its run.

    ``arrival_sec``: since the session or the trace began. ``seen_sec``: the same, as recorded,
    where ``arrival_sec`` is an estimate. ``waits_for``: the number of the request whose answer this
    one comes after, ``delay_sec`` later; -1 for none. Its arrival is a guess.
    ``input_tokens`` and ``output_tokens``:
    lengths of prompt and answer. ``computed_tokens``: tokens that were ever computed or found. The
    last token of an answer never is, and a request that was aborted while it waited has none.

    ``prompt_ids``: contents of the prompt's blocks; a last partial one has an id of its own.
    ``output_ids``: contents of the full blocks that follow; in the first one the prompt may end and
    the answer begin. An id stands for all content up to the end of its block.

    ``hit_tokens``: found by its admission's lookup; ``external_tokens``: found by a KV connector
    beyond these; both 0 for a trace. ``admitted_sec``,
    ``first_token_sec`` and ``finish_sec``: NaN where not known. ``engine``: the
    data-parallel rank. ``tenant``: a number for the cache salt, -1 without. ``priority``: vLLM's.
    ``preempted``: how often. ``answer_steps``: with speculation, the steps that the answer took
    after its first token; else NaN. ``aborted``: the client went away. ``counts``: the request is
    not part of the warm-up.

    ``drops``: what emptied the cache, or part of it, on purpose; none for a trace.
    """

    name: str
    measured: Measured | None
    block_size: int
    has_contents: bool
    arrival_sec: Floats
    seen_sec: Floats
    input_tokens: Ints
    output_tokens: Ints
    computed_tokens: Ints
    prompt_ids: Ids
    output_ids: Ids
    hit_tokens: Ints
    external_tokens: Ints
    admitted_sec: Floats
    first_token_sec: Floats
    finish_sec: Floats
    engine: Ints
    tenant: Ints
    priority: Ints
    preempted: Ints
    answer_steps: Floats
    aborted: Bools
    counts: Bools
    waits_for: Ints
    delay_sec: Floats
    notes: tuple[str, ...] = ()
    drops: Drops = field(default_factory=Drops)

    def __len__(self) -> int:
        return len(self.arrival_sec)

    @property
    def engines(self) -> tuple[int, ...]:
        """The data-parallel ranks that have requests."""
        return tuple(np.unique(self.engine).tolist())

    def take(self, chosen: Ints) -> Workload:
        """The requests with these numbers, in this order."""
        number = np.full(len(self) + 1, -1)
        number[chosen] = np.arange(len(chosen))
        arrays = {
            each.name: getattr(self, each.name)[chosen]
            for each in fields(self)
            if isinstance(getattr(self, each.name), np.ndarray)
        }
        return replace(
            self,
            **arrays | {"waits_for": number[self.waits_for[chosen]]},
            prompt_ids=self.prompt_ids.take(chosen),
            output_ids=self.output_ids.take(chosen),
        )

    def after(self, after_sec: float, after_requests: int, *, last_half: bool = False) -> Workload:
        """The same requests, the first of which do not count.

        The largest of the three decides. A trace's times go by its first request, as it has no
        other beginning.

        Args:
            after_sec: what arrived in the first so many seconds does not count.
            after_requests: the first so many do not count.
            last_half: the first half of them does not count.

        Raises:
            SessionError: no request is left that counts.

        """
        early = np.searchsorted(self.arrival_sec - self.arrival_sec[0], after_sec)
        warm_up = max(int(early), after_requests, len(self) // 2 if last_half else 0)
        if warm_up >= len(self):
            raise SessionError(
                f"nothing is left of {self.name}: it has {len(self):,} requests in "
                f"{self.arrival_sec[-1] - self.arrival_sec[0]:.6g} s, and all of them are to be "
                "left out; leave out less"
            )
        return replace(self, counts=np.arange(len(self)) >= warm_up)

    def of_engine(self, engine: int) -> Workload:
        """The requests of one data-parallel rank, and what was dropped there."""
        chosen = self.take(np.flatnonzero(self.engine == engine))
        return replace(chosen, drops=self.drops.of_engine(engine))

    @property
    def made_up(self) -> int:
        """Blocks whose contents are not known, and equal no other ones."""
        of_answers = self.computed_tokens // self.block_size - self.output_ids.lengths
        of_answers -= self.input_tokens // self.block_size
        of_prompts = np.count_nonzero(self.prompt_ids.values < 0)
        return int(of_prompts + np.maximum(of_answers, 0).sum())

    def chains(self) -> Ids:
        """Of each request, the contents of all full blocks that were computed or found, in order.

        Blocks of the answer follow those of the prompt. An unknown content equals no other one.
        """
        full = self.prompt_ids.head(self.input_tokens // self.block_size)
        return _padded(full + self.output_ids, self.computed_tokens // self.block_size)

    def resized(self, block_size: int) -> Workload:
        """The same requests with ids that stand for ``block_size`` tokens.

        Where a new block ends inside an old one, two requests share it only if they share the old
        one to its end, as what they share within an old block is not known. So the result is exact
        for multiples of the old size, and a lower bound for other sizes.
        """
        if block_size == self.block_size:
            return self
        old = self.prompt_ids.head(self.input_tokens // self.block_size) + self.output_ids
        total = self.input_tokens + self.output_tokens
        known = np.minimum(old.lengths, total // self.block_size)
        lengths = total // block_size
        _check_room(self.name, int(lengths.sum()) - len(old.values) * self.block_size // block_size)
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
            self,
            block_size=block_size,
            prompt_ids=new.head(prompt) + ends,
            output_ids=output,
            drops=self.drops.resets(),
        )


def read_workload(
    path: str | os.PathLike[str] | None = None,
    *,
    engine: int | None = None,
    tokens_per_id: int | None = None,
    time_unit: TimeUnit | None = None,
) -> Workload:
    """The requests of a session or of a trace.

    Args:
        path: a file, which is a trace, or a folder, as ``analysis.open_session`` takes it.
        engine: of a session, only the requests of this data-parallel rank.
        tokens_per_id: of a trace, the tokens that an id stands for, where it does not say so.
        time_unit: of a trace, the unit of its times, where it does not say so.

    Raises:
        SessionError: there is neither, it cannot be read, or it has no request.

    """
    if path is not None and Path(path).is_file():
        found = _of_trace(Path(path), tokens_per_id, time_unit)
        if engine:
            raise SessionError(f"{path} is a trace: it has no engine {engine}")
        return found
    return of_session(open_session(path), engine=engine)


def of_session(
    session: Session, *, engine: int | None = None, most_blocks: int | None = None
) -> Workload:
    """The requests of a session that have ended, its warm-up included.

    Args:
        session: the session.
        engine: only the requests of this data-parallel rank.
        most_blocks: refuse requests with more blocks than this together.

    Raises:
        NothingToTry: there is no request, or they have too many blocks.
        SessionError: a table cannot be read.

    """
    known = facts.read(session)
    own = pl.lit(True) if engine is None else pl.col("engine").fill_null(0) == engine
    found = _workload(str(session.directory), _batches(session, own, most_blocks), known)
    if not len(found):
        whose = "" if engine is None else f" of engine {engine}"
        raise NothingToTry(
            f"{session.directory}: {TABLE.file} has no request{whose} that ended, so there is "
            "nothing to try again"
        )
    found = replace(
        found,
        counts=found.arrival_sec >= session.begin_sec,
        drops=drops.read(session, found.admitted_sec, found.finish_sec, found.engine),
    )
    if known.scheduler.speculative_tokens:
        found = replace(found, answer_steps=_answer_steps(session, found))
    notes = (_IN_THE_MIDST,) if _begins_in_the_midst(session) else ()
    return replace(found, measured=_measured(session, known, found, own), notes=notes)


def _answer_steps(session: Session, found: Workload) -> Floats:
    return answers.steps(
        session,
        tokens=found.output_tokens,
        first_token_sec=found.first_token_sec,
        finish_sec=found.finish_sec,
        engine=found.engine,
        preempted=found.preempted,
    )


_IN_THE_MIDST = (
    "the tables begin in the midst of the run, and each replay with an empty cache: at first it "
    "finds less than the engine did; --last-half counts the second half of the requests alone"
)


def _begins_in_the_midst(session: Session) -> bool:
    """Whether requests came before the tables begin, or before a pause of the recording ended."""
    is_later = session.period is not None and session.period.number > 1
    return session.window is not None or is_later


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
    "hit_tokens",
    "external_hit_tokens",
    "queue_sec",
    "first_token_sec",
    "finish_sec",
    "finish_reason",
    "computed_tokens",
    "tenant",
    "priority",
    "preemptions",
)
"""Of requests.jsonl."""


def _of_trace(path: Path, tokens_per_id: int | None, time_unit: TimeUnit | None) -> Workload:
    read = trace.read(path, tokens_per_id=tokens_per_id, time_unit=time_unit)
    rows = _with_arrivals(read.rows)
    more = [
        pl.lit(None, TABLE.columns[name]).alias(name)
        for name in COLUMNS
        if name not in rows.columns
    ]
    found = _workload(
        str(path),
        [rows.with_columns(more).select(COLUMNS)],
        None,
        waits_for=_ints(rows["before"], -1),
        delay_sec=_floats(rows["delay"].fill_null(0)) * TABLE.time_unit,
    )
    notes = (*read.notes, *((_TURNS,) if bool((found.waits_for >= 0).any()) else ()))
    return replace(found, has_contents=read.has_contents, notes=notes)


_TURNS = "turns that wait for an answer come after the simulated one, and not at recorded times"


def _with_arrivals(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows with an arrival for turns that come after an answer: as if steps took what they do
    by default. It gives an order to what does not simulate steps."""
    times, delays = rows["timestamp"].to_list(), rows["delay"].to_list()
    outputs, before = rows["output_length"].to_list(), rows["before"].to_list()
    for number, earlier in enumerate(before):
        if earlier is not None:
            answer = outputs[earlier] * DEFAULT_SEC / TABLE.time_unit
            times[number] = times[earlier] + answer + delays[number]
    return rows.with_columns(timestamp=pl.Series(times, dtype=pl.Float64))


def _workload(
    name: str,
    batches: Iterable[pl.DataFrame],
    known: Facts | None,
    waits_for: Ints | None = None,
    delay_sec: Floats | None = None,
) -> Workload:
    """The requests of these rows, sorted by arrival. ``known``: the facts of a session."""
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
    has_contents = known is None or bool(ids["hash_ids"].values.size)
    size = _block_size(name, columns["block_size"], known)
    lengths, outputs = (_ints(columns[f"{what}_length"]) for what in ("input", "output"))
    arrival = _floats(columns["timestamp"]) * TABLE.time_unit
    generated = lengths + np.maximum(outputs, 1) - 1
    computed = np.where(
        columns["computed_tokens"].is_null().to_numpy(),
        generated,
        _ints(columns["computed_tokens"]),
    )
    prompt_blocks = -(-lengths // size)
    of_prompts = np.maximum(prompt_blocks - ids["hash_ids"].lengths, 0)
    of_answers = computed // size - lengths // size - ids["output_hash_ids"].lengths
    _check_room(name, int((of_prompts + np.maximum(of_answers, 0)).sum()))
    found = Workload(
        name=name,
        measured=None,
        block_size=size,
        has_contents=has_contents,
        arrival_sec=arrival,
        seen_sec=arrival,
        input_tokens=lengths,
        output_tokens=outputs,
        computed_tokens=computed,
        prompt_ids=_padded(ids["hash_ids"], prompt_blocks),
        output_ids=ids["output_hash_ids"],
        hit_tokens=_ints(columns["hit_tokens"]),
        external_tokens=_ints(columns["external_hit_tokens"]),
        admitted_sec=arrival + _floats(columns["queue_sec"]),
        first_token_sec=_floats(columns["first_token_sec"]),
        finish_sec=_floats(columns["finish_sec"]),
        engine=_ints(columns["engine"]),
        tenant=_ints(columns["tenant"], -1),
        priority=_ints(columns["priority"]),
        preempted=_ints(columns["preemptions"]),
        answer_steps=np.full(len(arrival), np.nan),
        aborted=(columns["finish_reason"] == "abort").fill_null(False).to_numpy(),
        counts=np.ones(len(arrival), np.bool_),
        waits_for=np.full(len(arrival), -1) if waits_for is None else waits_for,
        delay_sec=np.zeros(len(arrival)) if delay_sec is None else delay_sec,
    )
    return found.take(np.argsort(arrival, kind="stable"))


def _check_room(name: str, made_up: int) -> None:
    if made_up > MOST_MADE_UP:
        raise SessionError(
            f"{name}: its requests have {made_up:,} blocks whose contents are not recorded, and "
            f"only {MOST_MADE_UP:,} of these fit into memory; take fewer requests, and repair a "
            "length that makes no sense"
        )


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
    """Lists of these lengths. Missing ids become ones that no other block has."""
    kept = ids.head(lengths)
    missing = lengths - kept.lengths
    made = int(-min(kept.values.min(initial=0), 0))
    return kept + Ids(_unique(int(missing.sum()), made), offsets(missing))


def _unique(count: int, before: int = 0) -> Ints:
    """So many ids that no other block has, all of them below ``-before``."""
    return UNIQUE - before - np.arange(count)


def _block_size(name: str, sizes: pl.Series, known: Facts | None) -> int:
    known_sizes = sizes.filter(sizes > 0).unique().sort()
    if len(known_sizes) > 1:
        raise NothingToTry(
            f"{name}: ids stand for {known_sizes[0]:,} tokens in one line and for "
            f"{known_sizes[1]:,} in another; one size is needed"
        )
    if len(known_sizes):
        return int(known_sizes[0])
    groups = known.groups if known else ()
    return next((group.block_size for group in groups if group.block_size), USUAL)


def _measured(session: Session, known: Facts, found: Workload, own: pl.Expr) -> Measured:
    """What the session did, counting the rows that are ``own``."""
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
        "kv_cache_evictions",
        lambda table: table.filter(own & (pl.col("reason").fill_null(FOR_ROOM) == FOR_ROOM)).select(
            pl.len()
        ),
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
        host=_external(known, asked),
    )
    return Measured(known, blocks, size, start_up, outcome)


def _external(known: Facts, asked: pl.DataFrame) -> HostOutcome | None:
    """What a connector found; None without one."""
    tokens = int(asked["external_hit_tokens"].sum())
    if known.scheduler.connector is None and not tokens:
        return None
    query = int(asked["query_tokens"].sum())
    found = known.scheduler.offloading
    return HostOutcome(
        tokens,
        tokens / query if query else None,
        gib=found.host_bytes / 2**30 if found and found.host_bytes else None,
    )


def _any(values: Floats) -> bool:
    return bool(np.isfinite(values).any())
