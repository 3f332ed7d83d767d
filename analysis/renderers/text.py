# SPDX-License-Identifier: Apache-2.0
"""The summary as text for people: 80 columns, with colour where rich and a terminal are there.

The layout is made once, as lines of styled pieces; rich paints them, and without it, or into a
pipe, the same lines come out plain and in ASCII.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import TextIO

from analysis.admission import Admission
from analysis.evictions import Evicted, Evictions
from analysis.facts import Facts
from analysis.lifetimes import Lifetimes, Spread
from analysis.prefix_cache import Lookups, PrefixCache, TrueRate
from analysis.requests import Requests
from analysis.summary import About, Summary
from analysis.usage import PoolState, PoolUsage, Usage

WIDTH = 80
_LABEL = 20
_BAR = 24

Piece = tuple[str, str]
"""Text and the name of its style in ``_STYLES``; no style is the empty name."""
Line = tuple[Piece, ...]

_STYLES = {
    "title": "bold",
    "heading": "bold cyan",
    "label": "dim",
    "figure": "bold",
    "warning": "bold yellow",
    "bar": "cyan",
    "": "",
}


def write(summary: Summary, out: TextIO) -> None:
    """Print the summary."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        out.write(render(summary) + "\n")
        return
    console = Console(file=out, highlight=False, emoji=False, markup=False)
    pretty = console.is_terminal and console.encoding.startswith("utf")
    for line in _lines(summary, "█" if pretty else "#"):
        painted = Text.assemble(*((text, _STYLES[style]) for text, style in line))
        console.print(painted, soft_wrap=True)


def render(summary: Summary) -> str:
    """The summary as plain text."""
    return "\n".join("".join(text for text, _ in line) for line in _lines(summary, "#"))


def _lines(summary: Summary, bar: str) -> Iterator[Line]:
    for line in _layout(summary, bar):
        yield tuple((_printable(text), style) for text, style in line)


def _layout(summary: Summary, bar: str) -> Iterator[Line]:
    yield from _header(summary.session)
    for warning in summary.warnings:
        yield from _wrapped("Warning: ", warning, "warning", "warning")
    yield from _section("Session", _session(summary.session, summary.facts))
    yield from _section("KV cache usage, weighted by time", _usage(summary.usage, bar))
    yield from _section("Blocks", _blocks(summary))
    yield from _section("Prefix cache", _prefix_cache(summary.prefix_cache, summary.facts))
    yield from _section("Evictions", _evictions(summary.evictions, summary.lifetimes))
    yield from _section("Requests", _requests(summary))
    yield from _section("Profiling", _profiling(summary))


def _header(about: About) -> Iterator[Line]:
    yield (("profilemate  ", "label"), (about.session_id, "title"))
    yield ((about.directory, "label"),)
    if about.state != "complete":
        state = "Still running" if about.state == "running" else "Cut off"
        yield from _wrapped(f"{state}: ", about.note or "", "warning", "")


def _section(heading: str, lines: Iterable[Line]) -> Iterator[Line]:
    yield ()
    yield ((heading, "heading"),)
    yield from lines


def _session(about: About, facts: Facts) -> Iterator[Line]:
    details = [
        None if facts.layers is None else f"{facts.layers} layers",
        facts.dtype,
        None if facts.bytes_per_token is None else f"{facts.bytes_per_token:,} bytes a token",
    ]
    yield from _row("Model", _with_details(facts.model, details))
    yield from _row("Time", _when(about, facts))
    versions = [f"{name} {version}" for name, version in facts.versions.items()]
    yield from _row("Versions", ", ".join(versions) or "unknown")
    yield from _row("Engines", _engines(facts))
    yield from _row("Pool", _pool(facts))
    if facts.max_concurrency is not None and facts.max_model_len is not None:
        # As vLLM prints it, so that a search in its log finds it.
        concurrency = (
            f"Maximum concurrency for {facts.max_model_len:,} tokens per request: "
            f"{facts.max_concurrency:.2f}x"
        )
        yield from _row("Concurrency", concurrency)


def _when(about: About, facts: Facts) -> str:
    # To the second, without the date and time's joint: 2026-01-31 12:00:00Z.
    moment = re.sub(r"(?<=\d)T|\.\d+", " ", about.started_at or "").replace(" Z", "Z").strip()
    began = f"from {moment}" if moment else ""
    host = f"on {facts.host}" if facts.host else ""
    return " ".join(filter(None, [_duration(about.duration_sec), began, host]))


