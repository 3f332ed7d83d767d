# SPDX-License-Identifier: Apache-2.0
"""A second tier of the KV cache in host memory: how large is it, how fast, and what did it save?

It is vLLM's own offloading connector. What was computed of a prompt is copied to host memory, and
what the pool has lost since then is copied back in place of being computed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from analysis.errors import RuleError
from analysis.tables.facts import Facts
from analysis.whatif.clock import StepTime

CONNECTOR = "OffloadingConnector"
SPEC = "CPUOffloadingSpec"
POLICIES = ("lru", "arc")
"""What can be simulated of the offloading that was recorded."""

BANDWIDTH_GB_PER_SEC = 25.0
"""Unless the user says otherwise: about what a GPU on PCIe 4.0 x16 copies in one direction."""

MOST_GIB = 1_000_000
MOST_CHUNKS = 8_000_000
"""vLLM makes an object for each chunk that is in host memory."""

_GIB = 2**30
_PAGE_BYTES = 4096
"""vLLM rounds a chunk up to whole pages of the host's memory."""

_HIGH, _MEDIUM = 0.1, 0.3
"""The error of the step times' fit, as a share of a step, up to which it is of this confidence."""

Confidence = Literal["high", "medium", "low"]


@dataclass(frozen=True)
class HostMemory:
    """Host memory of one engine, as vLLM's offloading connector uses it.

    ``total_bytes``: as ``cpu_bytes_to_use``. ``block_bytes``: what a block of the pool takes on
    each GPU. ``copies``: on how many GPUs the blocks differ, so that each is kept.
    ``bytes_per_sec``: what each GPU copies in each direction. ``chunk_blocks``: blocks that are
    kept and found together. ``prompts_only``, ``policy`` and ``store_threshold`` are the
    connector's ``offload_prompt_only``, ``eviction_policy`` and ``store_threshold``.
    """

    total_bytes: int
    block_bytes: int
    copies: int = 1
    bytes_per_sec: float = BANDWIDTH_GB_PER_SEC * 1e9
    chunk_blocks: int = 1
    prompts_only: bool = True
    policy: str = "lru"
    store_threshold: int = 0

    @property
    def chunks(self) -> int:
        """Chunks that there is room for."""
        plain = self.block_bytes * self.copies * self.chunk_blocks
        return self.total_bytes // (-(-plain // _PAGE_BYTES) * _PAGE_BYTES)

    @property
    def gib(self) -> float:
        return self.total_bytes / _GIB


@dataclass(frozen=True)
class HostOutcome:
    """What host memory did under one configuration.

    ``gib``: of each engine. ``chunk_tokens``: tokens that are kept and found together.
    ``bandwidth_gb_per_sec``: of each GPU in each direction. ``hit_tokens``: tokens of prompts that
    were found in host memory and not in the pool; ``hit_rate``: of all that were asked for.
    ``loaded_tokens`` and ``loaded_bytes``: what came back to the GPUs, of preempted requests, too;
    ``stored_bytes``: what was copied to host memory. ``load_sec``: what copying back took;
    ``compute_sec``: what computing these tokens would have taken, by the time of a step;
    ``saved_sec``: the latter less the former. ``confidence``: of the time of a step.

    Of a session itself only its hits are known. Times are None where the time of a step does not
    say what a token of a prompt takes.
    """

    hit_tokens: int
    hit_rate: float | None
    gib: float | None = None
    chunk_tokens: int | None = None
    bandwidth_gb_per_sec: float | None = None
    loaded_tokens: int | None = None
    loaded_bytes: int | None = None
    stored_bytes: int | None = None
    load_sec: float | None = None
    compute_sec: float | None = None
    saved_sec: float | None = None
    confidence: Confidence | None = None


def confidence(step_time: StepTime) -> Confidence | None:
    """How well the time of a step is known: None where it was not fitted."""
    if not step_time.mean_sec or step_time.rms_error_sec is None:
        return None
    error = step_time.rms_error_sec / step_time.mean_sec
    return "high" if error <= _HIGH else "medium" if error <= _MEDIUM else "low"


def sizes(text: str) -> tuple[float, ...]:
    """The sizes in a text, in GiB; 0 for no host memory.

    >>> sizes("0,8,32.5")
    (0.0, 8.0, 32.5)

    Raises:
        RuleError: it is no such list.

    """
    return tuple(_number(part, "GiB, from 0", 0, MOST_GIB) for part in _listed(text))


def bandwidths(text: str) -> tuple[float, ...]:
    """The bandwidths in a text, in GB a second.

    Raises:
        RuleError: it is no such list.

    """
    return tuple(_number(part, "GB/s, from 0.001", 0.001, 1e6) for part in _listed(text))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",")))


