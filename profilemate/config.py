# SPDX-License-Identifier: Apache-2.0
"""The environment variables that profilemate reads, as one value.

It reads only those in ``NAMES``. Kubernetes makes up others: a service called vllm-profiling puts
VLLM_PROFILING_PORT=tcp://… into every container.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from profilemate.format.errors import SessionError
from profilemate.format.keep import read_keep
from profilemate.format.urls import url_of
from profilemate.format.when import (
    DEFAULT_LAST_SEC,
    DEFAULT_LIMIT,
    Condition,
    Limit,
    NotUnderstoodError,
    read_last,
    read_limit,
    read_when,
)

SWITCH = "VLLM_PROFILING"
ENABLE_SWITCH = "VLLM_ENABLE_PROFILING"
"""Means the same as ``SWITCH``: either of them switches profiling off."""
DIRECTORY = "VLLM_PROFILING_DIR"
VERBOSE = "VLLM_PROFILING_VERBOSE"
SESSION = "VLLM_PROFILING_SESSION"
FAILED = "VLLM_PROFILING_FAILED"
GPU_TIMING = "VLLM_PROFILING_GPU_TIMING"
GPU_INTERVAL = "VLLM_PROFILING_GPU_INTERVAL"
PHASES = "VLLM_PROFILING_PHASES"
EXPERTS = "VLLM_PROFILING_EXPERTS"
EXPERT_PAIRS = "VLLM_PROFILING_EXPERT_PAIRS"
KEEP = "VLLM_PROFILING_KEEP"
METRICS = "VLLM_PROFILING_METRICS"
SNAPSHOT_WHEN = "VLLM_PROFILING_SNAPSHOT_WHEN"
SNAPSHOT_LIMIT = "VLLM_PROFILING_SNAPSHOT_LIMIT"
SNAPSHOT_LAST = "VLLM_PROFILING_SNAPSHOT_LAST"
DEPLOYMENT = "VLLM_PROFILING_DEPLOYMENT"
CONTENT_KEY = "VLLM_PROFILING_CONTENT_KEY"
UPLOAD = "VLLM_PROFILING_UPLOAD"
NAMES = (
    SWITCH,
    ENABLE_SWITCH,
    DIRECTORY,
    VERBOSE,
    SESSION,
    FAILED,
    GPU_TIMING,
    GPU_INTERVAL,
    PHASES,
    EXPERTS,
    EXPERT_PAIRS,
    KEEP,
    METRICS,
    SNAPSHOT_WHEN,
    SNAPSHOT_LIMIT,
    SNAPSHOT_LAST,
    DEPLOYMENT,
    CONTENT_KEY,
    UPLOAD,
)

Address = tuple[str, int]
"""A host and a port."""

DEFAULT_GPU_INTERVAL_SEC = 1.0
LONGEST_INTERVAL_SEC = 86_400.0
MOST_EXPERT_PAIRS = 512
"""Experts whose pairs can be counted: they take 2 MiB a layer. It is the default, too."""
LONGEST_SHOWN = 80
"""Characters of a value in a message."""

OF_DEPLOYMENT = "deployment"
"""In VLLM_PROFILING_CONTENT_KEY: the secret that profilemate keeps for the deployment."""

EVERYTHING = "all"
"""Stands for every hook in VLLM_PROFILING_FAILED."""

_ADDRESS = re.compile(
    r"(localhost|[0-9]{1,3}(?:\.[0-9]{1,3}){3}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})"
)
"""No other name: to look one up can take long."""

_DEPLOYMENT = re.compile(r"[A-Za-z0-9._:/@+-]{1,200}")

_ON_OFF = {
    **dict.fromkeys(("1", "true", "on", "yes"), True),
    **dict.fromkeys(("0", "false", "off", "no"), False),
}


@dataclass(frozen=True)
class Config:
    """What the environment asks for at the moment."""

    enabled: bool
    """Whether to profile: it is switched on, and no parent process has given up."""
    verbose: bool
    asked_directory: str
    """Where sessions should go; empty for the default."""
    session: str
    """The name of the session that this process joins; empty where it has none yet."""
    failed: tuple[str, ...]
    """Hooks that a parent process could not attach. This one neither tries nor reports them."""
    gpu_timing: bool
    """Whether to measure how long replays of CUDA graphs take on the GPU."""
    gpu_interval_sec: float
    """Seconds between two samples of GPU memory; 0: none are taken."""
    phases: bool
    """Whether to measure how long each step takes on the GPU."""
    experts: bool
    """Whether to count which experts a model's MoE layers use."""
    expert_pairs: int
    """Pairs of experts are counted where a layer has no more experts than this; 0: never."""
    keep: str
    """How much of a session is kept, as ``profilemate.format.keep`` reads it."""
    metrics: Address | None
    """Where the collector offers metrics; None: nowhere."""
    snapshot_when: tuple[Condition, ...]
    """When the collector takes a snapshot by itself: if any of these is met."""
    snapshot_limit: Limit
    """How many of them it takes."""
    snapshot_last_sec: float
    """How much before its end each of them covers, at least."""
    deployment: str
    """The id of the deployment; empty where the user gave none."""
    content_key: str
    """The path of a file with the secret that content ids of several sessions have in common, or
    ``OF_DEPLOYMENT``; empty: each session's are its own."""
    upload: str
    """The URL in object storage that sessions are sent to; empty: nowhere."""
    problems: tuple[str, ...]
    """One line for each value that was not understood."""

    @property
    def directory(self) -> Path:
        """The absolute path of the folder that holds the sessions.

        Looked up only here: Python finds the temporary folder once, and a program may set TMPDIR
        after it has imported vLLM.
        """
        if self.asked_directory:
            asked = os.path.expanduser(self.asked_directory)
            try:
                return Path(os.path.abspath(asked))
            except OSError:
                # The working folder is gone, as the user will hear when a session is opened.
                return Path(asked)
        import tempfile

        try:
            folder = tempfile.gettempdir()
        except FileNotFoundError:
            # Nothing is writable, as the user will hear when a session is opened there.
            folder = "/tmp"
        return Path(folder, "vllm_profiling")


