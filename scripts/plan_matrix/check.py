# SPDX-License-Identifier: Apache-2.0
"""What does a plan say of a model of this architecture, and what does vLLM make of it?"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from analysis.errors import RuleError
from analysis.plan import config, plan
from analysis.plan.model import Model
from analysis.plan.settings import Settings
from profilemate.simulation import classes
from profilemate.simulation.classes import NotKnownError, RefusedError
from scripts.plan_matrix import configs

MEMORY = 60 * 2**30
"""Bytes for the KV cache of a GPU."""
PLENTY = 2**46
BOUND_SEC = 120
BOUND_BYTES = 8 << 30


@dataclass(frozen=True)
class Result:
    """A row of the matrix.

    ``verdict``: ``equal``, ``differs`` (of the plan by vLLM's class from what vLLM makes),
    ``refused`` (by vLLM, for the same reason), ``keeps nothing``, ``not known`` or ``no config``.
    ``groups``: in words. ``bytes_per_block`` and ``blocks``: what 60 GiB make. ``reading``: of the
    plan without vLLM: ``equal``, ``differs`` or ``not known``. ``why``: of what is not equal.
    """

    architecture: str
    verdict: str
    groups: str = ""
    bytes_per_block: int | None = None
    blocks: int | None = None
    reading: str = ""
    family: str = ""
    why: str = ""


def check(name: str) -> Result:
    """Check an architecture, in a process of its own that is bounded in time and memory."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_work, args=(theirs, name))
    process.start()
    theirs.close()
    found: dict[str, Any] | None = None
    with suppress(EOFError, OSError):
        if ours.poll(BOUND_SEC):
            found = ours.recv()
        else:
            found = {"verdict": "not known", "why": f"it takes longer than {BOUND_SEC} s"}
    if process.is_alive():
        process.kill()
    process.join()
    if found is None:
        found = {"verdict": "not known", "why": "its process ended without an answer"}
    return Result(architecture=name, **found)


def _work(connection: Connection, name: str) -> None:
    signal.alarm(BOUND_SEC)
    most = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (BOUND_BYTES, most))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    try:
        found = _checked(name)
    except Exception as error:
        said = " ".join(str(error).split())
        found = {"verdict": "not known", "why": f"{type(error).__name__}: {said}"[:200]}
    connection.send(found)
    os._exit(0)


def _checked(name: str) -> dict[str, Any]:
    if configs.is_drafting(name):
        return {"verdict": "no config", "why": configs.DRAFTING}
    text = configs.config_of(name)
    if text is None:
        return {"verdict": "no config", "why": configs.NO_CONFIG}
    entries: dict[str, Any] = json.loads(text)
    family = {"family": _family(entries)}
    built_of: list[Any] = []
    grouped = classes._grouped

    def seen(made: Sequence[Any], *more: Any) -> Any:
        built_of[:] = made
        return grouped(made, *more)

    classes._grouped = seen  # type: ignore[assignment]
    try:
        built = classes.build(classes.Asked(config=text, batched_tokens=2048))
    except RefusedError as error:
        return {"verdict": "refused", "why": str(error), **family}
    except NotKnownError as error:
        return {"verdict": "not known", "why": str(error), **family}
    if not built.layout.groups:
        return {"verdict": "keeps nothing", **family, **_reading(entries, None)}
    try:
        memory, made = MEMORY, _of_vllm(built_of, MEMORY)
    except ValueError:
        # vLLM wants room for one sequence of the longest length.
        memory, made = PLENTY, _of_vllm(built_of, PLENTY)
    by_class = _plan(built, memory)
    is_equal = (by_class.pool.blocks, by_class.pool.tokens) == made[:2]
    return {
        "verdict": "equal" if is_equal else "differs",
        "why": "" if is_equal else f"{by_class.pool.blocks} blocks, vLLM {made[0]}",
        "groups": _words(built.layout.groups),
        "bytes_per_block": built.layout.bytes_per_block[0],
        "blocks": MEMORY // built.layout.bytes_per_block[0],
        **family,
        **_reading(entries, built),
    }


def _family(entries: Mapping[str, Any]) -> str:
    inner = entries.get("text_config")
    found = (inner or {}).get("model_type") if isinstance(inner, dict) else None
    return str(found or entries.get("model_type"))


def _plan(built: Any, memory: int) -> Any:
    model = Model("model", "bfloat16", (), None, None, None, None, {}, unknown="not read")
    return plan(model, Settings(kv_bytes=memory, max_num_batched_tokens=2048), ask=lambda _: built)


def _of_vllm(made: Sequence[Any], memory: int) -> tuple[int, int]:
    """Blocks and tokens that vLLM itself makes of the memory."""
    from vllm.v1.core import kv_cache_utils

    settings = made[0].config
    vars(settings.cache_config).update(made[0].asked_cache)
    settings.cache_config.kv_cache_layout = "LBNHC"
    found = kv_cache_utils.get_kv_cache_configs(settings, [classes._specs(settings)], [memory])[0]
    tokens, _ = kv_cache_utils.get_kv_cache_capacity(settings, found)
    return int(found.num_blocks), int(tokens)


def _reading(entries: Mapping[str, Any], built: Any) -> dict[str, Any]:
    """What the plan without vLLM says."""
    try:
        settings = Settings(kv_bytes=MEMORY, max_num_batched_tokens=2048)
        found = plan(config.model(entries, "model"), settings)
    except RuleError as error:
        reading = "equal" if built is None and "needs no KV cache" in str(error) else "not known"
        return {"reading": reading} | ({} if reading == "equal" else {"why": str(error)[6:120]})
    if built is None:
        return {"reading": "differs", "why": "planned, and it keeps nothing"}
    ours, theirs = found.layout, built.layout
    if (ours.groups, ours.bytes_per_block) != (theirs.groups, theirs.bytes_per_block):
        return {
            "reading": "differs",
            "why": f"{ours.bytes_per_block[0]:,} B a block: {_words(ours.groups)}",
        }
    if found.max_model_len != built.max_model_len:
        return {"reading": "differs", "why": f"{found.max_model_len:,} tokens at most"}
    return {"reading": "equal"}


def _words(groups: Sequence[Any]) -> str:
    found: dict[str, int] = {}
    for one in groups:
        window = f" of {one.window:,}" if one.window else ""
        found[f"{one.kind}{window}"] = found.get(f"{one.kind}{window}", 0) + 1
    sizes = sorted({one.block_size for one in groups} - {16})
    blocks = f", blocks of {', '.join(map(str, sizes))}" if sizes else ""
    return " + ".join(f"{count} {kind}" for kind, count in found.items()) + blocks
