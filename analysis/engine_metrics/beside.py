# SPDX-License-Identifier: Apache-2.0
"""Each of vLLM's figures beside the session's, and the parts that their difference has.

A part is something that one of the two counts and the other does not. Its amount is what has to
be added to the session's figure because of it, and is computed from the tables: exactly, or as a
range where they do not tell. What is left of the difference is unexplained. The parts are

* what came after the page was taken, and what was under way then: vLLM counts a step when its
  results arrive, so its last steps are a range;
* lookups that vLLM counts more than once (``analysis.prefix_cache`` has the rules of its releases);
* what vLLM counts of a request only once it has a token, and what the API server ends itself;
* for the histograms of blocks: the sample, and blocks that were handed out anew without content.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import polars as pl

from analysis import prefix_cache
from analysis.engine_metrics.page import Page
from analysis.facts import Facts
from analysis.facts import read as read_facts
from analysis.metadata import listed
from analysis.prefix_cache import Lookups, PrefixCache
from analysis.session import Session

Verdict = Literal["equal", "explained", "unexplained", "not comparable"]

UNDER_WAY_SEC = 1.0
"""What a running engine did in so long before the page was taken, and in its last three steps, may
not be on it yet."""

SAMPLE = 0.01
"""Of its blocks, what ``--kv-cache-metrics`` follows unless it is told otherwise."""

_ROUNDING = 1e-6


@dataclass(frozen=True)
class Part:
    """A reason for a difference: what it is, and from ``least`` to ``most`` what it adds to the
    session's figure. Both are the same where that is exact."""

    says: str
    least: float
    most: float


@dataclass(frozen=True)
class Row:
    """One of vLLM's figures. ``metric``: its name; ``unit``: what it counts. ``vllm``: its value,
    over all engines, None where the page has no number. ``session``: of the whole session.
    ``difference``: vLLM's less the session's, of which ``unexplained`` is left when the parts are
    taken away. ``note``: what else there is to know of the figure."""

    metric: str
    unit: str
    vllm: float | None
    session: float | None
    difference: float | None
    parts: tuple[Part, ...]
    unexplained: float | None
    verdict: Verdict
    note: str | None = None


@dataclass(frozen=True)
class Reconciliation:
    """``scraped_sec``: when the page was taken, in seconds since the session began; None where it
    was after the session's end, or is not known. ``session_end_sec``: how far the session goes.
    ``doubts``: why the page may not be this session's, in sentences. ``missing``: metrics that
    the page lacks. ``agrees``: no row is unexplained."""

    session_id: str
    source: str
    scraped_sec: float | None
    session_end_sec: float
    doubts: tuple[str, ...]
    rows: tuple[Row, ...]
    missing: tuple[str, ...]
    agrees: bool


def reconcile(session: Session, page: Page) -> Reconciliation:
    """Hold a page of vLLM's metrics against the session.

    Raises:
        SessionError: a table cannot be read.

    """
    # vLLM counts from its start on.
    session = replace(session, begin_sec=0.0)
    facts = read_facts(session)
    at = _moment(session, page)
    seen = _Seen(session, at)
    rows = tuple(
        row
        for part in (_prefix_cache, _tokens, _endings, _preemptions, _usage, _blocks, _pool)
        for row in part(page, seen, facts)
    )
    known = [row.metric for row in rows]
    return Reconciliation(
        session_id=str(session.metadata.get("session_id") or session.directory.name),
        source=page.source,
        scraped_sec=at,
        session_end_sec=session.end_sec,
        doubts=tuple(_doubts(session, page, facts)),
        rows=rows,
        missing=tuple(
            name for name in _EXPECTED if not any(metric.startswith(name) for metric in known)
        ),
        agrees=not any(row.verdict == "unexplained" for row in rows),
    )


_EXPECTED = (
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
    "vllm:request_success",
    "vllm:num_preemptions",
    "vllm:kv_cache_usage_perc",
    "vllm:kv_block_lifetime_seconds",
)


