# SPDX-License-Identifier: Apache-2.0
"""``profilemate whatif --fast``: a model of the cache in place of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from analysis.errors import RuleError
from profilemate.commands.waiting import waiting

if TYPE_CHECKING:
    from analysis.whatif.curve import Curve
    from analysis.whatif.workload import Workload

KNOWN = ("blocks", "block_size")


def modelled(workload: Workload, named: Mapping[str, str | None], eviction: str | None) -> Curve:
    """The curve for what was asked for; ``named`` are the values of the options that both engines
    have.

    Raises:
        RuleError: the model does not know an option, or not its value.
        SessionError: the session does not tell the contents.

    """
    from analysis.whatif import configuration, fast

    for name, given in named.items():
        if given is not None and name not in KNOWN:
            option = "scheduling-policy" if name == "policy" else name.replace("_", "-")
            raise RuleError(f"--{option}: the fast engine models the cache alone; leave --fast out")
    try:
        rules = configuration.words(eviction, fast.POLICIES) if eviction else fast.POLICIES
    except RuleError as error:
        raise RuleError(f"--eviction: {error}") from None
    block_size = _block_size(named.get("block_size"))
    resized = workload if block_size is None else workload.resized(block_size)
    sizes = _sizes(named.get("blocks"), resized)
    with waiting("modelling the cache"):
        return fast.curve(resized, sizes, tuple(dict.fromkeys(rules)))


def _block_size(given: str | None) -> int | None:
    from analysis.whatif import configuration

    if given is None:
        return None
    try:
        sizes = configuration.numbers(given)
    except RuleError as error:
        raise RuleError(f"--block-size: {error}") from None
    if len(sizes) > 1:
        raise RuleError("--block-size: one at a time with --fast")
    return sizes[0]


def _sizes(given: str | None, workload: Workload) -> list[int] | None:
    """Usable blocks: the user counts as vLLM does, with the null block."""
    from analysis.whatif import configuration, pools

    if given is None:
        return None
    try:
        wanted = configuration.pools(given)
    except RuleError as error:
        raise RuleError(f"--blocks: {error}") from None
    found = []
    for pool in wanted:
        if pool.blocks is not None:
            found.append(pool.blocks - 1)
            continue
        measured = workload.measured
        usable = pools.times(measured, workload.block_size, pool.factor or 0) if measured else None
        if usable is None:
            raise RuleError(
                f"--blocks: {workload.name} does not tell how large its pool was, so there is "
                f"nothing that {pool.factor:g}x could be of; give a number of blocks"
            )
        found.append(usable)
    return found
