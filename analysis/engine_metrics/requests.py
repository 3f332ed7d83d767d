# SPDX-License-Identifier: Apache-2.0
"""Do vLLM's counters of tokens, ended requests and preemptions agree with the session's?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import polars as pl

from analysis.engine_metrics.figures import Explanation, Row, exact, row, within
from analysis.engine_metrics.moment import UNDER_WAY_SEC, Seen
from analysis.engine_metrics.page import Page
from analysis.tables.facts import Facts
from analysis.tables.schema import TABLES
from analysis.tables.session import Session

_REQUESTS = (
    "timestamp",
    "input_length",
    "output_length",
    "first_token_sec",
    "finish_sec",
    "finish_reason",
    "preemptions",
)


_STEPS_UNDER_WAY = 3
"""The engine learns in so many steps that a client has left."""


def rows(page: Page, seen: Seen, facts: Facts) -> Iterator[Row]:
    """Rows for tokens, for requests by finish reason, and for preemptions.

    Raises:
        SessionError: a table cannot be read.

    """
    aborted, left_after = _left(seen.session)
    yield from _tokens(page, seen, aborted, left_after, facts)
    yield from _endings(page, seen, aborted, left_after)
    yield from _preemptions(page, seen)


def _left(session: Session) -> tuple[float, pl.Expr]:
    """How many requests were aborted, and which other ones may have ended as their client left.

    The API server drops what comes for a request whose client has left. If the engine had ended it
    by then, the session has an end that vLLM never counts. So a client may have left only where
    clients do leave, and not long before the time that the first of them waited.
    """
    took = pl.col("finish_sec") - pl.col("timestamp") * TABLES["requests"].time_unit
    count, shortest = 0, math.inf
    for batch in session.batches("requests", _REQUESTS):
        times = batch.filter(pl.col("finish_reason") == "abort").select(took).to_series()
        count += len(times)
        shortest = min([shortest, *times.drop_nulls().to_list()])
    is_other = (pl.col("finish_reason") != "abort") & pl.lit(count > 0)
    return float(count), is_other & (took >= shortest - UNDER_WAY_SEC)


def _tokens(
    page: Page, seen: Seen, aborted: float, left_after: pl.Expr, facts: Facts
) -> Iterator[Row]:
    first, end, cut = pl.col("first_token_sec"), pl.col("finish_sec"), seen.cut
    inputs, outputs = pl.col("input_length"), pl.col("output_length")
    recent = seen.recent
    is_aborted = pl.col("finish_reason") == "abort"
    # What is under way when a client leaves: a few tokens, and with a short answer the prompt, too.
    dropped = float(_STEPS_UNDER_WAY * (1 + (facts.scheduler.speculative_tokens or 0)))
    is_short = left_after & (outputs <= dropped)
    sums = _requests(
        seen.session,
        inputs=inputs,
        without_token=pl.when(first.is_null()).then(inputs).otherwise(0),
        first_later=pl.when(first > cut).then(inputs).otherwise(0),
        first_recent=pl.when(first.is_between(recent, cut)).then(inputs).otherwise(0),
        outputs=outputs,
        outputs_later=pl.when(first > cut).then(outputs).otherwise(0),
        # No table has the tokens that a request had by then.
        outputs_open=pl.when((first <= cut) & (end > recent)).then(outputs).otherwise(0),
        ended_left=left_after,
        outputs_aborted=pl.when(is_aborted & (end <= recent)).then(outputs).otherwise(0),
    )
    yield from row(
        "vllm:prompt_tokens",
        "tokens",
        page.total("vllm:prompt_tokens_total"),
        sums["inputs"],
        [
            exact(
                "prompts of requests that ended without a token: vLLM counts a prompt with its "
                "first token",
                -sums["without_token"],
            ),
            exact("prompts whose first token came after the page", -sums["first_later"]),
            within(
                "prompts whose first token came right before the page: vLLM may not have counted "
                "them yet",
                -sums["first_recent"],
                0.0,
            ),
            within(
                "prompts of short requests that the engine ended as their client left: vLLM's "
                "counter leaves them out",
                -_largest(seen.session, is_short, inputs, aborted),
                0.0,
            ),
            *_running(seen),
        ],
    )
    yield from row(
        "vllm:generation_tokens",
        "tokens",
        page.total("vllm:generation_tokens_total"),
        sums["outputs"],
        [
            exact("requests whose first token came after the page", -sums["outputs_later"]),
            within(
                "requests that had some of their answer when the page was taken: the session "
                "does not record how much",
                -sums["outputs_open"],
                0.0,
            ),
            within(
                "tokens of aborted requests that were generated and not handed over",
                -sums["outputs_aborted"],
                0.0,
            ),
            within(
                "the last tokens of requests that the engine ended as their client left: vLLM's "
                "counter leaves them out",
                -dropped * min(aborted, sums["ended_left"]),
                0.0,
            ),
            *_running(seen),
        ],
    )


def _running(seen: Seen) -> Iterator[Explanation]:
    """What explains tokens that the session has not: requests have no row before they end."""
    if seen.session.state != "complete" or seen.session.goes_on:
        yield within(
            "requests that had not ended when the session's tables were read: they have no row yet",
            0.0,
            math.inf,
        )


def _endings(page: Page, seen: Seen, aborted: float, left_after: pl.Expr) -> Iterator[Row]:
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
            left=left_after,
        )
        for reason in {*counted, "abort"}
    }
    for reason, value in sorted(counted.items()):
        found = by_reason[reason]
        parts = [
            exact("requests that ended after the page was taken", -found["later"]),
            within(
                "requests that ended right before the page: vLLM may not have counted them yet",
                -found["recent"],
                0.0,
            ),
        ]
        if reason == "abort":
            parts.append(
                within("requests whose client left: vLLM's counter leaves them out", -aborted, 0.0)
            )
        else:
            parts.append(
                within(
                    "requests that the engine ended as their client left: vLLM's counter leaves "
                    "them out",
                    -min(aborted, found["left"]),
                    0.0,
                )
            )
        if reason == "stop":
            parts.append(
                within(
                    "requests that a stop string ended: the API server finds the string, and the "
                    "engine sees an abort",
                    0.0,
                    aborted,
                )
            )
        if value or found["ended"]:
            yield from row(
                f'vllm:request_success{{finished_reason="{reason}"}}',
                "requests",
                value,
                found["ended"],
                parts,
            )


def _largest(session: Session, which: pl.Expr, value: pl.Expr, count: float) -> float:
    """The sum of the ``count`` largest values among the requests in ``which``."""
    largest = pl.Series([], dtype=pl.Float64)
    for batch in session.batches("requests", _REQUESTS):
        values = batch.filter(which).select(value.cast(pl.Float64)).to_series().drop_nulls()
        largest = pl.concat([largest, values]).top_k(int(count))
    return float(largest.sum())


def _requests(session: Session, which: pl.Expr | None = None, **sums: pl.Expr) -> dict[str, float]:
    """The sum of each expression over the requests that ended, or over those of them in
    ``which``."""
    sums_of_batches = [
        (batch if which is None else batch.filter(which)).select(
            expression.sum().cast(pl.Float64).alias(name) for name, expression in sums.items()
        )
        for batch in session.batches("requests", _REQUESTS)
    ]
    if not sums_of_batches:
        return dict.fromkeys(sums, 0.0)
    total = pl.concat(sums_of_batches).sum().row(0, named=True)
    return {name: float(value) for name, value in total.items()}


def _preemptions(page: Page, seen: Seen) -> Iterator[Row]:
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
    yield from row(
        "vllm:num_preemptions",
        "times",
        page.total("vllm:num_preemptions_total"),
        float(sums["all"]),
        [
            exact("preemptions after the page was taken", -float(sums["later"])),
            within(
                "preemptions right before the page: vLLM may not have counted them yet",
                -float(sums["recent"]),
                0.0,
            ),
            within(
                "preemptions of requests that were aborted: vLLM counts one with the request's "
                "next token",
                -aborted["preemptions"],
                0.0,
            ),
        ],
    )
