# SPDX-License-Identifier: Apache-2.0
"""Which prefixes do the prompts share, where do they part, and are they long enough to be found?

requests.jsonl has a number for the first 16, 32, 48, ... tokens of each prompt. It is the same for
the same tokens, whatever the block size, and with prefix caching off, too. So the place where
prompts part is known to within the distance of two such lengths.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import polars as pl

from analysis.tables.facts import Facts
from analysis.tables.schema import TABLES
from analysis.tables.session import Session

MOST_REQUESTS = 100_000
"""How many requests are looked at, from the first on."""

SHOWN = 5
"""How many families are named."""

TABLE = "requests"
COLUMNS = ("timestamp", "request_id", "input_length", "prefix_ids")


@dataclass(frozen=True)
class Family:
    """``requests`` prompts that share their first ``shared_tokens`` tokens.

    Most of them part before token ``part_before``, in ``continuations`` different ways.
    ``tokens_after``: the sum of what these prompts have after the shared part. ``example``: the id
    of one of the requests.
    """

    requests: int
    shared_tokens: int
    part_before: int
    continuations: int
    tokens_after: int
    example: str


@dataclass(frozen=True)
class TooShort:
    """``requests`` prompts that share a beginning with an earlier one, but no block of ``unit``
    tokens.

    ``longest_tokens``: the longest of these beginnings. ``finding_unit``: the largest power of two
    with which half of these prompts would have found something, None where that is under 16;
    ``found_tokens``: what all of them would have found with it.
    """

    unit: int
    requests: int
    longest_tokens: int
    finding_unit: int | None
    found_tokens: int


@dataclass(frozen=True)
class Families:
    """``requests`` and their ``prompt_tokens`` were looked at.

    ``sharing``: requests that share at least 16 tokens with the beginning of an earlier one, and
    ``shared_tokens`` in all. ``unit``: tokens that a hit is a multiple of; ``unit_never_fills``:
    no request can be long enough for one. ``largest``: the families with most tokens after the
    shared part.
    """

    requests: int
    prompt_tokens: int
    sharing: int
    shared_tokens: int
    unit: int | None
    unit_never_fills: bool
    too_short: TooShort | None
    largest: tuple[Family, ...]


@dataclass
class FamilyTally:
    """Keeps the first ``MOST_REQUESTS`` requests with the numbers of their beginnings."""

    parts: list[pl.DataFrame] = field(default_factory=list)
    count: int = 0

    def add(self, batch: pl.DataFrame) -> None:
        if self.count < MOST_REQUESTS:
            known = batch.select(COLUMNS).drop_nulls("prefix_ids")
            self.parts.append(known.head(MOST_REQUESTS - self.count))
            self.count += self.parts[-1].height

    def result(self, session: Session, facts: Facts) -> Families:
        """The families of the prompts. The tally is empty afterwards."""
        known = TABLES[TABLE].columns
        empty = pl.DataFrame(schema={name: known[name] for name in COLUMNS})
        requests = (
            pl.concat([empty, *self.parts])
            .sort("timestamp", maintain_order=True)
            .drop("timestamp")
            .with_row_index("request")
        )
        self.parts.clear()
        return _families(requests, _lengths(session), facts)


def measure(session: Session, facts: Facts) -> Families:
    """The families of the session's prompts.

    Raises:
        SessionError: the file cannot be read.

    """
    collected = FamilyTally()
    for batch in session.batches(TABLE, COLUMNS):
        collected.add(batch)
    return collected.result(session, facts)


def _families(requests: pl.DataFrame, lengths: list[int], facts: Facts) -> Families:
    unit = max((group.block_size for group in facts.groups if group.block_size), default=None)
    shared, families = _levels(requests, lengths)
    prompts = requests.with_columns(shared=shared).select("input_length", "shared")
    return Families(
        requests=requests.height,
        prompt_tokens=int(requests["input_length"].sum()),
        sharing=int((shared > 0).sum()),
        shared_tokens=int(shared.sum()),
        unit=unit,
        unit_never_fills=unit is not None and (facts.max_model_len or unit) < unit,
        too_short=None if unit is None else _too_short(prompts, unit),
        largest=families,
    )


def _lengths(session: Session) -> list[int]:
    lengths = session.metadata.get("prefix_lengths")
    if not isinstance(lengths, list):
        return []
    return [length for length in lengths if isinstance(length, int) and 0 < length < 2**31]


def _levels(requests: pl.DataFrame, lengths: list[int]) -> tuple[pl.Series, tuple[Family, ...]]:
    """How many tokens each request shares with an earlier one, and the largest families."""
    shared = pl.zeros(requests.height, dtype=pl.Int64, eager=True).alias("shared")
    level = requests.select("request", "input_length", parent=pl.lit(0, pl.Int64))
    families: list[pl.DataFrame] = []
    above = 0
    for number, length in enumerate(lengths):
        ids = requests["prefix_ids"].list.get(number, null_on_oob=True)
        level = level.with_columns(own=ids.gather(level["request"]))
        if above:
            families.append(_parting(level, above, length))
        level = (
            level.drop_nulls("own")
            .filter(pl.len().over("own") > 1)
            .select("request", "input_length", parent="own")
        )
        if level.is_empty():
            break
        later = level.filter(~pl.col("parent").is_first_distinct())["request"]
        shared = shared.scatter(later, length)
        above = length
    return shared, _largest(families, requests)


def _parting(level: pl.DataFrame, above: int, length: int) -> pl.DataFrame:
    """The families that share ``above`` tokens and whose prompts mostly go on alone."""
    going_on = pl.col("own").is_not_null()
    return (
        level.group_by("parent")
        .agg(
            requests=pl.len().cast(pl.Int64),
            going_on=going_on.sum().cast(pl.Int64),
            continuations=pl.col("own").drop_nulls().n_unique().cast(pl.Int64),
            tokens_after=(pl.col("input_length") - above).clip(0).sum(),
            example=pl.col("request").min(),
        )
        .filter(pl.col("going_on") > 1, 2 * pl.col("continuations") > pl.col("going_on"))
        .select(
            "requests",
            "continuations",
            "tokens_after",
            "example",
            shared_tokens=pl.lit(above, pl.Int64),
            part_before=pl.lit(length, pl.Int64),
        )
    )


def _largest(families: list[pl.DataFrame], requests: pl.DataFrame) -> tuple[Family, ...]:
    if not families:
        return ()
    named = (
        pl.concat(families)
        .sort("tokens_after", "requests", "example", descending=[True, True, False])
        .head(SHOWN)
        .join(requests.select("request_id", example="request"), on="example", maintain_order="left")
        .select(pl.exclude("example"))
        .rename({"request_id": "example"})
    )
    return tuple(Family(**row) for row in named.iter_rows(named=True))


def _too_short(prompts: pl.DataFrame, unit: int) -> TooShort | None:
    short = prompts.filter((pl.col("shared") > 0) & (pl.col("shared") < unit))["shared"]
    if short.is_empty():
        return None
    half = int(short.sort(descending=True)[(short.len() - 1) // 2])
    finding = 1 << (half.bit_length() - 1)
    return TooShort(
        unit=unit,
        requests=short.len(),
        longest_tokens=int(short.max()),  # type: ignore[arg-type]
        finding_unit=finding if finding >= 16 else None,
        found_tokens=int((short // finding * finding).sum()) if finding >= 16 else 0,
    )
