# SPDX-License-Identifier: Apache-2.0
"""``profilemate whatif --fast``: a model of the cache in place of vLLM's scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from analysis.errors import RuleError

if TYPE_CHECKING:
    from analysis.whatif.curve import Curve
    from analysis.whatif.workload import Workload

KNOWN = ("blocks", "block-size")
"""The settings that the model takes. It refuses the others."""


def curve(workload: Workload, given: Mapping[str, str | None], eviction: str | None) -> Curve:
    """The hit rates by pool size and eviction rule.

    Args:
        workload: the requests.
        given: what each option of ``whatif`` says, by the option's name.
        eviction: the eviction rules; all of them by default.

    Raises:
        RuleError: the model does not take an option, or not its value.
        SessionError: the session does not have the contents of its requests.

    """
    from analysis.whatif import fast

    for option, text in given.items():
        if text is not None and option not in KNOWN:
            raise RuleError(
                f"--{option}: --fast models the cache alone; leave out --fast or --{option}"
            )
    rules = _rules(eviction)
    block_size = _block_size(given.get("block-size"))
    resized = workload if block_size is None else workload.resized(block_size)
    return fast.curve(resized, _sizes(given.get("blocks"), resized), tuple(dict.fromkeys(rules)))


def _rules(text: str | None) -> tuple[str, ...]:
    from analysis.whatif import configuration, fast

    if not text:
        return fast.POLICIES
    try:
        return configuration.words(text, fast.POLICIES)
    except RuleError as error:
        raise RuleError(f"--eviction: {error}") from None


def _block_size(text: str | None) -> int | None:
    from analysis.whatif import configuration

    if text is None:
        return None
    try:
        sizes = configuration.numbers(text)
    except RuleError as error:
        raise RuleError(f"--block-size: {error}") from None
    if len(sizes) > 1:
        raise RuleError("--block-size: --fast takes one size; give one")
    return sizes[0]


def _sizes(text: str | None, workload: Workload) -> list[int] | None:
    """Usable blocks of each pool. The user counts as vLLM does, with the null block."""
    from analysis.whatif import configuration, pools

    if text is None:
        return None
    try:
        wanted = configuration.pools(text)
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
                f"--blocks: {workload.name} does not say how large its pool was, so "
                f"{pool.factor:g}x has no meaning; give a number of blocks"
            )
        found.append(usable)
    return found
