# SPDX-License-Identifier: Apache-2.0
"""How a hook takes a call of one object's method, and hands it on.

What is called is what Python would call without the hook at that moment: the object's own attribute
of before, or the class's, whatever its kind. It gets the arguments as they came.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any, Literal

Given = Literal["place", "name"]


@dataclass(frozen=True)
class Beneath:
    """What an object calls by a name, before a hook is there.

    Attributes:
        call: calls it, of an instance, with arguments and named ones.
        current: as the object gives it.
        function: the class's function, where the object has nothing of its own there and the class
            nothing else.
        is_own: whether the object itself has it, and not its class.

    """

    call: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
    current: Any
    function: FunctionType | None
    is_own: bool


@dataclass(frozen=True)
class Form:
    """The text of a hook, as far as it depends on the method.

    Attributes:
        parameters: what it takes.
        arguments: expressions for the arguments that the hook's functions get.
        called: an expression that hands the call on.
        looks: lines before it, which the arguments need.
        exchange: a line that has ``_before`` exchange the first argument.
        names: what these know by name.

    """

    parameters: str
    arguments: list[str]
    called: str
    exchange: str
    names: dict[str, Any]
    looks: list[str] = field(default_factory=list)


def beneath(instance: Any, name: str) -> Beneath:
    """What the object calls by this name."""
    current = getattr(instance, name)
    found = inspect.getattr_static(type(instance), name, None)
    if (
        type(found) is FunctionType
        and type(current) is MethodType
        and (current.__self__ is instance and current.__func__ is found)
    ):
        return Beneath(_of_class(name), current, found, False)
    is_own = name in getattr(instance, "__dict__", ())
    if is_own or found is None:
        return Beneath(lambda this, args, kwargs: current(*args, **kwargs), current, None, is_own)
    return Beneath(_of_class(name), current, None, False)


def of_class(owner: type, name: str) -> Callable[..., Any]:
    """What the class has by this name, to be called with the object before its arguments."""
    found = inspect.getattr_static(owner, name)
    if type(found) is FunctionType:
        return found
    bind = getattr(type(found), "__get__", None)
    if bind is None:
        return lambda _, *args, **kwargs: found(*args, **kwargs)
    return lambda this, *args, **kwargs: bind(found, this, type(this))(*args, **kwargs)


def _of_class(name: str) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]:
    """Calls what the class has at that moment, which may be something that is called unbound."""
    return lambda this, args, kwargs: of_class(type(this), name)(this, *args, **kwargs)


def form_of(
    instance: Any, name: str, method: Beneath, wanted: Sequence[str], given: Given | None
) -> Form:
    """How a hook of this method takes its calls, and hands them on."""
    known = {"_this": weakref.ref(instance), "_class": type(instance), "_own": method.function}
    if method.function is not None and given is not None:
        parameters = _parameters(method.function)
        places = _places([each.name for each in parameters], wanted, given)
        if places is not None and all(map(_is_ordinary, parameters)):
            return _as_the_method(name, method, parameters, places, given, known)
    return _open(name, method, wanted, given, known)


def _as_the_method(
    name: str,
    method: Beneath,
    parameters: Sequence[inspect.Parameter],
    places: Sequence[int],
    given: Given,
    known: dict[str, Any],
) -> Form:
    """With the method's own parameters, which are handed on by place: that costs least."""
    names = [each.name for each in parameters]
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    taken = [f"{each}=_default_{each}" if each in defaults else each for each in names]
    # Not the whole of it, which holds the object.
    call = method.call

    def changed(this: Any, *values: Any) -> Any:
        """Another tool has put something in the class's place: it gets what vLLM gives."""
        args = []
        kwargs = {}
        for each, value in zip(names, values, strict=True):
            if given == "place" and each not in defaults:
                args.append(value)
            elif each not in defaults or value is not defaults[each]:
                kwargs[each] = value
        return call(this, tuple(args), kwargs)

    arguments = [names[place] for place in places]
    values = ", ".join(["_this()", *names])
    return Form(
        parameters=", ".join(["_self", *taken]),
        arguments=arguments,
        called=f"(_own if _class.{name} is _own else _changed)({values})",
        exchange=f"_begun, {''.join(arguments[:1])} = _before({', '.join(arguments)})",
        names={**known, "_changed": changed, **{f"_default_{n}": d for n, d in defaults.items()}},
    )


def _open(
    name: str,
    method: Beneath,
    wanted: Sequence[str],
    given: Given | None,
    known: dict[str, Any],
) -> Form:
    """With whatever comes, which is handed on as it came."""
    find = _finder(method.current, wanted, given)
    arguments = [f"_argument_{each}" for each in wanted]
    called = "_beneath(_this(), args, kwargs)"
    if method.function is not None:
        own = "_own(_this(), *args, **kwargs)"
        called = f"({own} if _class.{name} is _own else {called})"
    looks = [f"{', '.join(arguments)}, = _find(args, kwargs)"] if wanted else []

    def exchanged(
        args: tuple[Any, ...], kwargs: dict[str, Any], first: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (first, *args[1:]), kwargs
        return args, {n: first if n == wanted[0] else value for n, value in kwargs.items()}

    return Form(
        parameters="_self, /, *args, **kwargs",
        arguments=arguments,
        looks=looks,
        called=called,
        exchange=f"_begun, _first = _before({', '.join(arguments)}); "
        "args, kwargs = _exchanged(args, kwargs, _first)",
        names={**known, "_beneath": method.call, "_find": find, "_exchanged": exchanged},
    )


def _finder(
    current: Any, wanted: Sequence[str], given: Given | None
) -> Callable[[tuple[Any, ...], dict[str, Any]], list[Any]]:
    """Finds the wanted arguments of a call; None for one that it lacks.

    In which place one is, vLLM says, or else the signature, or else the order in which they are
    wanted.
    """
    try:
        parameters = list(inspect.signature(current).parameters.values())
    except Exception:
        # Of something that has none, or whose annotations mean nothing at run time.
        parameters = []
    defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
    placed = [each.name for each in parameters if each.kind in _PLACED]
    if given == "place":
        placed = list(wanted)
    named = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    looked_for = [
        (each, placed.index(each) if each in placed else place, each in named, defaults.get(each))
        for place, each in enumerate(wanted)
    ]

    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        return [
            kwargs.get(each, default) if is_named or place >= len(args) else args[place]
            for each, place, is_named, default in looked_for
        ]

    return find


_PLACED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _parameters(function: FunctionType) -> list[inspect.Parameter]:
    """The function's own parameters but the first, whatever it says that it takes.

    A wrapper may say that it takes what it wraps does.
    """
    bare = FunctionType(
        function.__code__, {}, function.__name__, function.__defaults__, function.__closure__
    )
    bare.__kwdefaults__ = function.__kwdefaults__
    return list(inspect.signature(bare).parameters.values())[1:]


def _is_ordinary(parameter: inspect.Parameter) -> bool:
    """Whether it can be given by place and by name, and its name is not one of ours."""
    by_place = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return by_place and not parameter.name.startswith("_")


def _places(names: Sequence[str], wanted: Sequence[str], given: Given) -> list[int] | None:
    """Where the method takes the wanted arguments; None where it does not.

    What vLLM gives by place may have any name.
    """
    if given == "place":
        return list(range(len(wanted))) if len(wanted) <= len(names) else None
    return [names.index(each) for each in wanted] if set(wanted) <= set(names) else None
