# SPDX-License-Identifier: Apache-2.0
"""Stand around a method of vLLM's for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: type, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Until the block ends ``around(original, instance, *args)`` stands in the method's place."""
    original = vars(owner)[name]

    @functools.wraps(original)
    def watched(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return around(original, instance, *args, **kwargs)

    setattr(owner, name, watched)
    try:
        yield
    finally:
        setattr(owner, name, original)
