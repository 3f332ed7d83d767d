# SPDX-License-Identifier: Apache-2.0
"""Which requests are parts of one call?

A call for several answers (``n``) is a request for each of them, with ``0_``, ``1_`` and so on
before the call's id. A beam search in vLLM's server is a request for each beam and each token. Both
are known by vLLM's request ids alone; so are no calls whose ids a client has made up in other ways.
"""

from __future__ import annotations

from dataclasses import dataclass

import polars as pl

_ANSWER = r"^(\d{1,6})_(.+)$"
_BEAM = r"^(.+)-[0-9a-f]{32}-beam-\d+(?:-[0-9a-f]{8})?$"


@dataclass(frozen=True)
class FanOut:
    """Calls of several requests, of the requests that ended.

    ``calls``: for several answers; ``requests``: theirs; ``most``: of one call. ``beam_calls`` and
    ``beam_requests``: the same of beam searches.
    """

    calls: int
    requests: int
    most: int
    beam_calls: int
    beam_requests: int


def measure(requests: pl.DataFrame) -> FanOut:
    """The calls among these requests.

    Args:
        requests: a row for each. Columns: ``request_id``, ``input_length`` (tokens).

    """
    answers = (
        requests.select(
            "input_length",
            answer=pl.col("request_id").str.extract(_ANSWER, 1),
            call=pl.col("request_id").str.extract(_ANSWER, 2),
        )
        .drop_nulls("call")
        # All answers have the same prompt.
        .group_by("call", "input_length")
        .agg(pl.col("answer").n_unique(), requests=pl.len())
        .filter(pl.col("answer") > 1)
    )
    beams = (
        requests.select(call=pl.col("request_id").str.extract(_BEAM, 1))
        .drop_nulls("call")
        .group_by("call")
        .len()
    )
    return FanOut(
        calls=answers.height,
        requests=int(answers["requests"].sum()),
        most=max(answers["requests"], default=0),
        beam_calls=beams.height,
        beam_requests=int(beams["len"].sum()),
    )