@dataclass(frozen=True)
class _Seen:
    """The session, and ``at``: the moment up to which vLLM had counted; None for all of it."""

    session: Session
    at: float | None

    def after(self) -> Session | None:
        """What the session has from the page's moment on."""
        return None if self.at is None else replace(self.session, begin_sec=self.at)

    def closing(self) -> Session | None:
        """The same, and what was under way then."""
        if self.at is None:
            return None
        return replace(self.session, begin_sec=max(_ROUNDING, self.recent))

    @cached_property
    def recent(self) -> float:
        """From when on what the engine did may not be on the page: results come back a step or
        two after it was scheduled, and go to the API server then."""
        if self.at is None:
            return math.inf
        time = pl.col("timestamp_sec")
        third = self.session.collect(
            "scheduler_steps",
            lambda steps: (
                steps.filter(time <= self.at)
                .group_by("engine")
                .agg(time.top_k(3).min())
                .select(time.min())
            ),
        ).item()
        return min(self.at - UNDER_WAY_SEC, math.inf if third is None else third)

    @property
    def cut(self) -> float:
        """The page's moment, as a time that may be compared with those in the tables."""
        return math.inf if self.at is None else self.at


def _row(
    metric: str,
    unit: str,
    vllm: float | None,
    session: float | None,
    parts: Sequence[Part | None],
    note: str | None = None,
) -> Iterator[Row]:
    """The figure beside the session's; none where the page does not have it."""
    if vllm is None:
        return
    known = tuple(part for part in parts if part is not None and (part.least or part.most))
    if not math.isfinite(vllm):
        note = "the page has no number for it"
        yield Row(metric, unit, None, session, None, (), None, "not comparable", note)
        return
    if session is None:
        yield Row(metric, unit, vllm, None, None, known, None, "not comparable", note)
        return
    difference = vllm - session
    least, most = sum(part.least for part in known), sum(part.most for part in known)
    left = difference - min(max(difference, least), most)
    rounding = _ROUNDING * max(1.0, abs(vllm), abs(session))
    exact = tuple(part for part in known if part.least == part.most)
    if abs(difference - sum(part.most for part in exact)) <= rounding:
        # Then no range has any part in it.
        known = exact
    left = 0.0 if abs(left) <= rounding else left
    difference = 0.0 if abs(difference) <= rounding else difference
    verdict: Verdict = "unexplained" if left else "explained" if difference else "equal"
    yield Row(
        metric, unit, vllm, session, difference, known if difference else (), left, verdict, note
    )


def _moment(session: Session, page: Page) -> float | None:
    """When the page was taken, in the session's time; None where that was not within it."""
    began = _wall_clock(session.metadata.get("started_at"))
    if began is None or page.scraped_at is None:
        return None
    at = page.scraped_at - began
    return at if 0 <= at < session.end_sec else None


def _doubts(session: Session, page: Page, facts: Facts) -> Iterator[str]:
    began = _wall_clock(session.metadata.get("started_at"))
    if began is not None and page.scraped_at is not None and page.scraped_at < began:
        yield "The page was taken before the session began."
    started = page.total("process_start_time_seconds")
    ended = _wall_clock(session.metadata.get("ended_at"))
    if started is not None and ended is not None and started > ended:
        yield "The server that gave the page was started after the session had ended."
    blocks = page.label("vllm:cache_config_info", "num_gpu_blocks")
    if blocks and blocks.isdigit() and facts.pool_blocks not in (None, int(blocks)):
        yield (
            f"The page is of an engine with {int(blocks):,} blocks, and the session of one with "
            f"{facts.pool_blocks:,}."
        )


def _prefix_cache(page: Page, seen: _Seen, _: Facts) -> Iterator[Row]:
    found = prefix_cache.measure(seen.session)
    after = _measured(seen.after())
    closing = _measured(seen.closing())
    note = None
    if found.vllm.rule is None:
        note = "which lookups are counted is not known of this release"
    for name, field in (("queries", "query_tokens"), ("hits", "hit_tokens")):
        later = _counted(after, field)
        yield from _row(
            f"vllm:prefix_cache_{name}",
            "tokens",
            page.total(f"vllm:prefix_cache_{name}_total"),
            float(getattr(found.true, field)),
            [
                _exact("lookups after the page was taken", -later),
                _range(
                    "lookups right before it, if not yet counted",
                    later - _counted(closing, field),
                    0.0,
                ),
                _exact(
                    "lookups of requests that went on waiting: this release counts each of them",
                    _tokens_of(found.vllm.repeated, field),
                ),
                _exact(
                    "lookups of preempted requests, which find their own blocks: this release "
                    "counts them",
                    _tokens_of(found.vllm.resumed, field),
                ),
            ],
            note,
        )
    external = page.total("vllm:external_prefix_cache_hits_total")
    if external is not None and (external or found.true.external_hit_tokens):
        yield from _row(
            "vllm:external_prefix_cache_hits",
            "tokens",
            external,
            float(found.true.external_hit_tokens),
            [
                _exact(
                    "admissions after the page was taken",
                    -float(after.true.external_hit_tokens) if after else 0.0,
                )
            ],
        )


