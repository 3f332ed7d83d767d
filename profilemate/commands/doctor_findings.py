# SPDX-License-Identifier: Apache-2.0
"""Look for what recording needs, one finding for each thing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from profilemate import ROOT, config, door
from profilemate.format.errors import SessionError
from profilemate.format.events import PARTS
from profilemate.format.files import write_atomically
from profilemate.hooks.targets import EVERYTHING, NEWEST, OLDEST, release
from profilemate.record.claim import make_base

State = Literal["good", "degraded", "bad"]

PROBE_SEC = 300
"""How long importing vLLM may take."""

NEEDED = ("wrapt", "orjson")


@dataclass(frozen=True)
class Finding:
    """What ``about`` is like, and what to do where its state is not good."""

    about: str
    state: State
    found: str
    advice: str = ""


def examine() -> Iterator[Finding]:
    """Every finding, from Python to each class of vLLM that profilemate hooks."""
    yield Finding("Python", "good", f"{sys.version.split()[0]}, {sys.executable}")
    for name in NEEDED:
        yield _package(name)
    yield _switch()
    yield _python_path()
    yield _folder()
    yield from _vllm()


def _package(name: str) -> Finding:
    try:
        return Finding(name, "good", version(name))
    except PackageNotFoundError:
        return Finding(name, "bad", "not installed", f"{sys.executable} -m pip install {name}")


def _switch() -> Finding:
    settings = config.read(os.environ)
    problems = "; ".join(settings.problems)
    if not settings.enabled:
        return Finding(
            "Switch", "bad", "profiling is off", f"unset {config.SWITCH}, or set it to 1"
        )
    if problems:
        return Finding("Switch", "degraded", problems, "docs/configuration.md lists every setting")
    return Finding("Switch", "good", "on")


def _python_path() -> Finding:
    """Whether a Python that starts with these variables finds profilemate."""
    about = "PYTHONPATH"
    program = (
        "import sys, json; "
        "finders = [type(f).__module__ for f in sys.meta_path]; "
        "site = sys.modules.get('sitecustomize'); "
        "print(json.dumps(['profilemate.bootstrap' in finders, getattr(site, '__file__', None)]))"
    )
    try:
        ended = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        is_there, other = json.loads(ended.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return Finding(about, "bad", f"cannot start a Python process: {error}")
    if not is_there:
        found = "a new Python process does not find profilemate"
        if other:
            found += f"; it runs {other} instead"
        return Finding(
            about,
            "bad",
            found,
            f"export PYTHONPATH={door.folder()}:$PYTHONPATH (python -I and -E ignore it)",
        )
    if other and not other.startswith(door.folder()):
        return Finding(about, "good", f"works; {other} runs after it")
    return Finding(about, "good", "works")


def _folder() -> Finding:
    directory = config.read(os.environ).directory
    about = "Sessions go to"
    try:
        make_base(directory)
        probe = directory / f".doctor.{os.getpid()}"
        write_atomically(probe, b"")
        probe.unlink()
    except (OSError, SessionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return Finding(
            about, "bad", f"{directory}: {reason}", f"set {config.DIRECTORY} to a folder of yours"
        )
    return Finding(about, "good", str(directory))


def _vllm() -> Iterator[Finding]:
    try:
        probed = _probe()
    except ProbeError as error:
        yield Finding("vLLM", "bad", str(error), "run this with the Python that runs vLLM")
        return
    yield _release(probed["version"])
    yield Finding("Device", "good", str(probed["device"] or "unknown"))
    owners: dict[str, list[dict[str, Any]]] = {}
    for target in probed["targets"]:
        owners.setdefault(target["owner"], []).append(target)
    for owner, targets in owners.items():
        finding = _owner(owner, targets, str(probed["device"]))
        if finding is not None:
            yield finding


class ProbeError(Exception):
    """vLLM cannot be imported. The text says why."""


def _probe() -> dict[str, Any]:
    environment = {**os.environ, config.SWITCH: "0"}
    command = [sys.executable, "-c", _PROBE, ROOT]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SEC, env=environment, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ProbeError(f"cannot be imported: {error}") from None
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["it wrote nothing"])[-1]
        raise ProbeError(f"cannot be imported: {last}")
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


_PROBE = (
    "import sys, runpy; sys.path.append(sys.argv[1]); "
    "runpy.run_module('profilemate.hooks.probe', run_name='__main__')"
)


def _release(found: str) -> Finding:
    if release(found) > release(NEWEST):
        return Finding(
            "vLLM",
            "degraded",
            f"{found}, newer than {NEWEST}, the newest release that was tested",
            "the lines below say what works; look for a newer profilemate",
        )
    if release(found) < release(OLDEST):
        return Finding(
            "vLLM", "degraded", f"{found}, older than {OLDEST}, the oldest release that was tested"
        )
    return Finding("vLLM", "good", found)


def _owner(owner: str, targets: list[dict[str, Any]], device: str) -> Finding | None:
    """The finding for one class; None where the release has no such class."""
    missing = [target for target in targets if target["state"] == "missing"]
    if all(target["state"] == "not expected" for target in targets):
        return None
    real = next((target["class"] for target in targets if target["class"]), None)
    found = len([target for target in targets if target["state"] == "found"])
    text = f"{found} of {found + len(missing)} methods" + (f", of {real}" if real else "")
    if not missing:
        return Finding(owner, "good", text)
    reasons = {target["reason"] for target in missing}
    (reason,) = reasons if len(reasons) == 1 else (None,)
    if reason and device != "cuda" and ".worker." in owner:
        return Finding(owner, "good", f"this device does not use it ({reason})")
    lost = "; ".join(f"{target['method']}: {_cost(target)}" for target in missing)
    is_lost = any(target["part"] == EVERYTHING for target in missing)
    state: State = "bad" if is_lost else "degraded"
    return Finding(owner, state, f"{text}; without {lost}" + (f" ({reason})" if reason else ""))


def _cost(target: dict[str, Any]) -> str:
    """What is lost without a target: a detail, or tables."""
    gives, part = str(target["gives"]), str(target["part"])
    return f"{gives} (lost: {PARTS.get(part, part)})" if part else gives
