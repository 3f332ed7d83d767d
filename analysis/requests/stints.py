# SPDX-License-Identifier: Apache-2.0
"""What did each run of a request begin with, and under which name is it in the tables?"""

from __future__ import annotations

import polars as pl

from analysis.prefix.prompts import Prompts
from analysis.tables import lookups
from analysis.tables.session import Session


def with_lookups(session: Session, prompts: Prompts) -> pl.DataFrame:
    """The runs of ``prompts``, by ``order``, with ``engine`` and ``request_id``, and of the lookup
    that began them ``kind``, ``asked`` and ``found`` (tokens, a connector's included).

    Raises:
        SessionError: the table cannot be read.

    """
    admissions = session.collect(
        lookups.TABLE,
        lambda table: table.filter(pl.col("admitted") == 1).select(
            "engine",
            "request_id",
            "kind",
            asked="query_tokens",
            found=pl.col("hit_tokens") + pl.col("external_hit_tokens").fill_null(0),
        ),
        history=True,
    ).with_row_index("order")
    return prompts.runs.join(admissions, on="order").sort("order")
