# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for packages that are not installed.

Many of vLLM's classes import a package for kernels or images when they are built. What they keep in
the cache does not depend on it. A stand-in has every name that is asked for, and does nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

Result = TypeVar("Result")

MOST = 20
"""Packages that one model may lack."""

_NEVER = ("vllm", "torch", "transformers", "numpy")
"""Without these there is no class to ask."""


def tolerated(attempt: Callable[[], Result]) -> Result:
    """The result of an attempt, which is made again with a stand-in for each package it lacks.

    Raises:
        ModuleNotFoundError: a package is missing that has no stand-in.

    """
    finder = next((one for one in sys.meta_path if isinstance(one, _Finder)), None)
    try:
        return attempt()
    except ModuleNotFoundError as error:
        root = (error.name or "").partition(".")[0]
        if finder is None:
            finder = _Finder()
            sys.meta_path.append(finder)
        if not root or root in _NEVER or root in finder.roots or len(finder.roots) == MOST:
            raise
        finder.roots.add(root)
    return tolerated(attempt)


class _Finder(MetaPathFinder):
    def __init__(self) -> None:
        self.roots: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.roots:
            return None
        return ModuleSpec(fullname, _Loader(), is_package=True)


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return stand_in(name)


class _Kind(type):
    """What a stand-in's names are: they can be called, subclassed, indexed and asked for more."""

    def __getattr__(cls, name: str) -> Any:
        return stand_in(name)

    def __call__(cls, *arguments: Any, **named: Any) -> Any:
        # As a decorator it hands on what it decorates.
        if len(arguments) == 1 and not named and callable(arguments[0]):
            return arguments[0]
        return stand_in("result")

    def __getitem__(cls, key: Any) -> Any:
        return stand_in("item")

    def __or__(cls, other: Any) -> Any:
        return stand_in("either")

    __ror__ = __or__


def stand_in(name: str) -> Any:
    """Something of this name that can be called, subclassed, indexed and asked for more."""
    if name.startswith("__"):
        raise AttributeError(name)
    return _Kind(name, (), {})
