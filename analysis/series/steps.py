# SPDX-License-Identifier: Apache-2.0
"""How large were the scheduler's steps, and when were requests preempted?

The means leave steps out that scheduled nothing: these show how long an engine was idle, and not
how it works.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

from analysis.series.bins import Bins
from analysis.tables.session import Session

TABLE = "scheduler_steps"

Values = tuple[float | None, ...]


@dataclass(frozen=True)
class StepSeries:
    """The steps of each bin that scheduled tokens, of all engines; None where there is none.

    ``requests_mean`` and ``requests_high``: requests in a step. ``prefill_mean`` and
    ``decode_mean``: tokens in a step, of prompts and of answers; ``tokens_high``: the most of both
    in any step. ``preempted``: how many requests were preempted in the bin.
    """

    requests_mean: Values
    requests_high: Values
    prefill_mean: Values
    decode_mean: Values
    tokens_high: Values
    preempted: tuple[int, ...]


def measure(session: Session, bins: Bins) -> StepSeries:
    """The steps of all engines.

    Raises:
        SessionError: the table cannot be read.

    """
    busy = pl.col("scheduled_tokens") > 0

    def of_busy(column: str) -> pl.Expr:
        return pl.when(busy).then(pl.col(column))

    by_bin = bins.dense(
        session.collect(
            TABLE,
            lambda table: table.group_by(bins.of(pl.col("timestamp_sec"))).agg(
                requests_mean=of_busy("scheduled_reqs").mean(),
                requests_high=of_busy("scheduled_reqs").max(),
                prefill_mean=of_busy("prefill_tokens").mean(),
                decode_mean=of_busy("decode_tokens").mean(),
                tokens_high=of_busy("scheduled_tokens").max(),
                preempted=pl.col("preempted_reqs").sum(),
            ),
        )
    )

    def values(column: str) -> Values:
        return tuple(by_bin[column].to_list())

    return StepSeries(
        requests_mean=values("requests_mean"),
        requests_high=values("requests_high"),
        prefill_mean=values("prefill_mean"),
        decode_mean=values("decode_mean"),
        tokens_high=values("tokens_high"),
        preempted=tuple(by_bin["preempted"].fill_null(0).to_list()),
    )
