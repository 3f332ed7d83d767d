# SPDX-License-Identifier: Apache-2.0
"""What do prompts share within a recorded block?

Content ids stand for whole blocks. The ids of prefixes stand for the beginnings of prompts in
shorter steps, up to a length: they allow for smaller blocks than the recorded ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from analysis.tables.metadata import listed
from analysis.tables.schema import TABLES
from analysis.tables.session import Session
from analysis.whatif.ids import Ids, Ints, offsets

TABLE = TABLES["requests"]

UNIT = 16
"""Tokens from one prefix to the next."""

LONGEST = 1024
"""Tokens of the longest prefix in such steps."""

UNKNOWN = -1


@dataclass(frozen=True)
class Prefixes:
    """``ids``: for each request, in the order of arrival, the ids of the first ``UNIT`` tokens of
    its prompt, of the first two times ``UNIT`` and so on, or ``UNKNOWN``. ``engine``: its
    data-parallel rank."""

    ids: Ids
    engine: Ints

    def of_engine(self, rank: int) -> Ids:
        """The ids of one engine's requests."""
        return self.ids.take(np.flatnonzero(self.engine == rank))


def read(session: Session) -> Prefixes | None:
    """The prefixes of all requests; None where the session has other lengths, or none.

    Raises:
        SessionError: the table cannot be read.

    """
    most = LONGEST // UNIT
    lengths = listed(session.metadata.get("prefix_lengths"))[:most]
    if lengths != [UNIT * number for number in range(1, most + 1)]:
        return None
    columns = (TABLE.time, "engine", "prefix_ids")
    rows = pl.concat(
        batch.with_columns(pl.col("prefix_ids").fill_null([]).list.head(most))
        for batch in session.batches(TABLE.name, columns, history=True)
    ).sort(TABLE.time, maintain_order=True)
    counts = rows["prefix_ids"].list.len().cast(pl.Int64).to_numpy()
    values = rows["prefix_ids"].explode(empty_as_null=False).fill_null(UNKNOWN)
    return Prefixes(
        Ids(values.to_numpy(), offsets(counts)),
        rows["engine"].fill_null(0).cast(pl.Int64).to_numpy(),
    )
