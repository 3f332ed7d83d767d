# SPDX-License-Identifier: Apache-2.0
"""Are the rows of a table sound: complete, within bounds, by the rules, and in the order of time?

These checks are quick and go along with reading. ``analysis.tables.faults`` then finds the line.
"""

from __future__ import annotations

from collections.abc import Sequence

import polars as pl

from analysis.tables.rules import RULES
from analysis.tables.schema import Table

DAMAGED = (
    "a line is cut short, a number out of range or at odds with another, or a row earlier than "
    "those before it"
)


def is_damaged(table: Table, rows: pl.DataFrame) -> bool:
    """Whether a row lacks a required value, has a number out of its column's bounds, or breaks a
    rule. Only what these columns show counts."""
    there = {*rows.columns}
    sound = [
        *(pl.col(name).is_not_null().all() for name in table.required if name in there),
        *(
            # Polars takes NaN for larger than every number.
            pl.col(name).is_between(*bounds).all()
            for name, bounds in table.bounds.items()
            if name in there
        ),
        *(rule.holds.all() for rule in RULES[table.name] if there.issuperset(rule.columns)),
    ]
    return bool(sound) and not all(rows.select(pl.all_horizontal(*sound)).row(0))


class Order:
    """Follows the order of a table's rows from frame to frame, if ``columns`` show it.

    Rows that are alike are in the order of time, and their numbers rise from row to row.
    """

    def __init__(self, table: Table, columns: Sequence[str]) -> None:
        self._time, self._alike = table.time, table.in_order
        self._where = [
            pl.col(name).cast(pl.String).is_in(values)
            for name, values in table.in_order_where.items()
        ]
        needed = {self._time, *self._alike, *table.in_order_where}
        self._numbers = [table.rising] if table.rising in columns else []
        self._is_known = bool(self._alike) and needed <= {*columns}
        self._last: pl.DataFrame | None = None

    def goes_on(self, frame: pl.DataFrame) -> bool:
        """Whether no row is earlier than the last one of its kind, such as its engine."""
        if not self._is_known:
            return True
        rows = frame.filter(self._where) if self._where else frame
        rows = rows.select(self._time, *self._alike, *self._numbers)
        if self._last is not None:
            rows = pl.concat([self._last, rows])
        in_order = rows[self._time].is_sorted()
        if in_order and all(rows[name].min() == rows[name].max() for name in self._alike):
            # Most sessions have one engine. Then the rows need no grouping, which takes longer.
            self._last = rows.tail(1)
            return not any((rows[name].diff() <= 0).any() for name in self._numbers)
        self._last = rows.group_by(self._alike, maintain_order=True).last().select(rows.columns)
        backwards = [
            *([] if in_order else [pl.col(self._time).diff().over(self._alike) < 0]),
            *(pl.col(name).diff().over(self._alike) <= 0 for name in self._numbers),
        ]
        if not backwards:
            return True
        return not rows.select(pl.any_horizontal(one.any() for one in backwards)).item()