def _engines(facts: Facts) -> str:
    parallel = [
        ("data", facts.data_parallel),
        ("tensor", facts.tensor_parallel),
        ("pipeline", facts.pipeline_parallel),
    ]
    sizes = [f"{kind} parallel {size}" for kind, size in parallel if size and size > 1]
    return _with_details(str(len(facts.engines)) if facts.engines else None, sizes)


def _pool(facts: Facts) -> str:
    if facts.pool_blocks is None:
        return "unknown"
    sizes = sorted({group.block_size for group in facts.groups if group.block_size is not None})
    size = f" of {' or '.join(f'{size:,}' for size in sizes)} tokens" if sizes else ""
    tokens = "" if facts.kv_tokens is None else f" = {facts.kv_tokens:,} tokens of KV cache"
    each = " an engine" if len(facts.engines) > 1 else ""
    groups = f" in {len(facts.groups)} groups" if len(facts.groups) > 1 else ""
    return f"{facts.pool_blocks:,} blocks{size}{tokens}{each}{groups}"


def _usage(usage: Usage, bar: str) -> Iterator[Line]:
    total = usage.combined
    if total is None:
        yield from _note("No block was ever held.")
        return
    several = len(usage.pools) > 1
    if several:
        yield from _note(f"All {len(usage.pools)} pools together, each one's every second alike:")
    held = (
        f"{_percent(total.mean_while_held_pct)} while any block was held, "
        f"{_share(total.held_share)} of the time"
    )
    yield from _row("Mean", _percent(total.mean_pct), held)
    yield from _row("Median, 95th pct.", f"{_percent(total.p50_pct)}, {_percent(total.p95_pct)}")
    at = f"at {_seconds(total.peak.timestamp_sec)}: {_state(total.peak)}"
    yield from _row("Peak", _percent(total.peak_pct), at + _of_engine(total.peak, several))
    yield from _row("At the end", _percent(total.end.usage_pct), _state(total.end))
    yield from _bands(total, bar)
    if several:
        yield from _usage_by_pool(usage.pools)


def _bands(usage: PoolUsage, bar: str) -> Iterator[Line]:
    names = ("under 40 %", "40 to 60 %", "60 to 80 %", "80 to 90 %", "over 90 %")
    shares = astuple(usage.bands) if usage.bands else ()
    for name, share in zip(names, shares, strict=False):
        label = f"Time {name}"
        length = round(share * _BAR)
        yield (
            _label(label),
            (f"{_share(share):>9}", "figure"),
            (f"  {bar * length}" if length else "", "bar"),
        )


def _usage_by_pool(pools: Sequence[PoolUsage]) -> Iterator[Line]:
    several_pools = any(usage.pool for usage in pools)
    rows = [
        (
            f"Engine {usage.engine}" + (f" pool {usage.pool}" if several_pools else ""),
            *map(_percent, (usage.mean_pct, usage.p50_pct, usage.p95_pct, usage.peak_pct)),
            _share(usage.bands.over_90 if usage.bands else None),
        )
        for usage in pools
    ]
    yield from _table(("", "mean", "median", "95th pct.", "peak", "over 90 %"), rows)


def _state(state: PoolState) -> str:
    return (
        f"{state.held_blocks:,} held, {state.cached_blocks:,} cached, "
        f"{state.free_blocks:,} free of {state.total_blocks:,}"
    )


def _of_engine(state: PoolState, several: bool) -> str:
    return f" on engine {state.engine}" if several else ""


def _blocks(summary: Summary) -> Iterator[Line]:
    moves = summary.allocations
    rows = [
        (name, f"{moved.blocks:,}", f"{moved.calls:,}")
        for name, moved in (
            ("Allocated", moves.allocated),
            ("Reused (prefix hit)", moves.reused),
            ("Freed", moves.freed),
            ("Cached", moves.cached),
        )
    ]
    yield from _table(("", "blocks", "calls"), rows)
    if moves.resets or moves.resets_refused:
        refused = f", {moves.resets_refused:,} refused" if moves.resets_refused else ""
        yield from _row("Cache resets", f"{moves.resets:,} done{refused}")


