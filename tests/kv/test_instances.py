# SPDX-License-Identifier: Apache-2.0
"""A replacement that takes less than the method is refused before vLLM can call it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest

from profilemate.hooks.instances import followed, put, surrounded


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


BLOCKS = object()


class Keeper:
    def ordinary(self, request: int, blocks: object = BLOCKS, size: int = 16) -> object:
        return request, blocks, size

    def keyword(self, request: int, *, size: int = 16) -> object:
        return request, size

    def private(self, _result: int, size: int = 16) -> object:
        return _result, size

    def open_ended(self, *request: int, size: int = 16, **more: int) -> object:
        return request, size, more

    def failing(self, request: int) -> object:
        raise LookupError(request)


calls = pytest.mark.parametrize(
    ("name", "args", "kwargs", "size"),
    [
        ("ordinary", (1,), {}, 16),
        ("ordinary", (1, [2], 3), {}, 3),
        ("ordinary", (), {"size": 3, "request": 1}, 3),
        ("keyword", (1,), {}, 16),
        ("keyword", (), {"size": 3, "request": 1}, 3),
        ("private", (1,), {"size": 3}, 3),
        ("open_ended", (1, 2), {"other": 4}, 16),
        ("open_ended", (), {"size": 3}, 3),
    ],
)


@calls
def test_what_follows_a_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
) -> None:
    """It gets the result and the arguments that it asks for, those by default included."""
    keeper, noted = Keeper(), []

    def after(result: object, *wanted: object) -> None:
        noted.append((result, wanted))

    expected = getattr(keeper, name)(*args, **kwargs)
    original = getattr(Keeper, name)
    put(keeper, name, followed(keeper, name, original, after, "size"))
    found = getattr(keeper, name)(*args, **kwargs)
    assert found == expected
    assert noted == [(expected, (size,))]
    if name == "ordinary" and not kwargs and len(args) == 1:
        assert found[1] is BLOCKS


@calls
def test_what_surrounds_a_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], size: int
) -> None:
    keeper, noted = Keeper(), []

    def before() -> str:
        noted.append("before")
        return "kept"

    expected = getattr(keeper, name)(*args, **kwargs)
    after = _noting(noted)
    put(keeper, name, surrounded(keeper, name, getattr(Keeper, name), before, after, "size"))
    assert getattr(keeper, name)(*args, **kwargs) == expected
    assert noted == ["before", ("kept", size)]


def _noting(noted: list[Any]) -> Callable[..., None]:
    return lambda *given: noted.append(given)


def test_what_fails_is_surrounded_all_the_same() -> None:
    keeper, noted = Keeper(), []
    after = _noting(noted)
    hook = surrounded(keeper, "failing", Keeper.failing, lambda: "kept", after, "request")
    put(keeper, "failing", hook)
    with pytest.raises(LookupError):
        keeper.failing(1)
    assert noted == [("kept", 1)]


@pytest.mark.parametrize("name", ["ordinary", "keyword"])
def test_a_call_that_the_method_refuses_is_surrounded_by_nothing(name: str) -> None:
    keeper, noted = Keeper(), []
    after = _noting(noted)
    put(keeper, name, surrounded(keeper, name, getattr(Keeper, name), after, after))
    with pytest.raises(TypeError, match=name):
        getattr(keeper, name)(more=1)
    assert not noted


def test_arguments_that_the_method_has_not_are_refused() -> None:
    with pytest.raises(TypeError, match=r"Keeper\.ordinary takes no weight"):
        followed(Keeper(), "ordinary", Keeper.ordinary, print, "weight")


def test_what_fails_is_followed_by_nothing() -> None:
    keeper, noted = Keeper(), []
    put(keeper, "failing", followed(keeper, "failing", Keeper.failing, noted.append))
    with pytest.raises(LookupError):
        keeper.failing(1)
    with pytest.raises(TypeError, match="failing"):
        keeper.failing()  # type: ignore[call-arg]
    assert not noted


def test_what_follows_does_not_keep_the_object() -> None:
    keeper = Keeper()
    gone = weakref.ref(keeper)
    put(keeper, "ordinary", followed(keeper, "ordinary", Keeper.ordinary, lambda result: None))
    del keeper
    assert gone() is None
