# SPDX-License-Identifier: Apache-2.0
"""The hooks: which vLLM module each waits for, and whether it is attached.

A hook is attached when its module has loaded, under that module's import lock. Threads that import
in different orders must not wait for each other. So a hook's own module imports nothing of vLLM's
at its top level: ``attach`` gets the module that the hook waited for.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple, Protocol

from profilemate import config, door
from profilemate.messages import cause, give_up, say, say_if_verbose


class Finder(Protocol):
    """What ``profilemate.bootstrap`` has for the hooks."""

    start_folder: str
    """The folder in which this process started; empty where unknown."""

    def wait_for(self, name: str, run: Callable[[ModuleType], None]) -> None:
        """Call ``run(module)`` once, when the module's code has run without an error."""


@dataclass(frozen=True)
class Hook:
    """A function of ours that is called with one module of vLLM's."""

    name: str
    module: str
    """The vLLM module it waits for."""
    attach: str
    """``package.module:function``, imported when vLLM's module has loaded.

    The function takes that module. Where it raises, this hook is off, so it must first undo what it
    has changed.
    """
    always: bool = False
    """Whether it is attached even with profiling switched off."""
    requires: tuple[str, ...] = ("wrapt", "orjson")
    """Packages that it needs."""
    optional: bool = False
    """Whether only some releases have its module, and the others miss nothing."""


HOOKS: tuple[Hook, ...] = (
    Hook(
        "environment",
        "vllm.envs",
        "profilemate.hooks.environment:attach",
        always=True,
        requires=(),
    ),
    Hook(
        "environment-platform",
        "vllm.platforms.interface",
        "profilemate.hooks.environment:attach",
        always=True,
        requires=(),
    ),
    Hook("scheduler", "vllm.v1.core.sched.scheduler", "profilemate.hooks.kv.scheduler:attach"),
    Hook("engine", "vllm.v1.engine.core", "profilemate.hooks.kv.engine:attach"),
    Hook("worker", "vllm.v1.worker.worker_base", "profilemate.hooks.gpu.worker:attach"),
    Hook(
        "worker-outside-v1",
        "vllm.worker.worker_base",
        "profilemate.hooks.gpu.worker:attach",
        optional=True,
    ),
)


class Status(NamedTuple):
    """A hook and whether it is attached; ``reason`` says why not."""

    name: str
    attached: bool
    reason: str


_statuses: dict[str, Status] = {}


def status() -> list[Status]:
    """The hooks of this process, in the order of ``HOOKS``, without those for other releases."""
    unseen = "vLLM has not been imported"
    return [
        _statuses.get(hook.name, Status(hook.name, False, unseen))
        for hook in HOOKS
        if hook.name in _statuses or not hook.optional
    ]


def activate(finder: Finder, vllm: ModuleType) -> None:
    """vLLM's package is about to load: register the hooks that apply. Never raises."""
    for hook in HOOKS:
        if hook.always:
            _wait(hook, finder)
    hooks = [hook for hook in HOOKS if not hook.always]
    try:
        _repair_pythonpath(finder.start_folder)
        wanted = _choose(hooks, list(vars(vllm).get("__path__", ())))
    except Exception as error:
        give_up(f"it cannot start ({cause(error)})")
        _set_all(hooks, f"could not start: {cause(error)}")
        return
    for hook in wanted:
        _wait(hook, finder)


def _repair_pythonpath(start_folder: str) -> None:
    value = os.environ.get("PYTHONPATH")
    if value and start_folder:
        ours = door.folder()
        repaired = _reached_first(config.absolute_pythonpath(value, ours, start_folder), ours)
        if repaired != value:
            os.environ["PYTHONPATH"] = repaired


def _reached_first(pythonpath: str, ours: str) -> str:
    """PYTHONPATH with our folder first, where another's sitecustomize would hide ours.

    OpenTelemetry puts its own before all others, for the children, and runs no other. Ours does.
    """
    entries = pythonpath.split(os.pathsep)
    before = entries[: entries.index(ours)] if ours in entries else []
    if PathFinder.find_spec("sitecustomize", before) is None:
        return pythonpath
    return os.pathsep.join([ours, *(entry for entry in entries if entry != ours)])