def _prefix_cache(cache: PrefixCache, facts: Facts) -> Iterator[Line]:
    if facts.prefix_caching is False:
        yield from _note("Prefix caching was off.")
        return
    true = cache.true
    if not true.requests:
        yield from _note("No request was looked up and admitted.")
    else:
        yield from _true_rate(true)
    yield from _vllm_rate(cache)
    if cache.skipped.lookups:
        yield from _row("May not read it", f"{cache.skipped.lookups:,} lookups, in neither rate")


def _true_rate(true: TrueRate) -> Iterator[Line]:
    tokens = f"{true.hit_tokens:,} of {true.query_tokens:,} came from the cache"
    yield from _row("True hit rate", f"{_share(true.token_rate)} of tokens", tokens)
    requests = f"{true.requests_hit:,} of {true.requests:,} found some of their prompt"
    yield from _row("", f"{_share(true.request_rate)} of requests", requests)
    if true.external_hit_tokens:
        requests = f"{true.external_requests_hit:,} requests"
        external = f"{true.external_hit_tokens:,} tokens for {requests}"
        yield from _row("From a connector", external, "in neither rate")


def _vllm_rate(cache: PrefixCache) -> Iterator[Line]:
    vllm = cache.vllm
    name = f"vLLM {vllm.version}" if vllm.version else "vLLM"
    if vllm.counted is None or vllm.repeated is None or vllm.resumed is None:
        yield from _row("vLLM's own rate", f"unknown: {name} is of no known release")
        return
    counted = f"{vllm.counted.hit_tokens:,} of {vllm.counted.query_tokens:,} as it counts them"
    yield from _row("vLLM's own rate", f"{_share(vllm.token_rate)} of tokens", counted)
    differences = [
        _difference("of waiting requests looked up again", vllm.repeated),
        _difference("of preempted requests that find their own blocks", vllm.resumed),
    ]
    causes = " and ".join(filter(None, differences))
    if causes:
        yield from _row("Why they differ", f"{name} also counts {causes}.")
    else:
        yield from _row("Why they agree", _left_out(name, cache))


def _difference(what: str, lookups: Lookups) -> str:
    if not lookups.lookups:
        return ""
    return (
        f"{lookups.lookups:,} lookups {what} "
        f"({lookups.hit_tokens:,} of {lookups.query_tokens:,} tokens found)"
    )


def _left_out(name: str, cache: PrefixCache) -> str:
    left_out = (cache.repeated + cache.resumed).lookups
    if not left_out:
        return "each request was looked up once"
    return (
        f"{name} leaves out what the true rate does: {left_out:,} lookups of requests that went "
        "on waiting or had been preempted"
    )


def _evictions(evictions: Evictions, lifetimes: Lifetimes) -> Iterator[Line]:
    if not evictions.total.blocks:
        yield from _note("No cached block was evicted.")
        return
    split = [*evictions.by_reason.items(), *evictions.by_origin.items()]
    rows = [
        _evicted("All", evictions.total),
        *(_evicted(name.capitalize(), evicted) for name, evicted in split),
    ]
    if len(evictions.by_engine) > 1:
        rows += [_evicted(f"Engine {rank}", part) for rank, part in evictions.by_engine.items()]
    yield from _table(("", "blocks", "never reused", "copies left"), rows)
    yield from _note(
        "Never reused: no request ever found the block. Copies left: another block still held "
        "the same content, so nothing was lost."
    )
    yield ()
    rows = [_spread("Lifetime", lifetimes.lifetime), _spread("Idle before", lifetimes.idle)]
    yield from _table(("", "mean", "median", "95th pct.", "99th pct.", "max"), rows)


def _evicted(name: str, evicted: Evicted) -> tuple[str, ...]:
    def of_all(blocks: int) -> str:
        return f"{blocks:,} ({100 * blocks / evicted.blocks:.1f} %)"

    return (
        name,
        f"{evicted.blocks:,}",
        of_all(evicted.never_reused),
        of_all(evicted.copies_left),
    )


def _spread(name: str, spread: Spread) -> tuple[str, ...]:
    figures = (spread.mean_sec, spread.p50_sec, spread.p95_sec, spread.p99_sec, spread.max_sec)
    return (name, *map(_seconds, figures))


