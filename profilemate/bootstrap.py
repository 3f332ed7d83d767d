# SPDX-License-Identifier: Apache-2.0
"""Is this a vLLM process? Wait for it at no cost, and run our hooks when its modules load.

This runs in every Python process that has the repository on PYTHONPATH, so it is short (Python
may have to compile it each time), imports nothing that the interpreter has not loaded by itself,
and puts one finder on ``sys.meta_path``, which costs other imports a dictionary lookup.

The post-import mechanism is our own and not wrapt's: importing wrapt would cost every process
milliseconds, it may be missing, and a finder may not import anything anyway. Python calls
finders under its global import lock, and an import made there deadlocks with a thread that
imports something else. So the finder only puts a stand-in before the loader. Everything of ours
runs from that, around the module's own code, under the lock of this one module. It also means
that looking vLLM up (``importlib.util.find_spec``, as other libraries do) activates nothing.
"""

import os
import sys
from _frozen_importlib_external import PathFinder

from profilemate import ROOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

PACKAGE = "vllm"


class Finder:
    """Finds the modules that a hook waits for, by asking the other finders.

    ``waiting`` has what to call, once, with a module that has loaded. For vLLM's package that
    happens before its code runs, since this code loads modules that hooks wait for. Another thread
    can import such modules meanwhile (Python does not make it wait for the package). So until
    ``active`` any of vLLM's modules may be one, and ``done`` has those that have loaded.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[ModuleType], None]] = {PACKAGE: self._activate}
        self.done: set[str] = set()
        self.active = False
        try:
            self.start_folder = os.getcwd()
        except OSError:
            self.start_folder = ""

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "ModuleSpec | None":
        if name not in self.waiting and (self.active or not name.startswith(PACKAGE + ".")):
            # Our own package stays importable after the path has changed.
            if name != __package__:
                return None
            return PathFinder.find_spec(name) or PathFinder.find_spec(name, [ROOT])
        # The finders before this one have been asked.
        is_later = False
        for finder in list(sys.meta_path):
            if is_later and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    if hasattr(spec.loader, "exec_module"):
                        spec.loader = StandIn(self, spec)  # type: ignore[assignment]
                    return spec
            is_later = is_later or finder is self
        return None

    def wait_for(self, name: str, run: "Callable[[ModuleType], None]") -> None:
        """Call ``run(module)`` once, when the module's code has run without an error."""
        self.waiting[name] = run
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        # In this order: a thread that loads it right now is either done or finds the line above.
        if module is not None and (name in self.done or not getattr(spec, "_initializing", False)):
            self.loaded(name, module)

    def loaded(self, name: str, module: "ModuleType") -> None:
        # pop() hands a callback to one caller only, whatever other threads do.
        run = self.waiting.pop(name, None)
        if run is not None:
            run(module)

    def _activate(self, vllm: "ModuleType") -> None:
        try:
            from profilemate import hooks

            hooks.activate(self, vllm)
        except Exception as error:
            # The copy on the path is not whole, and may lack its messages, too.
            try:  # noqa: SIM105 (nothing is imported here)
                sys.stderr.write(f"profilemate: off, it cannot start: {error!r}\n")
            except Exception:
                pass
        self.active = True


class StandIn:
    """Takes a loader's place until the module's code is about to run.

    By then spec and module have their own loader back, so the module, importlib.resources and
    inspect never meet this one. A loader cannot be changed instead: it may be shared between
    modules (zip files), be a class, or refuse attributes.
    """

    def __init__(self, finder: Finder, spec: "Any") -> None:
        self._finder, self._spec, self._loader = finder, spec, spec.loader

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def exec_module(self, module: "Any") -> None:
        name = self._spec.name
        if self._spec.loader is self:
            self._spec.loader = self._loader
        if getattr(module, "__loader__", None) is self:
            module.__loader__ = self._loader
        if name == PACKAGE:
            self._finder.loaded(name, module)
        self._loader.exec_module(module)
        self._finder.done.add(name)
        self._finder.loaded(name, sys.modules.get(name, module))


def install() -> None:
    """Wait for vLLM in this process, or begin at once. Calling it again changes nothing."""
    # By name: after an unload this module may be a second copy of itself.
    if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        finder = Finder()
        sys.meta_path.insert(0, finder)
        if PACKAGE in sys.modules:
            finder.loaded(PACKAGE, sys.modules[PACKAGE])