def _choose(hooks: Sequence[Hook], vllm_folders: Sequence[str]) -> list[Hook]:
    """The hooks that can be attached; reports those that cannot."""
    settings = config.read(os.environ)
    if not settings.enabled:
        _set_all(hooks, _why_off(settings))
        return []
    if not (settings.session or settings.failed):
        # Otherwise a parent process has said so.
        for problem in settings.problems:
            say(problem)
    required = sorted({name for hook in hooks for name in hook.requires})
    missing = [name for name in required if not _installed(name)]
    unfit = [name for name in required if name not in missing and not _loads(name)]
    if unfit:
        reason = f"{' and '.join(unfit)} cannot be loaded by {sys.executable}"
        give_up(
            f"{reason}, as if made for another Python: {sys.executable} -m pip install "
            f"{' '.join(unfit)}, or with that Python 'profilemate inject'"
        )
        _set_all(hooks, reason)
        return []
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        reason = f"{' and '.join(missing)} {verb} not installed"
        give_up(
            f"{reason} for {sys.executable}: {sys.executable} -m pip install {' '.join(missing)}"
        )
        _set_all(hooks, reason)
        return []
    left_out = [hook for hook in hooks if hook.name in settings.failed]
    _set_all(left_out, "could not be attached in the parent process")
    hooks = [hook for hook in hooks if hook not in left_out]
    unknown = [hook for hook in hooks if not _exists(hook.module, vllm_folders)]
    missed = [hook for hook in unknown if not hook.optional]
    _set_all(missed, "this vLLM has no such module")
    if missed:
        for hook in missed:
            config.leave_for_children(os.environ, hook.name)
        say(
            f"this vLLM has no {' and no '.join(hook.module for hook in missed)}: "
            f"{_subject(missed)} off, vLLM runs without it. A newer profilemate may know it"
        )
    wanted = [hook for hook in hooks if hook not in unknown]
    if wanted:
        from profilemate.record.claim import ensure_name

        ensure_name(os.environ)
    return wanted


def _wait(hook: Hook, finder: Finder) -> None:
    _set(hook, f"{hook.module} has not been imported")
    finder.wait_for(hook.module, lambda module: _attach(hook, module))


def _attach(hook: Hook, module: ModuleType) -> None:
    if not hook.always:
        settings = config.read(os.environ)
        # Variables may have come since, as Ray's do, or another hook may have given up.
        if not settings.enabled:
            _set(hook, _why_off(settings))
            return
    try:
        path, _, function = hook.attach.partition(":")
        getattr(import_module(path), function)(module)
    except Exception as error:
        _failed(hook, error)
    else:
        _statuses[hook.name] = Status(hook.name, True, "")
        say_if_verbose(f"hook {hook.name} attached to {hook.module} (process {os.getpid()})")


def _failed(hook: Hook, error: Exception) -> None:
    reason = cause(error)
    _set(hook, reason)
    config.leave_for_children(os.environ, hook.name)
    version = getattr(sys.modules.get("vllm"), "__version__", "of unknown version")
    say(
        f"{_subject([hook])} off, it does not fit vLLM {version} ({reason}); vLLM runs without it. "
        f"A newer profilemate may fit"
    )
    for line in "".join(traceback.format_exception(error)).splitlines():
        say_if_verbose(line)


def _why_off(settings: config.Config) -> str:
    if config.EVERYTHING in settings.failed:
        return "profiling could not start in this process or its parent"
    return "profiling is switched off"


def _set(hook: Hook, reason: str) -> None:
    _statuses[hook.name] = Status(hook.name, False, reason)


def _set_all(hooks: Iterable[Hook], reason: str) -> None:
    for hook in hooks:
        _set(hook, reason)


def _subject(hooks: Sequence[Hook]) -> str:
    """The hooks as the beginning of a sentence."""
    names = " and ".join(hook.name for hook in hooks)
    return f"hook {names} is" if len(hooks) == 1 else f"hooks {names} are"


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _loads(name: str) -> bool:
    """Whether the package fits this Python. Only orjson is of no use without its compiled part."""
    if name != "orjson":
        return True
    try:
        import_module(name)
    except ImportError:
        return False
    return True


def _exists(module: str, vllm_folders: Sequence[str]) -> bool:
    """Whether vLLM has the module, without importing the packages above it.

    True where vLLM's folders are not known.
    """
    _, *packages, _ = module.split(".")
    folders = [os.path.join(folder, *packages) for folder in vllm_folders]
    return not folders or PathFinder.find_spec(module, folders) is not None
