# SPDX-License-Identifier: Apache-2.0
"""Which spans does a session have?

A request that ended is a span from its arrival to its end, with a span for each phase below it. It
stands in the trace that its client put it into, under the client's span, where vLLM's own span of
the request stands, too. Any other request is a trace of its own. Ids of spans follow from the
session and the request, so who exports a session twice sends the same spans again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import polars as pl
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags

from analysis.errors import SessionError
from analysis.export import part as parts
from analysis.export import phases
from analysis.export.clock import Clock
from analysis.export.otlp import evictions
from analysis.export.otlp.evictions import Evicted
from analysis.export.part import Part
from analysis.export.phases import PREEMPTED, Phases
from analysis.tables.metadata import part as part_of
from analysis.tables.metadata import text
from analysis.tables.session import Session

_CHUNK = 10_000
_BATCH = 500
"""Requests whose spans are sent at once: half a megabyte to two."""

_RANDOM_END = r"-[0-9a-f]{8}$"
"""vLLM puts it behind the id that its own spans and its answers have."""

_SAMPLED = TraceFlags(TraceFlags.SAMPLED)

_ATTRIBUTES = {
    "input_length": "gen_ai.usage.input_tokens",
    "output_length": "gen_ai.usage.output_tokens",
    "found": "gen_ai.usage.cache_read.input_tokens",
    "hit_tokens": "profilemate.hit_tokens",
    "external_hit_tokens": "profilemate.external_hit_tokens",
    "computed_tokens": "profilemate.computed_tokens",
    "num_blocks": "profilemate.blocks",
    "preemptions": "profilemate.preemptions",
    "priority": "profilemate.priority",
    "tenant": "profilemate.tenant",
    "lora": "profilemate.lora",
    "evicted_blocks": "profilemate.evicted_blocks",
    "evicted_others_blocks": "profilemate.evicted_others_blocks",
}
"""By column: what it is called as an attribute, by OpenTelemetry's conventions where they have a
name for it."""


@dataclass(frozen=True)
class Batch:
    """Spans of ``requests`` requests, the first of which arrived at ``begin_sec``."""

    spans: list[ReadableSpan]
    requests: int
    begin_sec: float


def batches(session: Session, part: Part) -> Iterator[Batch]:
    """The spans of the requests of this part, in the order of their arrivals.

    Raises:
        SessionError: a table cannot be read, nothing is in this part, or the session does not say
            when it began.

    """
    part = parts.resolved(session, part)
    clock = Clock.of(session)
    if not clock.begin_ns:
        raise SessionError(
            f"{session.directory}: metadata.json does not say when the session began (started_at), "
            "and spans need the time of day"
        )
    known = phases.read(session)
    maker = _Maker.of(session, clock, known)
    lost = evictions.read(session, part)
    chosen = _chosen(known, part, lost)
    lives = chosen.select("request", "engine", "request_id", "arrived_sec")
    takers = _of_requests(lost.takers, lives)
    for rows in chosen.iter_slices(_CHUNK):
        mine = rows.select("request")
        spans = known.spans.join(mine, on="request", how="semi")
        of_request = spans.partition_by("request", as_dict=True, include_key=False)
        losses = takers.join(mine, on="request", how="semi")
        taken = losses.partition_by("request", as_dict=True, include_key=False)
        for few in rows.iter_slices(_BATCH):
            made: list[ReadableSpan] = []
            for row in few.iter_rows(named=True):
                number = (row["request"],)
                made += maker.spans(row, of_request[number], taken.get(number))
            yield Batch(made, few.height, few["arrived_sec"][0])


def _chosen(known: Phases, part: Part, lost: Evicted) -> pl.DataFrame:
    """The requests of this part, with what they lost and took."""
    requests = known.requests.filter(
        part.covers(pl.col("arrived_sec"), pl.col("finish_sec")), part.names("request_id")
    ).sort("arrived_sec", "request")
    # An id that came several times: what is known is of all of them.
    for name, counted in (("evicted_blocks", lost.lost), ("evicted_others_blocks", lost.taken)):
        requests = requests.join(
            counted.rename({"blocks": name}),
            on=["engine", "request_id"],
            how="left",
            maintain_order="left",
        )
    found = pl.col("hit_tokens") + pl.col("external_hit_tokens").fill_null(0)
    return requests.with_columns(
        found=found, external_id=pl.col("request_id").str.replace(_RANDOM_END, "")
    )


def _of_requests(takers: pl.DataFrame, lives: pl.DataFrame) -> pl.DataFrame:
    """The takers by the number of the request, in the order of time. Of requests with the same id,
    it is the last one that came before."""
    return (
        takers.sort("at_sec", "by", "reason")
        .join_asof(
            lives.sort("arrived_sec"),
            left_on="at_sec",
            right_on="arrived_sec",
            by=["engine", "request_id"],
            check_sortedness=False,
        )
        .drop_nulls("request")
        .select("request", "at_sec", "by", "reason", "blocks")
    )


@dataclass(frozen=True)
class _Maker:
    """Makes the spans of a request. ``seed``: what the ids of a session's spans begin with."""

    seed: str
    clock: Clock
    resource: Resource
    scope: InstrumentationScope
    model: str | None
    preemptions: Mapping[int, tuple[int | None, str | None]]
    """By the stint that it ended: tokens computed again, and the request that got room."""

    @classmethod
    def of(cls, session: Session, clock: Clock, known: Phases) -> _Maker:
        metadata = session.metadata
        name = text(metadata.get("session_id")) or session.directory.name
        facts = {
            "service.name": "vllm",
            "service.instance.id": name,
            "host.name": text(metadata.get("host")),
            "profilemate.session": name,
        }
        own = Resource({key: value for key, value in facts.items() if value is not None})
        preempted = known.preemptions.select("stint", "recomputed", "made_room_for").iter_rows()
        return cls(
            seed=f"{name}\0{metadata.get('started_at')}",
            clock=clock,
            # What the environment says goes before (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES).
            resource=own.merge(OTELResourceDetector().detect()),
            scope=InstrumentationScope("profilemate"),
            model=text(part_of(metadata, "model").get("name")),
            preemptions={stint: (tokens, to) for stint, tokens, to in preempted},
        )

    def spans(
        self, row: Mapping[str, Any], phases: pl.DataFrame, takers: pl.DataFrame | None
    ) -> Iterator[ReadableSpan]:
        """The request's own span, then those of its phases.

        Args:
            row: the request.
            phases: its phases. Columns: ``phase``, ``begin_sec``, ``end_sec``, ``stint``.
            takers: who took its blocks. Columns: ``at_sec``, ``by``, ``reason``, ``blocks``.

        """
        own = f"{self.seed}\0{row['engine']}\0{row['request_id']}\0{row['arrived_sec']}"
        trace = int(row["trace_id"], 16) if row["trace_id"] else _id(own, 16)
        context = SpanContext(trace, _id(f"{own}\0request", 8), False, _SAMPLED)
        above = None
        if row["trace_id"]:
            above = SpanContext(trace, int(row["parent_span_id"], 16), True, _SAMPLED)
        first, last = row["arrived_sec"], max(row["arrived_sec"], row["finish_sec"])
        events = [] if takers is None else self._losses(takers)
        below = []
        for number, (phase, begin, end, stint) in enumerate(phases.iter_rows()):
            attributes: dict[str, Any] = {}
            if phase == PREEMPTED:
                attributes = self._preemption(stint)
                events.append(Event(PREEMPTED, attributes, self.clock.ns(begin)))
            place = SpanContext(trace, _id(f"{own}\0{phase}\0{number}", 8), False, _SAMPLED)
            times = min(begin, last), min(end, last)
            below.append(self._span(phase, place, context, times, attributes))
        events.sort(key=lambda event: event.timestamp)
        yield self._span("request", context, above, (first, last), self._said(row), events)
        yield from below

    def _span(
        self,
        name: str,
        context: SpanContext,
        above: SpanContext | None,
        times: tuple[float, float],
        attributes: Mapping[str, Any],
        events: tuple[Event, ...] | list[Event] = (),
    ) -> ReadableSpan:
        return ReadableSpan(
            name=name,
            context=context,
            parent=above,
            resource=self.resource,
            attributes=attributes,
            events=events,
            kind=SpanKind.INTERNAL,
            instrumentation_scope=self.scope,
            start_time=self.clock.ns(times[0]),
            end_time=self.clock.ns(times[1]),
        )

    def _said(self, row: Mapping[str, Any]) -> dict[str, Any]:
        said = {
            "gen_ai.request.id": row["external_id"],
            "gen_ai.request.model": self.model,
            "gen_ai.response.finish_reasons": row["finish_reason"] and [row["finish_reason"]],
            "profilemate.request.id": row["request_id"],
            "profilemate.engine": row["engine"],
            **{name: row[column] for column, name in _ATTRIBUTES.items()},
        }
        return {name: value for name, value in said.items() if value is not None}

    def _preemption(self, stint: int) -> dict[str, Any]:
        tokens, to = self.preemptions.get(stint, (None, None))
        said = {"profilemate.recomputed_tokens": tokens, "profilemate.made_room_for": to}
        return {name: value for name, value in said.items() if value is not None}

    def _losses(self, takers: pl.DataFrame) -> list[Event]:
        return [
            Event(
                "evicted",
                {
                    "profilemate.blocks": blocks,
                    "profilemate.reason": reason,
                    **({} if by is None else {"profilemate.evicted_by": by}),
                },
                self.clock.ns(at_sec),
            )
            for at_sec, by, reason, blocks in takers.iter_rows()
        ]


def _id(text: str, size: int) -> int:
    """A number of so many bytes, and never 0, that follows from the text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=size).digest(), "big") or 1
