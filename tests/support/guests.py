# SPDX-License-Identifier: Apache-2.0
"""Other tools: they put something of theirs in the place of vLLM's methods, in many forms.

Each form hands every call on and counts it. Those that Python does not bind to the object, as a
partial on a class, know it from elsewhere.
"""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from types import MethodType
from typing import Any
from unittest import mock

import wrapt

METHODS = {
    "pool": {
        "get_new_blocks": ("num_blocks",),
        "touch": ("blocks",),
        "free_blocks": ("ordered_blocks",),
        "get_num_free_blocks": (),
        "cache_full_blocks": None,
    },
    "manager": {
        "get_computed_blocks": ("request",),
        "free": ("request",),
        "get_block_ids": ("request_id",),
    },
    "scheduler": {
        "schedule": (),
        "update_from_output": ("scheduler_output", "model_runner_output"),
        "add_request": ("request",),
        "_free_request": ("request",),
        "finish_requests": ("request_ids", "finished_status"),
    },
}
"""By owner: methods that vLLM calls, and the arguments that it gives by place in each call. None:
it gives all of them by name."""

Call = Callable[..., Any]
"""Calls what was there before, of an object."""

Form = Callable[[Call, Any, "tuple[str, ...] | None"], Any]
"""Makes what is put in a method's place: of a call, of what was there, of its arguments."""


def with_wraps(call: Call, before: Any, arguments: Any) -> Any:
    @functools.wraps(before)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return call(self, *args, **kwargs)

    return wrapper


def anything(call: Call, before: Any, arguments: Any) -> Any:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return wrapper


def renamed(call: Call, before: Any, arguments: tuple[str, ...] | None) -> Any:
    """Other names for what is given by place; what is given by name can come in no other form."""
    if arguments is None:

        def named(this: Any, *, request: Any, blocks: Any, block_size: int, **rest: Any) -> Any:
            return call(this, request=request, blocks=blocks, block_size=block_size, **rest)

        return named
    names = "".join(f", its_{each}" for each in arguments)
    known = {"call": call}
    exec(f"def wrapper(this{names}, **rest): return call(this{names}, **rest)", known)
    return known["wrapper"]


def renamed_and_no_more(call: Call, before: Any, arguments: tuple[str, ...] | None) -> Any:
    names = "".join(f", its_{each}" for each in arguments or ())
    if not arguments:
        return renamed(call, before, arguments)
    known = {"call": call}
    exec(f"def wrapper(this{names}): return call(this{names})", known)
    return known["wrapper"]


def by_place_only(call: Call, before: Any, arguments: tuple[str, ...] | None) -> Any:
    if arguments is None:
        return anything(call, before, arguments)
    names = "".join(f", {each}" for each in arguments)
    known = {"call": call}
    exec(f"def wrapper(this{names}, /, **rest): return call(this{names}, **rest)", known)
    return known["wrapper"]


def swapped_names(call: Call, before: Any, arguments: tuple[str, ...] | None) -> Any:
    """The names mean other things: what is given by place must stay in its place."""
    if arguments is None or len(arguments) < 2:
        return renamed(call, before, arguments)
    names = "".join(f", {each}" for each in reversed(arguments))
    known = {"call": call}
    exec(f"def wrapper(this{names}): return call(this{names})", known)
    return known["wrapper"]


def lying(call: Call, before: Any, arguments: tuple[str, ...] | None) -> Any:
    """It says that it takes what it wraps takes, and looks for the names all the same."""
    if arguments is not None:
        return with_wraps(call, before, arguments)

    @functools.wraps(before)
    def wrapper(self: Any, **kwargs: Any) -> Any:
        return call(self, **kwargs)

    return wrapper


def of_wrapt(call: Call, before: Any, arguments: Any) -> Any:
    def wrapper(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        return call(instance, *args, **kwargs)

    def target(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the wrapper calls what was there")

    return wrapt.FunctionWrapper(target, wrapper)


class Caller:
    """An object that can be called, and has nothing else of a function."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def method(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class Descriptor:
    """What binds itself in its own way."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __get__(self, instance: Any, owner: Any) -> Any:
        return functools.partial(self.call, instance)


BOUND: dict[str, Form] = {
    "wraps": with_wraps,
    "anything": anything,
    "renamed": renamed,
    "renamed and no more": renamed_and_no_more,
    "by place only": by_place_only,
    "swapped names": swapped_names,
    "lying": lying,
    "wrapt": of_wrapt,
}
"""On a class, Python binds these to the object."""

UNBOUND: dict[str, Callable[[Call], Any]] = {
    "partial": functools.partial,
    "callable object": Caller,
    "method of another object": lambda call: Caller(call).method,
    "staticmethod": staticmethod,
    "classmethod": lambda call: classmethod(lambda _, *args, **kwargs: call(*args, **kwargs)),
    "mock": lambda call: mock.Mock(side_effect=call),
}
"""These get no object."""

FORMS = (*BOUND, *UNBOUND, "descriptor")


class Guests:
    """Tools that stand in the place of methods; ``calls`` counts by method what reached them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._undo: list[Callable[[], None]] = []

    def on_class(self, owner: type, name: str, form: str, arguments: Any, known: Any) -> None:
        """Put one on a class. ``known`` returns the object where the form does not get it."""
        before = vars(owner).get(name)
        inherited = getattr(owner, name)
        standing = inspect.getattr_static(owner, name)

        def counted(this: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            # Another tool may have put there what Python does not bind to the object.
            bind = getattr(type(standing), "__get__", None)
            if bind is None:
                return standing(*args, **kwargs)
            return bind(standing, this, type(this))(*args, **kwargs)

        def alone(*args: Any, **kwargs: Any) -> Any:
            return counted(known(), *args, **kwargs)

        setattr(owner, name, _made(form, counted, alone, inherited, arguments))

        def undo() -> None:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)

    def on_instance(self, instance: Any, name: str, form: str, arguments: Any) -> None:
        """Put one on an object, around whatever it has."""
        standing = getattr(instance, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return standing(*args, **kwargs)

        def of_this(_: Any, *args: Any, **kwargs: Any) -> Any:
            return counted(*args, **kwargs)

        made = _made(form, of_this, counted, standing, arguments)
        if form in BOUND and form != "wrapt":
            made = MethodType(made, instance)
        elif form in ("wrapt", "staticmethod", "classmethod", "descriptor"):
            made = made.__get__(instance, type(instance))
        setattr(instance, name, made)
        self._undo.append(lambda: setattr(instance, name, standing))

    def leave(self, *, first_first: bool = False) -> None:
        """Put back what was there before each."""
        for undo in self._undo if first_first else reversed(self._undo):
            undo()
        self._undo.clear()


def _made(form: str, bound: Call, alone: Call, before: Any, arguments: Any) -> Any:
    if form == "descriptor":
        return Descriptor(bound)
    if form in UNBOUND:
        return UNBOUND[form](alone)
    return BOUND[form](bound, before, arguments)
