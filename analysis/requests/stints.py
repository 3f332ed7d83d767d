# SPDX-License-Identifier: Apache-2.0
"""What did each stint of a request begin with, and under which name is it in the tables?"""

from __future__ import annotations

import polars as pl

from analysis.prefix.prompts import Prompts
from analysis.tables import lookups
from analysis.tables.session import Session


def with_lookups(session: Session, prompts: Prompts) -> pl.DataFrame:
    """The stints of ``prompts``, by ``order``, each with the lookup that began it.

    The columns of ``Prompts.stints``, and of the lookup: ``engine``, ``request_id``, ``kind``,
    ``asked`` (tokens of the prompt), ``found`` (tokens, those of a KV connector included).

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
    return prompts.stints.join(admissions, on="order").sort("order")
