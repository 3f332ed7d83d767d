# SPDX-License-Identifier: Apache-2.0
"""What ran, for how long, and what recording it took."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from analysis.pool.usage import Usage, blocks_by_engine
from analysis.summary import About
from analysis.tables.facts import Cost, Facts
from analysis.tables.pauses import Period
from analysis.tables.session import State
from analysis.wording.formats import byte_size, duration, seconds, with_details
from analysis.wording.printable import printable


@dataclass(frozen=True)
class Fact:
    """One thing that is known of a session. ``remark``: a sentence that goes below the value."""

    label: str
    value: str
    remark: str = ""


def facts(
    known: Facts, usage: Usage, started_at: str | None, duration_sec: float
) -> Iterator[Fact]:
    """What ran and where."""
    details = [
        None if known.layers is None else f"{known.layers} layers",
        known.dtype,
        None if known.bytes_per_token is None else f"{known.bytes_per_token:,} bytes a token",
    ]
    yield Fact("Model", with_details(known.model, details))
    yield Fact("Time", _when(started_at, duration_sec, known))
    versions = [f"{name} {version}" for name, version in known.versions.items()]
    yield Fact("Versions", ", ".join(versions) or "unknown")
    yield Fact("Engines", _engines(known))
    # Each engine sizes its own; the facts are the first one's, and count the null block.
    pools = {engine: blocks + 1 for engine, blocks in blocks_by_engine(usage).items()}
    differ = len(set(pools.values())) > 1
    yield Fact("Pool", _pools(pools, known) if differ else _pool(known), _groups(known))
    if known.max_concurrency is not None and known.max_model_len is not None:
        # As vLLM prints it, so that a search in its log finds it.
        concurrency = (
            f"Maximum concurrency for {known.max_model_len:,} tokens per request: "
            f"{known.max_concurrency:.2f}x"
        )
        if differ:
            concurrency += f" (engine {min(pools)})"
        yield Fact("Concurrency", concurrency)


def cost(of: Cost) -> Fact:
    """What recording the session took."""
    figures = [
        None
        if of.hook_sec is None
        else f"{seconds(of.hook_sec)} in the hooks at the ends of steps",
        None
        if of.writing_sec is None
        else f"{seconds(of.writing_sec)} of CPU time in the thread that writes",
        None if of.journal_bytes is None else f"{byte_size(of.journal_bytes)} of journal",
        None if of.table_bytes is None else f"{byte_size(of.table_bytes)} of tables",
    ]
    return Fact("Its own cost", ", ".join(filter(None, figures)) or "unknown")


def unfinished(state: State) -> str:
    """What a session that is not complete is."""
    return "Still running" if state == "running" else "Cut off"


def more(siblings: Sequence[str]) -> str:
    """Which sessions there are beside this one, and how to see them together."""
    others = ", ".join(siblings[:3])
    if len(siblings) > 3:
        others += f" and {len(siblings) - 3} more"
    return f"{others} ('profilemate summary --all' shows them together)"


MORE = "More of this program: "
"""Goes in front of ``more``: each engine of a program has a session."""


def marks(about: About) -> Fact | None:
    """What the user marked, the last ones where they are many; None where nothing."""
    if not about.marks:
        return None
    last = about.marks[-_MARKS:]
    shown = "; ".join(f"{seconds(mark.at_sec)} {printable(mark.text)}" for mark in last)
    earlier = len(about.marks) - len(last)
    return Fact("Marks", shown, f"And {earlier:,} before these." if earlier else "")


_MARKS = 10
"""So many are listed."""


def window(about: About) -> str:
    """For how long it was looked at."""
    length = duration(about.duration_sec - about.begin_sec)
    if about.period is not None:
        return f"{length} from {duration(about.begin_sec)} on"
    if about.window is not None:
        return f"the last {length} of {duration(about.duration_sec)}"
    return f"{length} after {duration(about.begin_sec)} of warm-up" if about.begin_sec else length


def paused(about: About) -> str | None:
    """Which part of the recording the figures are of; None where it never paused."""
    period = about.period
    if period is None:
        return None
    begin = duration(period.begin_sec)
    if period.end_sec is None:
        time = f"from {begin} on"
    else:
        time = f"from {begin} to {duration(period.end_sec)}"
    of = f"period {period.number} of {period.count}" if period.count > 1 else "what came before"
    said = [f"The recording was paused. The figures below are of {of}, {time}"]
    if period.number > 1:
        said.append(
            "What came before is not known: its prompts count as new, and blocks that were there "
            "have no lifetime"
        )
    if period.count > 1:
        said.append(f"'--period {_another(period)}' shows another one")
    return ". ".join(said)


def _another(period: Period) -> int:
    return period.number - 1 if period.number > 1 else period.number + 1


def removed(about: About) -> str | None:
    """Which part of the run the figures are of; None where nothing was removed."""
    if about.window is None or (about.period is not None and about.period.number > 1):
        return None
    last = f"The figures below are of the last {duration(about.duration_sec - about.begin_sec)}"
    why = "was removed to stay within VLLM_PROFILING_KEEP"
    if about.snapshot is not None:
        why = "is not in this snapshot"
    return (
        f"{last}: what came before {why}. Prompts of before, unless asked for since, count as new"
    )


def warm_up(about: About) -> str | None:
    """What was left out as warm-up; None where nothing was."""
    kept_from = 0.0 if about.window is None else about.window.begin_sec
    if about.period is not None:
        kept_from = max(kept_from, about.period.begin_sec)
    if about.begin_sec <= kept_from:
        return None
    return f"the first {duration(about.begin_sec)} of {duration(about.duration_sec)}"


def _when(started_at: str | None, duration_sec: float, known: Facts) -> str:
    # To the second, without the date and time's joint: 2026-01-31 12:00:00Z.
    moment = re.sub(r"(?<=\d)T|\.\d+", " ", started_at or "").replace(" Z", "Z").strip()
    began = f"from {moment}" if moment else ""
    host = f"on {known.host}" if known.host else ""
    return " ".join(filter(None, [duration(duration_sec), began, host]))


def _engines(known: Facts) -> str:
    parallel = [
        ("data", known.data_parallel),
        ("tensor", known.tensor_parallel),
        ("pipeline", known.pipeline_parallel),
    ]
    sizes = [f"{kind} parallel {size}" for kind, size in parallel if size and size > 1]
    return with_details(str(len(known.engines)) if known.engines else None, sizes)


def _pools(pools: Mapping[int, int], known: Facts) -> str:
    each = ", ".join(f"engine {engine} {blocks:,}" for engine, blocks in pools.items())
    return f"{each} blocks{_sizes(known)}"


def _pool(known: Facts) -> str:
    if known.pool_blocks is None:
        return "unknown"
    tokens = "" if known.kv_tokens is None else f" = {known.kv_tokens:,} tokens of KV cache"
    each = " an engine" if len(known.engines) > 1 else ""
    groups = f" in {len(known.groups)} groups" if len(known.groups) > 1 else ""
    return f"{known.pool_blocks:,} blocks{_sizes(known)}{tokens}{each}{groups}"


def _sizes(known: Facts) -> str:
    sizes = sorted({group.block_size for group in known.groups if group.block_size is not None})
    return f" of {' or '.join(f'{size:,}' for size in sizes)} tokens" if sizes else ""


def _groups(known: Facts) -> str:
    if len(known.groups) < 2:
        return ""
    return (
        f"The {len(known.groups)} groups share these blocks, and a token needs a place in each: "
        "blocks x tokens a block is more than fits."
    )