def _number(text: str, what: str, least: float, most: float) -> float:
    if not re.fullmatch(r"\d{1,7}(\.\d{1,6})?", text, re.ASCII) or not least <= float(text) <= most:
        raise RuleError(f"{text!r} is no number of {what} to {most:,.0f}")
    return float(text)


def of_session(facts: Facts, block_bytes: int | None) -> HostMemory | None:
    """The host memory that a session ran with, as far as it can be simulated."""
    found = facts.scheduler.offloading
    if facts.scheduler.connector != CONNECTOR or found is None or not block_bytes:
        return None
    if found.spec != SPEC or found.policy not in POLICIES or not found.host_bytes:
        return None
    return HostMemory(
        total_bytes=found.host_bytes,
        block_bytes=block_bytes,
        copies=copies(facts),
        chunk_blocks=found.chunk_blocks or 1,
        prompts_only=found.prompts_only is not False,
        policy=found.policy,
        store_threshold=found.store_threshold or 0,
    )


def copies(facts: Facts) -> int:
    """On how many GPUs of an engine the blocks differ. Multi-head latent attention has the same on
    all of them, of which vLLM keeps one."""
    tensor, pipeline = facts.tensor_parallel or 1, facts.pipeline_parallel or 1
    kinds = {group.layer_kind or group.kind for group in facts.groups}
    if kinds == {"MLAAttentionSpec"} and pipeline == 1:
        return 1
    return tensor * pipeline


def notes(facts: Facts, base: HostMemory | None, *, is_tried: bool) -> Iterator[str]:
    """What of host memory is simulated otherwise than it was, or has to be guessed."""
    if base is not None or is_tried:
        yield (
            "copies to and from host memory take their bytes by the bandwidth, in order, and wait "
            "for the step that they were asked for in; what they slow down is not simulated"
        )
    name = facts.scheduler.connector
    if name and base is None:
        instead = ": where host memory is tried, it takes its place" if is_tried else ""
        yield f"the KV connector {name} is not simulated: requests compute what it found{instead}"


def changed(
    base: HostMemory | None,
    *,
    gib: float | None,
    chunk_tokens: int | None,
    bandwidth: float | None,
    block_bytes: int | None,
    gpus: int,
    block_size: int,
) -> HostMemory | None:
    """The host memory with these changes; what is None stays.

    Args:
        base: what was recorded.
        gib: its size; 0: none.
        chunk_tokens: tokens that are kept together.
        bandwidth: GB a second of each GPU.
        block_bytes: of a block on each GPU, in blocks of ``block_size`` tokens.
        gpus: on how many the blocks differ.
        block_size: in tokens.

    Raises:
        RuleError: there cannot be such a memory.

    """
    if gib == 0 or (gib is None and base is None):
        return None
    if not block_bytes:
        raise RuleError(
            "--host-gib: what a token takes in the KV cache is not recorded; give its bytes on "
            "each GPU (--kv-bytes-per-token; profilemate plan says it)"
        )
    found = base or HostMemory(total_bytes=0, block_bytes=block_bytes, copies=gpus)
    found = replace(found, block_bytes=block_bytes)
    if gib is not None:
        found = replace(found, total_bytes=round(gib * _GIB))
    if bandwidth is not None:
        found = replace(found, bytes_per_sec=bandwidth * 1e9)
    if chunk_tokens is not None:
        if chunk_tokens % block_size:
            raise RuleError(
                f"--host-chunk {chunk_tokens:,}: a chunk has whole blocks, and these have "
                f"{block_size:,} tokens; give a multiple of that"
            )
        found = replace(found, chunk_blocks=chunk_tokens // block_size)
    if not found.chunks:
        raise RuleError(
            f"--host-gib {found.gib:g}: there is no room for one chunk of "
            f"{found.chunk_blocks * block_size:,} tokens; give more"
        )
    if found.chunks > MOST_CHUNKS:
        raise RuleError(
            f"--host-gib {found.gib:g}: this has room for {found.chunks:,} chunks of "
            f"{found.chunk_blocks * block_size:,} tokens, and at most {MOST_CHUNKS:,} can be "
            "simulated; give less, or larger chunks (--host-chunk)"
        )
    return found


def label(now: HostMemory | None, was: HostMemory | None, block_size: int) -> str:
    """What differs from the host memory before, in a few words."""
    if now is None:
        return "no host memory"
    parts = [f"{now.gib:g} GiB host"]
    if was is None or now.chunk_blocks != was.chunk_blocks:
        parts += [f"chunks of {now.chunk_blocks * block_size:,}"] * (now.chunk_blocks > 1)
    default = was.bytes_per_sec if was else BANDWIDTH_GB_PER_SEC * 1e9
    if now.bytes_per_sec != default:
        parts.append(f"{now.bytes_per_sec / 1e9:g} GB/s")
    return ", ".join(parts)
