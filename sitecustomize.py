# SPDX-License-Identifier: Apache-2.0
"""Python runs this file by itself at start-up when the repository is on PYTHONPATH.

It hands over to profilemate, which does nothing until vLLM is imported, and then runs the
sitecustomize that would have run without this one. Python knows both by the same name, so the
user's takes this one's place in ``sys.modules``, and what it raises reaches Python unchanged.
"""

import os
import sys
from _frozen_importlib import module_from_spec
from _frozen_importlib_external import PathFinder

_HERE = os.path.dirname(__file__)


def _is_here(entry: str) -> bool:
    try:
        return entry == _HERE or os.path.samefile(entry, _HERE)
    except (OSError, ValueError, TypeError):
        return False


_ours = [entry for entry in sys.path if _is_here(entry)]
_others = [entry for entry in sys.path if entry not in _ours]
# A sitecustomize that comes before this one has had its turn: it got itself out of the way and
# handed over, or Python would not be here.
_first = sys.path.index(_ours[0]) if _ours else len(sys.path)
# Other copies of profilemate, too, have handed over: they come behind this one now.
_ran = [entry for each in sys.meta_path for entry in getattr(each, "profilemate_ran_from", ())]
_left = [entry for entry in _others[_first:] if entry not in _ran]
_has_run = not set(_ours).isdisjoint(_ran)
_next = None if _has_run else PathFinder.find_spec("sitecustomize", _left)

# Last on the path, the repository's other packages shadow none of the user's.
sys.path[:] = _others + _ours
try:
    from profilemate.bootstrap import install

    install()
    for _finder in sys.meta_path:
        if type(_finder).__module__ == "profilemate.bootstrap":
            vars(_finder)["profilemate_ran_from"] = [*_ran, *_ours]
    # A package of the user's may have our name, and comes first. Ours is found where there is none.
    for _name in ("profilemate.bootstrap", "profilemate"):
        sys.modules.pop(_name, None)
except Exception as _error:
    # Any Python program may be starting here, and one that has no use for vLLM should not hear.
    if os.environ.get("VLLM_PROFILING_VERBOSE") == "1" and sys.stderr:
        sys.stderr.write(f"profilemate: off, it cannot start: {_error!r}\n")

if _next is not None and _next.loader is not None:
    sys.modules["sitecustomize"] = _module = module_from_spec(_next)
    _next.loader.exec_module(_module)