def _measured(session: Session | None) -> PrefixCache | None:
    return None if session is None else prefix_cache.measure(session)


def _counted(found: PrefixCache | None, field: str) -> float:
    """What vLLM's rule counts of these lookups."""
    return 0.0 if found is None else _tokens_of(found.vllm.counted, field)


def _tokens_of(lookups: Lookups | None, field: str) -> float:
    return 0.0 if lookups is None else float(getattr(lookups, field))


def _exact(says: str, amount: float) -> Part:
    return Part(says, amount, amount)


def _range(says: str, least: float, most: float) -> Part:
    return Part(says, least, most)


_REQUESTS = (
    "input_length",
    "output_length",
    "first_token_sec",
    "finish_sec",
    "finish_reason",
    "preemptions",
)


def _tokens(page: Page, seen: _Seen, _: Facts) -> Iterator[Row]:
    first, end, cut = pl.col("first_token_sec"), pl.col("finish_sec"), seen.cut
    inputs, outputs = pl.col("input_length"), pl.col("output_length")
    recent = seen.recent
    aborted = pl.col("finish_reason") == "abort"
    sums = _requests(
        seen.session,
        inputs=inputs,
        without_token=pl.when(first.is_null()).then(inputs).otherwise(0),
        first_later=pl.when(first > cut).then(inputs).otherwise(0),
        first_recent=pl.when(first.is_between(recent, cut)).then(inputs).otherwise(0),
        outputs=outputs,
        outputs_later=pl.when(first > cut).then(outputs).otherwise(0),
        # What a request had by then is not told: one token at least, but for its last second.
        outputs_open=pl.when((first <= cut) & (end > recent)).then(outputs).otherwise(0),
        outputs_aborted=pl.when(aborted & (end <= recent)).then(outputs).otherwise(0),
    )
    yield from _row(
        "vllm:prompt_tokens",
        "tokens",
        page.total("vllm:prompt_tokens_total"),
        sums["inputs"],
        [
            _exact(
                "prompts of requests that ended without a token: vLLM counts a prompt with its "
                "first token",
                -sums["without_token"],
            ),
            _exact("prompts whose first token came after the page", -sums["first_later"]),
            _range(
                "prompts whose first token came right before it, if not yet counted",
                -sums["first_recent"],
                0.0,
            ),
            *_running(seen),
        ],
    )
    yield from _row(
        "vllm:generation_tokens",
        "tokens",
        page.total("vllm:generation_tokens_total"),
        sums["outputs"],
        [
            _exact("requests whose first token came after the page", -sums["outputs_later"]),
            _range(
                "requests that were being answered when it was taken: how far is not told",
                -sums["outputs_open"],
                0.0,
            ),
            _range(
                "aborted requests: tokens that were generated and no longer handed over",
                -sums["outputs_aborted"],
                0.0,
            ),
            *_running(seen),
        ],
    )


def _running(seen: _Seen) -> Iterator[Part]:
    """Requests of a session that goes on, or was cut off, have no row before they end."""
    if seen.session.state != "complete":
        yield _range(
            "requests that had not ended when the session's tables were read: they have no row yet",
            0.0,
            math.inf,
        )


def _endings(page: Page, seen: _Seen, _: Facts) -> Iterator[Row]:
    counted = page.by_label("vllm:request_success_total", "finished_reason")
    if not counted:
        return
    end, cut = pl.col("finish_sec"), seen.cut
    by_reason = {
        reason: _requests(
            seen.session,
            pl.col("finish_reason") == reason,
            ended=pl.col("finish_reason").is_not_null(),
            later=end > cut,
            recent=end.is_between(seen.recent, cut),
        )
        for reason in {*counted, "abort"}
    }
    aborted = by_reason["abort"]["ended"]
    for reason, value in sorted(counted.items()):
        found = by_reason[reason]
        parts = [
            _exact("requests that ended after the page was taken", -found["later"]),
            _range(
                "requests that ended right before it, if not yet counted",
                -found["recent"],
                0.0,
            ),
        ]
        if reason == "abort":
            parts.append(
                _range("requests whose client left: vLLM's counter leaves them out", -aborted, 0.0)
            )
        if reason == "stop":
            parts.append(
                _range(
                    "requests that a stop string ended: the API server finds it, and to the "
                    "engine it is an abort",
                    0.0,
                    aborted,
                )
            )
        if value or found["ended"]:
            yield from _row(
                f'vllm:request_success{{finished_reason="{reason}"}}',
                "requests",
                value,
                found["ended"],
                parts,
            )


