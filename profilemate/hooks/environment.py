# SPDX-License-Identifier: Apache-2.0
"""Keep vLLM from reporting our variables as unknown, or refusing to start over them.

vLLM checks its environment against ``vllm.envs.environment_variables``: in
``vllm.envs.validate_environ`` from 0.17.1, in ``Platform.validate_environ`` from 0.31. All that is
registered there also enters the key of the torch.compile cache, so only the check gets to see our
names. Names that just look like ours stay vLLM's business.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from profilemate.config import NAMES

_lock = threading.Lock()
_checks_running = 0


class WithOurNames(MutableMapping[str, Any]):
    """vLLM's table of variables, which also says that it has ours.

    It has no entry for them. Another thread that walks, reads or extends the table while a
    check runs works on the table itself.
    """

    def __init__(self, table: MutableMapping[str, Any]) -> None:
        self.table = table

    def __contains__(self, name: object) -> bool:
        return name in NAMES or name in self.table

    def __getitem__(self, name: str) -> Any:
        return self.table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.table[name] = value

    def __delitem__(self, name: str) -> None:
        del self.table[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


def attach(module: ModuleType) -> None:
    """Wrap the check in ``vllm.envs`` or ``vllm.platforms.interface``, whichever has it."""
    owner = vars(module).get("Platform", module)
    check = vars(owner).get("validate_environ")
    if check is None:
        return
    is_method = isinstance(check, classmethod)
    function = check.__func__ if is_method else check

    @functools.wraps(function)
    def validate_environ(*args: Any, **kwargs: Any) -> Any:
        with _names_known():
            return function(*args, **kwargs)

    owner.validate_environ = classmethod(validate_environ) if is_method else validate_environ


@contextmanager
def _names_known() -> Iterator[None]:
    global _checks_running
    from vllm import envs

    with _lock:
        if not isinstance(envs.environment_variables, WithOurNames):
            envs.environment_variables = WithOurNames(envs.environment_variables)
        _checks_running += 1
    try:
        yield
    finally:
        with _lock:
            _checks_running -= 1
            if _checks_running <= 0:
                _forget_names(envs)


def _forget_names(envs: Any) -> None:
    global _checks_running
    _checks_running = 0
    table = getattr(envs, "environment_variables", None)
    if isinstance(table, WithOurNames):
        envs.environment_variables = table.table


def _start_afresh() -> None:
    """In a fork, where no other thread runs a check or holds the lock any more."""
    global _lock
    _lock = threading.Lock()
    _forget_names(sys.modules.get("vllm.envs"))


os.register_at_fork(after_in_child=_start_afresh)