def read(environ: Mapping[str, str]) -> Config:
    """Read the configuration; a value that is not understood counts as not set."""
    problems: list[str] = []

    def switch(name: str, default: bool) -> bool:
        value = environ.get(name, "").strip()
        choice = _ON_OFF.get(value.lower())
        if choice is None and value:
            problems.append(
                f"{name}={shortened(value, LONGEST_SHOWN)} is not understood "
                "(1, true, on, yes, or 0, false, off, no); "
                f"the default is used: {int(default)}"
            )
        return default if choice is None else choice

    def seconds(name: str, default: float) -> float:
        value = environ.get(name, "").strip()
        try:
            choice = float(value.encode("ascii")) if value else default
        except ValueError:
            choice = math.nan
        if 0 <= choice <= LONGEST_INTERVAL_SEC:
            return choice
        problems.append(
            f"{name}={shortened(value, LONGEST_SHOWN)} is not understood "
            f"(a number of seconds, 0 for off); the default is used: {default:g}"
        )
        return default

    def folder(name: str) -> str:
        value = environ.get(name, "")
        if os.path.expanduser(value).startswith("~"):
            problems.append(
                f"{name}={shortened(value, LONGEST_SHOWN)} is not understood "
                "(there is no such user's home folder); the default is used"
            )
            return ""
        return value if value.strip() else ""

    def keep(name: str) -> str:
        value = environ.get(name, "")
        if read_keep(value) is not None:
            return value
        problems.append(
            f"{name}={shortened(value, LONGEST_SHOWN)} is not understood (a size as 5GB, a time as "
            "6h, both as 5GB,6h, or all); the default is used: 2GB, at most a tenth of what is free"
        )
        return ""

    def address(name: str) -> Address | None:
        value = environ.get(name, "").strip()
        found = _address(value)
        if value and found is None:
            problems.append(
                f"{name}={shortened(value, LONGEST_SHOWN)} is not understood "
                "(an IP address and a port, such as 127.0.0.1:9400); no metrics are offered"
            )
        return found

    failed = tuple(filter(None, environ.get(FAILED, "").split(",")))
    switched_on = [switch(SWITCH, True), switch(ENABLE_SWITCH, True)]
    return Config(
        enabled=all(switched_on) and EVERYTHING not in failed,
        verbose=switch(VERBOSE, False),
        asked_directory=folder(DIRECTORY),
        session=environ.get(SESSION, ""),
        failed=failed,
        gpu_timing=switch(GPU_TIMING, False),
        gpu_interval_sec=seconds(GPU_INTERVAL, DEFAULT_GPU_INTERVAL_SEC),
        phases=switch(PHASES, False),
        experts=switch(EXPERTS, False),
        expert_pairs=_expert_pairs(environ, problems),
        keep=keep(KEEP),
        metrics=address(METRICS),
        snapshot_when=_snapshot_when(environ, problems),
        snapshot_limit=_snapshot_limit(environ, problems),
        snapshot_last_sec=_snapshot_last(environ, problems),
        deployment=_deployment(environ, problems),
        content_key=_content_key(environ, problems),
        upload=_upload(environ, problems),
        problems=tuple(problems),
    )