def _requests(session: Session, which: pl.Expr | None = None, **sums: pl.Expr) -> dict[str, float]:
    """Sums over the requests that ended."""
    parts = [
        (batch if which is None else batch.filter(which)).select(
            expression.sum().cast(pl.Float64).alias(name) for name, expression in sums.items()
        )
        for batch in session.batches("requests", _REQUESTS)
    ]
    if not parts:
        return dict.fromkeys(sums, 0.0)
    return {name: float(value) for name, value in pl.concat(parts).sum().row(0, named=True).items()}


def _preemptions(page: Page, seen: _Seen, _: Facts) -> Iterator[Row]:
    time, cut = pl.col("timestamp_sec"), seen.cut
    preempted = pl.col("preempted_reqs")
    sums = seen.session.collect(
        "scheduler_steps",
        lambda steps: steps.select(
            all=preempted.sum(),
            later=preempted.filter(time > cut).sum(),
            recent=preempted.filter(time.is_between(seen.recent, cut)).sum(),
        ),
    ).row(0, named=True)
    aborted = _requests(
        seen.session, pl.col("finish_reason") == "abort", preemptions=pl.col("preemptions")
    )
    yield from _row(
        "vllm:num_preemptions",
        "times",
        page.total("vllm:num_preemptions_total"),
        float(sums["all"]),
        [
            _exact("preemptions after the page was taken", -float(sums["later"])),
            _range(
                "preemptions right before it, if not yet counted",
                -float(sums["recent"]),
                0.0,
            ),
            _range(
                "preemptions of requests that were aborted: vLLM counts one with the request's "
                "next token",
                -aborted["preemptions"],
                0.0,
            ),
        ],
    )


def _usage(page: Page, seen: _Seen, _: Facts) -> Iterator[Row]:
    gauges = page.by_label("vllm:kv_cache_usage_perc", "engine")
    time, cut = pl.col("timestamp_sec"), seen.cut
    share = pl.col("num_blocks") / pl.col("total_blocks")
    states = seen.session.collect(
        "kv_cache_usage",
        lambda usage: (
            usage.filter(time <= cut)
            .group_by("engine")
            .agg(
                last=share.sort_by("timestamp_sec").last(),
                least=share.filter(time > seen.recent).min(),
                most=share.filter(time > seen.recent).max(),
            )
        ),
    )
    by_engine = {str(row["engine"]): row for row in states.iter_rows(named=True)}
    for engine, value in sorted(gauges.items()):
        state = by_engine.get(engine or "0", {})
        last, least, most = (state.get(name) for name in ("last", "least", "most"))
        parts = []
        if last is not None and least is not None and most is not None:
            parts.append(
                _range(
                    "the gauge is of the last step whose results had arrived",
                    least - last,
                    most - last,
                )
            )
        name = "vllm:kv_cache_usage_perc" + (f'{{engine="{engine}"}}' if len(gauges) > 1 else "")
        yield from _row(
            name,
            "share",
            value,
            last,
            parts,
            "blocks held by requests; it falls to 0 when they end, whatever is cached",
        )


