# SPDX-License-Identifier: Apache-2.0
"""What would a smaller --max-model-len have cut off?

vLLM refuses a prompt that leaves no room for a token of the answer, and ends an answer where prompt
and answer have so many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from analysis.headroom.lives import Ints
from analysis.tables.session import Session

TABLE = "requests"
MOST_ROWS = 8


@dataclass(frozen=True)
class Cut:
    """With ``max_model_len`` tokens at most: ``refused`` requests, which have ``refused_tokens`` of
    prompts and answers, and ``cut`` requests whose answers lose ``cut_tokens``."""

    max_model_len: int
    refused: int
    refused_tokens: int
    cut: int
    cut_tokens: int


@dataclass(frozen=True)
class Longest:
    """``requests`` that ended, with ``tokens`` of prompts and answers. ``p50_tokens``,
    ``p99_tokens`` and ``most_tokens``: of a request; the last is the least ``--max-model-len`` that
    cuts nothing. ``by_length``: what each power of two cuts, the largest first."""

    requests: int
    tokens: int
    p50_tokens: int
    p99_tokens: int
    most_tokens: int
    by_length: tuple[Cut, ...]


def measure(session: Session) -> Longest | None:
    """The lengths of the session's requests; None without a request.

    Raises:
        SessionError: the table cannot be read.

    """
    rows = session.collect(
        TABLE,
        lambda table: table.select("input_length", "output_length").drop_nulls().cast(pl.Int64),
    ).filter(pl.col("input_length") > 0)
    if rows.is_empty():
        return None
    prompt = rows["input_length"].to_numpy()
    total = prompt + rows["output_length"].to_numpy()
    p50, p99, most = (
        int(np.quantile(total, share, method="inverted_cdf")) for share in (0.5, 0.99, 1.0)
    )
    powers = 1 << np.arange(int(most - 1).bit_length() - 1, -1, -1)
    return Longest(
        requests=len(total),
        tokens=int(total.sum()),
        p50_tokens=p50,
        p99_tokens=p99,
        most_tokens=most,
        by_length=tuple(
            cut(prompt, total, int(power)) for power in powers[:MOST_ROWS] if 2 * power > p50
        ),
    )


def cut(prompt: Ints, total: Ints, most: int) -> Cut:
    """What ``--max-model-len`` would do to requests with these tokens of prompt, and of prompt and
    answer."""
    refused = prompt >= most
    shortened = ~refused & (total > most)
    return Cut(
        max_model_len=most,
        refused=int(refused.sum()),
        refused_tokens=int(total[refused].sum()),
        cut=int(shortened.sum()),
        cut_tokens=int((total[shortened] - most).sum()),
    )