def _requests(summary: Summary) -> Iterator[Line]:
    requests, preemptions = summary.requests, summary.preemptions
    yield from _row("Ended", _ended(requests))
    if requests.ended:
        tokens = f"{requests.input_tokens:,} in, {requests.output_tokens:,} out"
        yield from _row("Tokens", tokens)
    steps = f"in {preemptions.steps:,} steps"
    if requests.preempted:
        steps += (
            f"; of {requests.preempted:,} of the ended requests, "
            f"of one of them {requests.most_preemptions:,}"
        )
    yield from _row("Preemptions", f"{preemptions.count:,}", steps)
    if requests.aborted:
        wasted = f"{requests.aborted_computed_tokens:,} tokens had been computed for them"
        yield from _row("Aborted", f"{requests.aborted:,}", wasted)
    yield from _admission(summary.admission)


def _ended(requests: Requests) -> str:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in requests.by_reason.items())
    return _with_details(f"{requests.ended:,}", [reasons])


def _admission(admission: Admission) -> Iterator[Line]:
    if admission.never_admitted:
        of_all = f"of {admission.looked_up:,} that were looked up"
        yield from _row("Never admitted", f"{admission.never_admitted:,}", of_all)
    if not admission.too_large:
        return
    yield from _row("Can never run", f"{admission.too_large:,}")
    for request in admission.largest:
        yield from _note(
            f"{request.request_id} needs {request.needed_blocks:,} blocks for "
            f"{request.tokens:,} tokens, {request.usable_blocks:,} are usable"
        )
    left = admission.too_large - len(admission.largest)
    if left:
        yield from _note(f"and {left:,} more")


def _profiling(summary: Summary) -> Iterator[Line]:
    cost = summary.cost
    figures = [
        None
        if cost.hook_sec is None
        else f"{_seconds(cost.hook_sec)} in the hooks at the ends of steps",
        None if cost.journal_bytes is None else f"{_bytes(cost.journal_bytes)} of journal",
        None if cost.table_bytes is None else f"{_bytes(cost.table_bytes)} of tables",
    ]
    yield from _row("Its own cost", ", ".join(filter(None, figures)) or "unknown")


def _row(label: str, figure: str, more: str = "") -> Iterator[Line]:
    """A label, a figure, and what there is to say of it, wrapped under the figure."""
    words = f"{figure}  {more}" if more else figure
    room = WIDTH - _LABEL - 2
    for number, line in enumerate(_fill(words, room)):
        strong = min(len(line), len(figure)) if number == 0 and more else 0
        head = _label(label if number == 0 else "")
        yield (head, (line[:strong], "figure"), (line[strong:], ""))


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[Line]:
    """Columns aligned to the right under their heads, the first one under the labels; large
    figures take room from the labels' column."""
    lines = [tuple(map(_printable, row)) for row in (heads, *rows)]
    widths = [2 + max(map(len, column)) for column in zip(*lines, strict=True)]
    widths[0] = max(widths[0] - 2, min(_LABEL, WIDTH - 2 - sum(widths[1:])))
    for number, (label, *cells) in enumerate(lines):
        figures = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True))
        yield (f"  {label:<{widths[0]}}", "label"), (figures, "figure" if number else "label")


def _note(text: str) -> Iterator[Line]:
    for line in _fill(text, WIDTH - 2):
        yield ((f"  {line}", ""),)


def _wrapped(head: str, text: str, head_style: str, style: str) -> Iterator[Line]:
    for number, line in enumerate(_fill(text, WIDTH - len(head))):
        start = head if number == 0 else " " * len(head)
        yield ((start, head_style), (line, style))


def _fill(text: str, width: int) -> list[str]:
    return textwrap.wrap(_printable(text), width, break_on_hyphens=False) or [""]


def _label(text: str) -> Piece:
    return (f"  {text:<{_LABEL}}", "label")


def _with_details(figure: str | None, details: Sequence[str | None]) -> str:
    known = ", ".join(filter(None, details))
    return " ".join(filter(None, [figure or "unknown", f"({known})" if known else ""]))


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f} %"


def _share(value: float | None) -> str:
    return _percent(None if value is None else 100 * value)


def _seconds(value: float | None) -> str:
    if value is None:
        return "n/a"
    if value < 0.001:
        return f"{value * 1e6:.0f} us"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    if value < 1e5:
        return f"{value:,.2f} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value / 3600:,.1f} h"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return _seconds(seconds)
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return (
        f"{hours} h {minutes:02} min {seconds:02} s" if hours else f"{minutes} min {seconds:02} s"
    )


def _bytes(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"


def _printable(text: str) -> str:
    """The text without what could drive a terminal, whoever wrote it into the session."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