def _blocks(page: Page, seen: _Seen, _: Facts) -> Iterator[Row]:
    count = page.total("vllm:kv_block_lifetime_seconds_count")
    if count is None:
        return
    rate = _sample_rate(seen.session)
    time, cut = pl.col("timestamp_sec"), seen.cut
    moved, event = pl.col("num_blocks"), pl.col("event")
    allocated = seen.session.collect(
        "kv_cache_allocations",
        lambda rows: rows.filter(time <= cut).select(
            blocks=moved.filter(event == "allocate").sum(),
            recent=moved.filter((event == "allocate") & (time > seen.recent)).sum(),
            resets=(event == "reset").sum(),
        ),
    ).row(0, named=True)
    # A reset is not seen by the histogram.
    evicted = seen.session.collect(
        "kv_cache_evictions",
        lambda rows: rows.filter(pl.col("reason").cast(pl.String) != "reset").select(
            all=pl.len(),
            counted=(time <= cut).sum(),
            explicit=(pl.col("reason").cast(pl.String) == "explicit").sum(),
            lifetime=pl.col("lifetime_sec").mean(),
        ),
    ).row(0, named=True)
    pools = seen.session.collect(
        "kv_cache_usage",
        lambda rows: (
            rows.filter(time <= cut)
            .group_by("engine", "pool")
            .agg(
                used=(pl.col("num_blocks") + pl.col("cached_blocks")).max(),
                total=pl.col("total_blocks").max(),
            )
            .select(pl.col("used", "total").sum())
        ),
    ).row(0, named=True)
    # A block that was never handed out before, or not since a reset, has no life to tell of.
    fresh_most = min(allocated["blocks"], pools["total"] * (1 + allocated["resets"]))
    anew_least = max(0, allocated["blocks"] - fresh_most - evicted["counted"])
    anew_most = max(0, allocated["blocks"] - pools["used"] - evicted["counted"])
    anew_most += evicted["explicit"]
    error = _error(evicted["counted"] + anew_most, rate)
    later = evicted["all"] - evicted["counted"]
    note = None
    if rate < 1:
        note = f"of a sample of {100 * rate:g} % of the blocks: its spread is two standard errors"
    yield from _row(
        "vllm:kv_block_lifetime_seconds_count",
        "blocks",
        count,
        float(evicted["all"]),
        [
            _exact("blocks that were evicted after the page was taken", -float(later)),
            _range(
                "blocks that were handed out right before it, if not yet counted",
                -float(allocated["recent"]),
                0.0,
            ),
            _range(
                f"evicted blocks that are not in the sample of {100 * rate:g} %",
                -(1 - rate) * evicted["counted"] - error,
                -(1 - rate) * evicted["counted"] + error,
            ),
            _range(
                "blocks without content that were handed out anew: the histogram takes them for "
                "evicted",
                rate * anew_least,
                rate * anew_most,
            ),
        ],
        note,
    )
    total = page.total("vllm:kv_block_lifetime_seconds_sum")
    if total is not None and count:
        yield from _mean(total / count, evicted["lifetime"], anew_most, "lifetime", rate)
    idle = page.total("vllm:kv_block_idle_before_evict_seconds_sum")
    if idle is not None and count:
        mean = seen.session.collect(
            "kv_cache_evictions",
            lambda rows: rows.filter(pl.col("reason").cast(pl.String) != "reset").select(
                pl.col("idle_sec").mean()
            ),
        ).item()
        yield from _mean(idle / count, mean, anew_most, "idle_before_evict", rate)


def _mean(vllm: float, session: float | None, anew: int, name: str, rate: float) -> Iterator[Row]:
    """A mean of the histogram: of other blocks than the session's, so there is no difference."""
    mixed = f"has up to {anew:,} blocks without content in it" if anew else ""
    sample = f"is of a sample of {100 * rate:g} %" if rate < 1 else ""
    others = " and ".join(filter(None, [mixed, sample]))
    of = "no evicted block" if session is None else "every evicted block"
    yield Row(
        f"vllm:kv_block_{name}_seconds, mean",
        "s",
        vllm if math.isfinite(vllm) else None,
        session,
        None,
        (),
        None,
        "not comparable",
        f"the session's is of {of}" + (f"; vLLM's {others}" if others else ""),
    )


def _error(blocks: float, rate: float) -> float:
    """Two standard errors of how many of so many blocks a sample has."""
    return 2 * math.sqrt(blocks * rate * (1 - rate))


def _sample_rate(session: Session) -> float:
    """What ``--kv-cache-metrics-sample`` was, by the command line."""
    words = [str(word).replace("_", "-") for word in listed(session.metadata.get("argv"))]
    told = None
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag == "--kv-cache-metrics-sample":
            told = value if equals else next(iter(words[at + 1 : at + 2]), None)
    try:
        rate = float(told) if told is not None else SAMPLE
    except ValueError:
        return SAMPLE
    return rate if 0 < rate <= 1 else SAMPLE


def _pool(page: Page, _: _Seen, facts: Facts) -> Iterator[Row]:
    blocks = page.label("vllm:cache_config_info", "num_gpu_blocks")
    if blocks and blocks.isdigit() and facts.pool_blocks is not None:
        yield from _row(
            "vllm:cache_config_info{num_gpu_blocks}",
            "blocks",
            float(blocks),
            float(facts.pool_blocks),
            [],
        )


def _wall_clock(moment: Any) -> float | None:
    """Seconds since 1970."""
    try:
        return datetime.fromisoformat(str(moment).replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return None
