# SPDX-License-Identifier: Apache-2.0
"""``profilemate doctor --ray``: can profilemate record on each node of a Ray cluster?"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from analysis.errors import RuleError
from profilemate import config
from profilemate.cluster import tasks
from profilemate.commands import ray_probe

VERSION = 1
"""Of the JSON. Goes up when a key changes its meaning or goes away, not when one is added."""

ANSWER_SEC = 120
"""How long a node may take to start a process and to answer."""

CLOCK_READINGS = 9
FARTHEST_SEC = 1.0
"""Clocks that are farther apart are worth a word."""

State = Literal["good", "degraded", "bad"]


@dataclass(frozen=True)
class Node:
    """What was found on a node.

    ``clock_offset_sec``: how far its wall clock is ahead of this machine's; ``clock_error_sec``:
    half of what the fastest answer took. ``has_profilemate``: whether a new Python process finds
    it; ``can_write``: to ``directory``, where its sessions go. All of these are None where the
    node did not answer. ``problems``: what is wrong, and what to do.
    """

    address: str
    host: str | None
    state: State
    python: str | None
    vllm: str | None
    has_profilemate: bool | None
    directory: str | None
    can_write: bool | None
    clock_offset_sec: float | None
    clock_error_sec: float | None
    problems: tuple[str, ...]


@dataclass(frozen=True)
class Seen:
    """A node's answer; empty with a ``problem`` where there is none."""

    address: str
    found: Mapping[str, Any]
    settings: config.Config | None = None
    offset_sec: float | None = None
    error_sec: float | None = None
    problem: str | None = None


def examine(address: str) -> list[Node]:
    """Look at each living node of the cluster at this address.

    Its processes get the variables of profilemate's and the PYTHONPATH that this process has, as
    those of a job do by its runtime environment.

    Raises:
        RuleError: Ray is not installed, or there is no such cluster.

    """
    variables = {
        name: value
        for name, value in os.environ.items()
        if name in ("PYTHONPATH", *config.NAMES) and value
    }
    with tasks.connected(address, {"env_vars": variables}):
        import ray

        ray.cloudpickle.register_pickle_by_value(ray_probe)
        try:
            alive = [node for node in ray.nodes() if node["Alive"]]
            actors = [_start(ray, node) for node in alive]
            seen = [
                _look(ray, str(node["NodeManagerAddress"]), actor)
                for node, actor in zip(alive, actors, strict=True)
            ]
        finally:
            ray.cloudpickle.unregister_pickle_by_value(ray_probe)
    if not seen:
        raise RuleError(f"--ray {address}: the cluster has no node")
    return judge(seen)


def _start(ray: Any, node: Mapping[str, Any]) -> Any:
    """A process on this node. It needs no free processor, and ends with our connection."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    place = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(ray_probe.Probe).options(num_cpus=0, scheduling_strategy=place).remote()


def _look(ray: Any, address: str, actor: Any) -> Seen:
    try:
        variables = ray.get(actor.variables.remote(config.NAMES), timeout=ANSWER_SEC)
        settings = config.read(variables)
        found = ray.get(actor.look.remote(str(settings.directory)), timeout=ANSWER_SEC)
        offset, error = _clock(ray, actor)
    except ray.exceptions.RayError as failure:
        return Seen(address, {}, problem=f"it does not answer ({type(failure).__name__})")
    return Seen(address, found, settings, offset, error)


def _clock(ray: Any, actor: Any) -> tuple[float, float]:
    """How far the node's clock is ahead of ours, and how far that may be off: an answer comes from
    some moment between the question and its arrival. The fastest one says most."""
    readings = []
    for _ in range(CLOCK_READINGS):
        asked = time.time()
        theirs = ray.get(actor.now.remote(), timeout=ANSWER_SEC)
        took = time.time() - asked
        readings.append((took, theirs - asked - took / 2))
    took, offset = min(readings)
    return offset, took / 2


def judge(seen: Sequence[Seen]) -> list[Node]:
    """What is wrong with each node, by itself and beside the others."""
    releases = Counter(one.found["vllm"] for one in seen if one.found.get("vllm"))
    usual = releases.most_common(1)[0][0] if releases else None
    nodes = []
    for one in seen:
        found = one.found
        bad, odd = _bad(one), _odd(one, usual)
        nodes.append(
            Node(
                address=one.address,
                host=found.get("host"),
                state="bad" if bad else "degraded" if odd else "good",
                python=found.get("python"),
                vllm=found.get("vllm"),
                has_profilemate=found.get("hooks"),
                directory=str(one.settings.directory) if one.settings else None,
                can_write=found["folder_problem"] is None if "folder_problem" in found else None,
                clock_offset_sec=one.offset_sec,
                clock_error_sec=one.error_sec,
                problems=(*bad, *odd),
            )
        )
    return nodes


def _bad(one: Seen) -> list[str]:
    """Why nothing can be recorded there."""
    found, settings = one.found, one.settings
    if problem := one.problem or found.get("problem"):
        return [problem]
    said = []
    if settings and not settings.enabled:
        said.append(f"profiling is off: unset {config.SWITCH}, or set it to 1")
    if not found.get("hooks"):
        said.append(
            "a new Python process does not find profilemate: put the folder of 'profilemate "
            "inject' there, and on PYTHONPATH in the runtime environment"
        )
    if not found.get("vllm"):
        said.append(f"{found.get('executable')} has no vLLM")
    said += [
        f"{found.get('executable')} cannot import {name}: make the folder of 'profilemate inject' "
        "with the same version of Python"
        for name in ("wrapt", "orjson")
        if not found.get(name)
    ]
    if settings and (problem := found.get("folder_problem")):
        said.append(
            f"{settings.directory}: {problem}; set {config.DIRECTORY} to a folder that can be "
            "written to"
        )
    return said


def _odd(one: Seen, usual: str | None) -> list[str]:
    said = []
    release = one.found.get("vllm")
    if release and release != usual:
        said.append(f"it has vLLM {release}, and most nodes have {usual}")
    if one.settings:
        said += one.settings.problems
    if one.offset_sec is not None and abs(one.offset_sec) > FARTHEST_SEC + (one.error_sec or 0):
        said.append(
            f"its clock is {one.offset_sec:+.1f} s from this machine's: keep both in time (NTP), "
            "or the times of joined sessions are as far off"
        )
    return said
