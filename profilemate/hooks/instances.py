# SPDX-License-Identifier: Apache-2.0
"""Put functions of ours around one object's method.

The instance is changed, not its class. That covers whatever class really runs, a subclass or a
replacement included; nothing is hooked twice; and one ``delattr`` takes the hook away.

Other tools do the same, before and after us, with the class and with the object. So a call that
works without a hook works with it, and one that fails does so with the same error (``calls``). A
hook that another tool has wrapped cannot be taken away: it goes quiet instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from profilemate.hooks import calls

Undo = Callable[[], None]


def reference(instance: object) -> Callable[[], Any]:
    """A weak reference to the instance, which hooks must not keep alive."""
    return weakref.ref(instance)


def has_method(instance: object, name: str) -> bool:
    """Whether the object can be called by this name."""
    return callable(getattr(instance, name, None))


def require_method(instance: object, name: str) -> None:
    """Make sure of a method that the caller cannot do without.

    Raises:
        AttributeError: the object cannot be called by this name.

    """
    if not has_method(instance, name):
        raise AttributeError(f"{type(instance).__qualname__} has no method {name}")


def is_hook(method: object) -> bool:
    """Whether this method, as its object gives it, is a hook."""
    return getattr(getattr(method, "__func__", None), "__module__", None) == __name__


def hook(
    instance: Any,
    name: str,
    *arguments: str,
    before: Callable[..., Any] | None = None,
    after: Callable[..., Any] | None = None,
    lastly: Callable[..., Any] | None = None,
    failed: Callable[..., Any] | None = None,
    given: calls.Given | None = None,
    exchanges: bool = False,
) -> Undo:
    """Call these functions around each call of the object's method; returns what undoes it.

    None of them may raise, nor keep the object alive.

    Args:
        instance: the object.
        name: the method's name.
        arguments: which of its arguments the functions get, in the order in which the method takes
            them. They get None for one that a call lacks.
        before: gets these. What it returns is *begun*.
        after: gets the result, begun if there is a ``before``, and the arguments. It is not called
            where the method raises.
        lastly: gets begun if there is a ``before``, and the arguments. It is called before
            ``after``, and even if the method raises.
        failed: gets begun if there is a ``before``, and the arguments. It is called where the
            method raises, before ``lastly``.
        given: how vLLM gives the arguments that have no default, where that is the same in all of
            its calls. Then the hook takes the method's own parameters, if they allow it: ``*args``
            and ``**kwargs`` cost a tenth of a microsecond, and many names a whole one.
        exchanges: ``before`` returns begun, and what the method gets as its first argument.

    Raises:
        AttributeError: the object cannot be called by this name.
        TypeError: the object cannot have a hook.

    """
    require_method(instance, name)
    method = calls.beneath(instance, name)
    form = calls.form_of(instance, name, method, arguments, given)
    around = {"_before": before, "_after": after, "_lastly": lastly, "_failed": failed}
    around = {each: function for each, function in around.items() if function is not None}
    names = {"__name__": __name__, **form.names, **around}
    source = f"def {name}({form.parameters}):\n{_body(form, around, exchanges)}"
    exec(compile(source, f"<{__name__}: {name}>", "exec"), names)
    function = names[name]
    function.__qualname__ = getattr(method.current, "__qualname__", name)
    function.__doc__ = getattr(method.current, "__doc__", None)
    if method.function is not None:
        function.__wrapped__ = method.function
    # Bound as the method is, so that Python's errors count the same arguments, and a tool finds the
    # object; but weakly, as the object holds it.
    bound = MethodType(function, weakref.proxy(instance))
    # Never through its __dict__: Python makes an object slower for good once that is asked for.
    setattr(instance, name, bound)
    if method.is_own:
        names["_previous"] = method.current
    return _undo(instance, name, bound, exchanges)


def _body(form: calls.Form, around: dict[str, Any], exchanges: bool) -> str:
    given = ["_begun", *form.arguments] if "_before" in around else form.arguments
    lines = form.looks.copy()
    if exchanges:
        lines.append(form.exchange)
    elif "_before" in around:
        lines.append(f"_begun = _before({', '.join(form.arguments)})")
    handlers: list[str] = []
    if "_failed" in around:
        handlers += ["except BaseException:", f"    _failed({', '.join(given)})", "    raise"]
    if "_lastly" in around:
        handlers += ["finally:", f"    _lastly({', '.join(given)})"]
    called = f"_result = {form.called}"
    lines += ["try:", f"    {called}", *handlers] if handlers else [called]
    if "_after" in around:
        lines.append(f"_after({', '.join(['_result', *given])})")
    return "\n".join(f"    {line}" for line in (*lines, "return _result"))


def _undo(instance: Any, name: str, bound: MethodType, exchanges: bool) -> Undo:
    # Weakly, as what undoes it outlives the object.
    this, ours = reference(instance), weakref.ref(bound)

    def undo() -> None:
        method, target = ours(), this()
        if method is None:
            return
        names = method.__func__.__globals__
        quiet = dict.fromkeys(("_before", "_after", "_lastly", "_failed"), _nothing)
        names.update(quiet, **({"_before": _same} if exchanges else {}))
        if target is not None and getattr(target, name, None) is method:
            if "_previous" in names:
                setattr(target, name, names["_previous"])
            else:
                delattr(target, name)

    return undo


def _nothing(*_: Any) -> None: ...


def _same(first: Any, *_: Any) -> tuple[None, Any]:
    return None, first
