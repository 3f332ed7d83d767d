# SPDX-License-Identifier: Apache-2.0
"""Put a function of ours in the place of one object's method.

The instance is changed, not its class. That covers whatever class really runs, a subclass or a
replacement included; nothing is hooked twice; and one ``delattr`` takes the hook away.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]


def reference(instance: object) -> Callable[[], Any]:
    """A weak reference to the instance, which hooks must not keep alive."""
    return weakref.ref(instance)


def own_method(instance: object, name: str) -> Callable[..., Any] | None:
    """The method that this object's class gives it, unbound, or None where it has none.

    None, too, where the object itself has something in the method's place: to call the class's
    would leave that out.
    """
    method = inspect.getattr_static(type(instance), name, None)
    if not inspect.isroutine(method):
        return None
    unbound: Callable[..., Any] = getattr(type(instance), name)
    bound = getattr(instance, name)
    is_of_class = getattr(bound, "__func__", bound) == getattr(unbound, "__func__", unbound)
    return unbound if is_of_class else None


def required_method(instance: object, name: str) -> Callable[..., Any]:
    """As ``own_method``, of a method that the caller cannot do without.

    Raises:
        AttributeError: the object's class has none of that name.

    """
    method = own_method(instance, name)
    if method is None:
        raise AttributeError(f"{type(instance).__qualname__} has no method {name}")
    return method


def followed(
    instance: object,
    name: str,
    original: Callable[..., Any],
    after: Callable[..., None],
    *arguments: str,
) -> Callable[..., Any]:
    """A function of this method's own parameters that calls it and then ``after``.

    ``after`` gets the method's result and the arguments of these names, and must not raise. Python
    takes a microsecond to hand keywords on by ``**kwargs``, and a tenth of that to hand them on by
    place. So the function is made from the parameters, where they allow it.

    Raises:
        TypeError: the method has no parameter of one of these names.

    """
    method = _Method(instance, name, original, arguments)
    if not method.is_ordinary:

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(method.this(), *args, **kwargs)
            after(result, *method.values(args, kwargs))
            return result

        return call
    return method.made(
        f"""
    _result = _original({method.handed_on})
    _after({", ".join(["_result", *arguments])})
    return _result
""",
        _after=after,
    )


def surrounded(
    instance: object,
    name: str,
    original: Callable[..., Any],
    before: Callable[[], Any],
    after: Callable[..., None],
    *arguments: str,
) -> Callable[..., Any]:
    """As ``followed``, but ``after`` is called even if the method raises.

    It gets what ``before`` returned, in place of the result. Neither of the two may raise.

    Raises:
        TypeError: as ``followed``.

    """
    method = _Method(instance, name, original, arguments)
    if not method.is_ordinary:

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                values = method.values(args, kwargs)
            except TypeError:
                return original(method.this(), *args, **kwargs)
            begun = before()
            try:
                return original(method.this(), *args, **kwargs)
            finally:
                after(begun, *values)

        return call
    return method.made(
        f"""
    _begun = _before()
    try:
        return _original({method.handed_on})
    finally:
        _after({", ".join(["_begun", *arguments])})
""",
        _before=before,
        _after=after,
    )


class _Method:
    """A method of one object, some of whose arguments are wanted.

    ``is_ordinary``: all parameters can be given by place, as ``handed_on`` does.
    """

    def __init__(
        self, instance: object, name: str, original: Callable[..., Any], wanted: tuple[str, ...]
    ) -> None:
        bound = getattr(instance, name)
        self.this = reference(instance)
        self._name = name
        self._original = original
        self._wanted = wanted
        self._signature = inspect.signature(bound)
        parameters = self._signature.parameters
        for argument in wanted:
            if argument not in parameters:
                raise TypeError(f"{bound.__qualname__} takes no {argument}")
        self.is_ordinary = all(map(_is_ordinary, parameters.values()))
        self.handed_on = ", ".join(["_this()", *parameters])

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The wanted arguments of a call.

        Raises:
            TypeError: the method cannot be called so.

        """
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        return [given.arguments[name] for name in self._wanted]

    def made(self, body: str, **known: Any) -> Callable[..., Any]:
        """A function with the method's ordinary parameters and this body."""
        parameters = self._signature.parameters.values()
        names: dict[str, Any] = {"_original": self._original, "_this": self.this, **known}
        names |= {f"_default_{each.name}": each.default for each in parameters}
        taken = [
            each.name if each.default is each.empty else f"{each.name}=_default_{each.name}"
            for each in parameters
        ]
        source = f"def {self._name}({', '.join(taken)}):{body}"
        exec(compile(source, f"<{__name__}: {self._name}>", "exec"), names)
        function: Callable[..., Any] = names[self._name]
        return function


def _is_ordinary(parameter: inspect.Parameter) -> bool:
    """Whether it can be given by place, and its name is not one of ours."""
    by_place = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return by_place and not parameter.name.startswith("_")


def _check_takes_as_much(replacement: Callable[..., Any], method: Callable[..., Any]) -> None:
    ours = inspect.signature(replacement).parameters.values()
    kinds = {parameter.kind for parameter in ours}
    names = [parameter.name for parameter in ours if parameter.kind not in _ANY]
    for place, parameter in enumerate(inspect.signature(method).parameters.values()):
        kind = parameter.kind
        by_place = _ANY_PLACED in kinds or (kind is not _ANY_PLACED and place < len(names))
        by_name = _ANY_NAMED in kinds or (kind is not _ANY_NAMED and parameter.name in names)
        if not (
            (by_place or kind in (inspect.Parameter.KEYWORD_ONLY, _ANY_NAMED))
            and (by_name or kind in (inspect.Parameter.POSITIONAL_ONLY, _ANY_PLACED))
        ):
            raise TypeError(f"{method.__qualname__} takes {parameter}, which is not known here")


_ANY_PLACED = inspect.Parameter.VAR_POSITIONAL
_ANY_NAMED = inspect.Parameter.VAR_KEYWORD
_ANY = (_ANY_PLACED, _ANY_NAMED)


def put(instance: object, name: str, replacement: Callable[..., Any]) -> Undo:
    """Make ``instance.name(...)`` call ``replacement(...)``; returns what undoes it.

    The replacement gets no ``self``, and must not keep the instance alive.

    Raises:
        TypeError: the method takes something that the replacement does not, so that a call of
            vLLM's could fail.

    """
    bound = getattr(instance, name)
    _check_takes_as_much(replacement, bound)
    replacement.__name__ = name
    replacement.__qualname__ = getattr(bound, "__qualname__", name)
    replacement.__doc__ = bound.__doc__
    replacement.__signature__ = inspect.signature(bound)  # type: ignore[attr-defined]
    # Never through its __dict__: Python makes an object slower for good once that is asked for.
    setattr(instance, name, replacement)
    this = reference(instance)

    def undo() -> None:
        target = this()
        if target is not None and getattr(target, name, None) is replacement:
            delattr(target, name)

    return undo
