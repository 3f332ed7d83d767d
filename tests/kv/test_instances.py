# SPDX-License-Identifier: Apache-2.0
"""A replacement that takes less than the method is refused before vLLM can call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from profilemate.hooks.instances import put


class Pool:
    def named(self, count: int) -> int:
        return count

    def grown(self, request: int, limit: int | None = None) -> int:
        return request + (limit or 0)

    def keyword(self, request: int, *, limit: int = 0) -> int:
        return request + limit

    def open_ended(self, *blocks: int, **options: int) -> int:
        return sum(blocks) + sum(options.values())


Make = Callable[[], Callable[..., Any]]
"""Each replacement is made anew: one that was put in place looks like what it replaced."""


def one() -> Callable[..., Any]:
    return lambda count: -count


def nothing() -> Callable[..., Any]:
    return lambda: 0


def all_placed() -> Callable[..., Any]:
    return lambda request, *limit: -request


def all_blocks() -> Callable[..., Any]:
    return lambda *blocks: 0


def anything() -> Callable[..., Any]:
    return lambda *args, **kwargs: -1


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("named", nothing),
        ("named", all_placed),
        ("grown", one),
        # A call that names the limit would fail.
        ("grown", all_placed),
        ("keyword", all_placed),
        ("open_ended", all_placed),
        ("open_ended", all_blocks),
    ],
)
def test_what_takes_less_is_refused(name: str, make: Make) -> None:
    pool = Pool()
    with pytest.raises(TypeError, match="which is not known here"):
        put(pool, name, make())
    assert getattr(pool, name)(3) == 3
    assert not vars(pool)


@pytest.mark.parametrize(
    ("name", "make"),
    [("named", one), ("named", anything), ("grown", anything), ("open_ended", anything)],
)
def test_what_takes_as_much_is_put_there(name: str, make: Make) -> None:
    pool = Pool()
    undo = put(pool, name, make())
    assert getattr(pool, name)(1) == -1
    undo()
    assert getattr(pool, name)(1) == 1