def _expert_pairs(environ: Mapping[str, str], problems: list[str]) -> int:
    value = environ.get(EXPERT_PAIRS, "").strip()
    if not value:
        return MOST_EXPERT_PAIRS
    if re.fullmatch("[0-9]{1,9}", value) and int(value) <= MOST_EXPERT_PAIRS:
        return int(value)
    problems.append(
        f"{EXPERT_PAIRS}={shortened(value, LONGEST_SHOWN)} is not understood (a number of experts, "
        f"{MOST_EXPERT_PAIRS} at most, 0 for off); the default is used: {MOST_EXPERT_PAIRS}"
    )
    return MOST_EXPERT_PAIRS


def _snapshot_when(environ: Mapping[str, str], problems: list[str]) -> tuple[Condition, ...]:
    value = environ.get(SNAPSHOT_WHEN, "").strip()
    try:
        return read_when(value)
    except NotUnderstoodError as error:
        problems.append(
            f"{SNAPSHOT_WHEN}={shortened(value, LONGEST_SHOWN)} is not understood ({error}; "
            "'or' joins conditions); no snapshot is taken by itself"
        )
        return ()


def _snapshot_limit(environ: Mapping[str, str], problems: list[str]) -> Limit:
    value = environ.get(SNAPSHOT_LIMIT, "").strip()
    found = read_limit(value)
    if found is None:
        problems.append(
            f"{SNAPSHOT_LIMIT}={shortened(value, LONGEST_SHOWN)} is not understood (a number of "
            "snapshots and the least time between two, as 5,10m, or one of them); the default is "
            "used: 5,10m"
        )
    return found or DEFAULT_LIMIT


def _snapshot_last(environ: Mapping[str, str], problems: list[str]) -> float:
    value = environ.get(SNAPSHOT_LAST, "").strip()
    found = read_last(value)
    if found is None:
        problems.append(
            f"{SNAPSHOT_LAST}={shortened(value, LONGEST_SHOWN)} is not understood (a time as 30s, "
            "10m or 1h); the default is used: 10m"
        )
    return found or DEFAULT_LAST_SEC


def _deployment(environ: Mapping[str, str], problems: list[str]) -> str:
    value = environ.get(DEPLOYMENT, "").strip()
    if not value or _DEPLOYMENT.fullmatch(value):
        return value
    problems.append(
        f"{DEPLOYMENT}={shortened(value, LONGEST_SHOWN)} is not understood (a name of at most 200 "
        "letters, digits and ._:/@+-); the deployment has the id that vLLM's settings give it"
    )
    return ""


def _content_key(environ: Mapping[str, str], problems: list[str]) -> str:
    value = environ.get(CONTENT_KEY, "").strip()
    if not value or value == OF_DEPLOYMENT or os.path.isabs(os.path.expanduser(value)):
        return value
    # Not the value: whoever puts the secret itself there must not find it in a log.
    problems.append(
        f"{CONTENT_KEY} is not understood (the absolute path of a file with a secret, or "
        "'deployment'); each session's content ids are its own"
    )
    return ""


def _upload(environ: Mapping[str, str], problems: list[str]) -> str:
    value = environ.get(UPLOAD, "").strip()
    if not value:
        return ""
    try:
        return url_of(value)
    except SessionError:
        # Not the value: a password may be in it.
        problems.append(
            f"{UPLOAD} is not understood (s3://BUCKET/PATH, gs:// or az://, without a user, a "
            "password or a query); nothing is uploaded"
        )
    return ""


def _address(value: str) -> Address | None:
    match = _ADDRESS.fullmatch(value)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        return None
    return match[1].strip("[]"), int(match[2])


def shortened(text: str, most: int) -> str:
    """The text, or its beginning and three dots."""
    return text if len(text) <= most else f"{text[:most]}..."


def shown_address(address: Address) -> str:
    """The address as ``VLLM_PROFILING_METRICS`` has it."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def leave_for_children(environ: MutableMapping[str, str], failed: str) -> None:
    """Keep child processes from a hook, or ``EVERYTHING``, that could not be attached."""
    known = read(environ).failed
    if failed not in known:
        environ[FAILED] = ",".join((*known, failed))


def absolute_pythonpath(value: str, root: str, start_folder: str) -> str:
    """PYTHONPATH with absolute paths for the relative entries that mean ``root``.

    A child that starts in another folder would look there. Relative entries, the empty one
    included, count from the folder in which this process started.
    """
    entries = value.split(os.pathsep)
    for index, entry in enumerate(entries):
        if not os.path.isabs(entry):
            try:
                if os.path.samefile(os.path.join(start_folder, entry), root):
                    entries[index] = root
            except OSError:
                continue
    return os.pathsep.join(entries)
