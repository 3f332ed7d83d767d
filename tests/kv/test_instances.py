# SPDX-License-Identifier: Apache-2.0
"""What is put around an object's method sees each call, and changes none."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from profilemate.hooks.instances import has_method, hook, is_hook, require_method

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

    def positional(self, request: int, size: int = 16, /) -> object:
        return request, size

    def failing(self, request: int) -> object:
        raise LookupError(request)

    def summed(self, numbers: Any) -> int:
        return sum(numbers)


def noting(noted: list[Any], answer: object = None) -> Callable[..., Any]:
    def note(*given: Any) -> Any:
        noted.append(given)
        return answer

    return note


CALLS = [
    ("ordinary", (1,), {}, 16),
    ("ordinary", (1, [2], 3), {}, 3),
    ("ordinary", (), {"size": 3, "request": 1}, 3),
    ("keyword", (1,), {}, 16),
    ("keyword", (), {"size": 3, "request": 1}, 3),
    ("private", (1,), {"size": 3}, 3),
    ("open_ended", (1, 2), {"other": 4}, 16),
    ("open_ended", (), {"size": 3}, 3),
    ("positional", (1,), {}, 16),
    ("positional", (1, 3), {}, 3),
]


@pytest.mark.parametrize("given", [None, "name"])
@pytest.mark.parametrize(("name", "args", "kwargs", "size"), CALLS)
def test_what_is_around_a_call(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], size: int, given: Any
) -> None:
    """It gets the result and the arguments that it asks for, those by default included."""
    keeper = Keeper()
    noted: list[Any] = []
    expected = getattr(keeper, name)(*args, **kwargs)
    hook(
        keeper,
        name,
        "size",
        before=noting(noted, "begun"),
        after=noting(noted),
        lastly=noting(noted),
        given=given,
    )
    found = getattr(keeper, name)(*args, **kwargs)
    assert found == expected
    assert noted == [(size,), ("begun", size), (expected, "begun", size)]
    if name == "ordinary" and not kwargs and len(args) == 1:
        assert found[1] is BLOCKS


@pytest.mark.parametrize("given", [None, "place"])
def test_what_fails_ends_what_began(given: Any) -> None:
    keeper = Keeper()
    noted: list[Any] = []
    ends = functools.partial(noted.append, "after")
    hook(keeper, "failing", "request", before=noting(noted), after=ends, given=given)
    hook(keeper, "failing", "request", lastly=noting(noted, "ended"), given=given)
    with pytest.raises(LookupError):
        keeper.failing(1)
    assert noted == [(1,), (1,)]


def test_an_argument_may_be_exchanged() -> None:
    """An iterator can be looked at once. The method gets another one."""

    def listed(numbers: Any) -> tuple[list[int], Any]:
        listed = list(numbers)
        return listed, iter(listed)

    for given in (None, "place"):
        keeper = Keeper()
        noted: list[Any] = []
        undo = hook(
            keeper,
            "summed",
            "numbers",
            before=listed,
            after=lambda result, begun, _, noted=noted: noted.append((result, begun)),
            given=given,  # type: ignore[arg-type]
            exchanges=True,
        )
        assert keeper.summed(iter((1, 2))) == keeper.summed(numbers=iter((1, 2))) == 3
        assert noted == [(3, [1, 2])] * 2
        under = keeper.summed
        undo()
        # Whoever still has it can call it.
        assert under(iter((1, 2))) == keeper.summed(iter((1, 2))) == 3
        assert noted == [(3, [1, 2])] * 2


def test_an_object_keeps_what_it_had() -> None:
    """An attribute of its own in the method's place, which comes back with the undoing."""
    keeper = Keeper()
    noted: list[Any] = []
    mine = functools.partial(Keeper.summed, keeper)
    keeper.summed = mine  # type: ignore[method-assign]
    undo = hook(keeper, "summed", after=noting(noted))
    assert keeper.summed([1, 2]) == 3
    undo()
    assert keeper.summed is mine
    assert len(noted) == 1


class Proxy:
    """Stands before a keeper."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._keeper, name)


def test_an_object_that_hands_all_on() -> None:
    proxy = Proxy(Keeper())
    noted: list[Any] = []
    undo = hook(proxy, "summed", "numbers", after=noting(noted), given="place")
    assert proxy.summed([1, 2]) == 3
    undo()
    assert vars(proxy).keys() == {"_keeper"}
    assert noted == [(3, [1, 2])]


class Slots:
    __slots__ = ("__weakref__",)

    def method(self) -> None: ...


def test_an_object_that_can_have_no_hook() -> None:
    keeper = Slots()
    with pytest.raises(AttributeError):
        hook(keeper, "method")
    keeper.method()
    assert not is_hook(keeper.method)


def test_a_method_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="Keeper has no method weigh"):
        require_method(Keeper(), "weigh")
    with pytest.raises(AttributeError, match="Keeper has no method weigh"):
        hook(Keeper(), "weigh")
    assert not has_method(None, "weigh")


@pytest.mark.parametrize("undone_first", [0, 1])
def test_two_hooks_of_ours_are_undone_in_any_order(undone_first: int) -> None:
    keeper = Keeper()
    noted: list[Any] = []
    undo = [hook(keeper, "summed", after=noting(noted)) for _ in range(2)]
    undo[undone_first]()
    keeper.summed([1])
    assert len(noted) == 1
    undo[1 - undone_first]()
    keeper.summed([1])
    assert len(noted) == 1


def test_a_hook_does_not_keep_the_object() -> None:
    keeper = Keeper()
    gone = weakref.ref(keeper)
    for name in ("ordinary", "keyword", "summed"):
        undo = hook(keeper, name, "request", after=print, given="place")
    del keeper
    assert gone() is None
    undo()


@pytest.mark.parametrize(("name", "args", "kwargs", "_"), CALLS)
def test_what_is_put_on_the_class_later_gets_the_call_as_it_came(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    _: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keeper = Keeper()
    came: list[Any] = []
    hook(keeper, name, after=print)
    monkeypatch.setattr(Keeper, name, lambda _, *args, **kwargs: came.append((args, kwargs)))
    getattr(keeper, name)(*args, **kwargs)
    assert came == [(args, kwargs)]


@pytest.mark.parametrize(
    ("given", "args", "kwargs"),
    [
        ("place", (1,), {}),
        ("place", (1,), {"size": 3}),
        ("name", (), {"request": 1}),
        ("name", (), {"request": 1, "size": 3, "blocks": [2]}),
    ],
)
def test_so_it_does_where_the_hook_has_the_methods_parameters(
    given: Any, args: tuple[Any, ...], kwargs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = Keeper()
    came: list[Any] = []
    noted: list[Any] = []
    hook(keeper, "ordinary", "request", before=noting(noted), given=given)
    monkeypatch.setattr(Keeper, "ordinary", lambda _, *args, **named: came.append((args, named)))
    keeper.ordinary(*args, **kwargs)
    assert came == [(args, kwargs)]
    assert noted == [(1,)]
