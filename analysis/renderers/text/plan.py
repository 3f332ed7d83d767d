# SPDX-License-Identifier: Apache-2.0
"""A plan, and a plan beside what an engine did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TextIO

from analysis.plan import Plan
from analysis.plan.capacity import ByBlockSize, ByUtilization, Length
from analysis.plan.differences import Figure
from analysis.plan.explain import Step
from analysis.plan.groups import Group
from analysis.plan.reality import Reality
from analysis.renderers.text.layout import Line, note, row, section, table, wrapped
from analysis.renderers.text.painting import paint, plain
from analysis.wording.formats import byte_size, counted, percent, share

_KINDS = {
    "full": "All tokens",
    "latent": "Latent, all tokens",
    "window": "Window",
    "state": "State",
    "chunked": "Chunk",
    "cross": "What an encoder made",
}


def write(found: Plan | Reality, out: TextIO, *, explained: bool) -> None:
    """Print it, with the arithmetic where ``explained``."""
    paint(lambda _: _layout(found, explained), out)


def render(found: Plan | Reality, *, explained: bool) -> str:
    """It as plain text."""
    return plain(lambda _: _layout(found, explained))


def _layout(found: Plan | Reality, explained: bool) -> Iterator[Line]:
    planned = found.plan if isinstance(found, Reality) else found
    yield (("A plan for ", ""), (planned.model.name, "title"))
    if isinstance(found, Reality):
        yield from section(f"Beside session {found.session}", _reality(found))
    yield from section("Model", _model(planned))
    yield from section(f"Memory of a {planned.settings.platform.device}", _memory(planned))
    yield from section("KV cache", _pool(planned))
    device = planned.settings.platform.device
    yield from section("Sequences of a length", _lengths(planned.by_length, device))
    yield from section(
        "By gpu_memory_utilization", _utilizations(planned.by_utilization, planned.max_model_len)
    )
    yield from section("By block size", _block_sizes(planned.by_block_size))
    if explained:
        yield from section("Step by step", _steps(planned.steps))
    yield from section("To know", _notes(planned.notes))


def _model(planned: Plan) -> Iterator[Line]:
    model, settings = planned.model, planned.settings
    platform = settings.platform
    other = platform.about or "vLLM on CPUs lays the cache out differently: --platform cpu"
    yield from row("Platform", platform.device, other)
    if model.parameters is not None:
        source = model.sources.get("parameters", "estimated from config.json")
        yield from row("Parameters", f"{model.parameters:,}", source)
    cache = settings.kv_cache_dtype
    kept = model.dtype if cache == "auto" else cache
    yield from row("A token takes", f"{planned.bytes_per_token:,} B", f"all layers, in {kept}")
    if planned.growing_bytes_per_token != planned.bytes_per_token:
        yield from row(
            "Beyond all windows", f"{planned.growing_bytes_per_token:,} B", "for each token more"
        )
    size = byte_size(max(planned.layout.bytes_per_block))
    groups = counted(len(planned.layout.groups), "group")
    by = planned.layout.decided_by
    yield from row("A block takes", size, f"on a {platform.device}; {groups}, by {by}")
    rows = [_group(one, count) for one, count in _alike(planned.layout.groups)]
    yield from table(("", "groups", "layers", "block", "bytes a layer"), rows)


def _alike(groups: Sequence[Group]) -> list[tuple[Group, int]]:
    """Groups that differ, each with the number of groups like it."""
    found: dict[tuple[object, ...], list[Group]] = {}
    for one in groups:
        found.setdefault((one.kind, one.block_size, one.page_bytes, one.window), []).append(one)
    return [(max(ones, key=lambda one: one.layers), len(ones)) for ones in found.values()]


def _group(one: Group, count: int) -> tuple[str, ...]:
    window = f" of {one.window:,}" if one.window else ""
    layers = f"{one.layers:,}" if count == 1 else f"up to {one.layers:,}"
    kind = f"{_KINDS[one.kind]}{window}"
    return (kind, f"{count}", layers, f"{one.block_size:,} tokens", f"{one.page_bytes:,}")


def _memory(planned: Plan) -> Iterator[Line]:
    memory, weights = planned.memory, planned.weights
    if memory is None:
        if weights is not None:
            yield from row("Weights", byte_size(weights.total_bytes), _weights(planned))
        return
    utilization = share(planned.settings.gpu_memory_utilization)
    of = f"{utilization} of {byte_size(memory.gpu_bytes)}"
    yield from row("vLLM may take", f"{byte_size(memory.requested_bytes):>10}", of)
    yield from row("- weights", f"{byte_size(memory.weight_bytes):>10}", _weights(planned))
    if memory.other_bytes:
        yield from row("- other memory", f"{byte_size(memory.other_bytes):>10}", "as given")
    left = byte_size(memory.kv_bytes) if memory.kv_bytes > 0 else "nothing"
    yield from row("= for the KV cache", f"{left:>10}", _stage(planned))


def _weights(planned: Plan) -> str:
    weights, settings = planned.weights, planned.settings
    if weights is None:
        return ""
    gpus = settings.tensor_parallel * settings.pipeline_parallel
    over = f"{gpus} {settings.platform.device}s"
    whole = f"{byte_size(weights.total_bytes)} over {over}; " if gpus > 1 else ""
    return f"{whole}{'an estimate: ' if weights.is_estimate else ''}{weights.source}"


def _stage(planned: Plan) -> str:
    stages, memory = planned.settings.pipeline_parallel, planned.memory
    if stages == 1 or memory is None:
        return ""
    return f"on stage {memory.stage} of {stages}, which makes the fewest blocks"


def _pool(planned: Plan) -> Iterator[Line]:
    pool, most = planned.pool, planned.max_model_len
    device = planned.settings.platform.device
    if pool is not None:
        size = f"{byte_size(pool.kv_bytes)} on a {device}"
        yield from row("Blocks", f"{pool.blocks:,}", f"one of them vLLM's null block; {size}")
        yield from row("Tokens", f"{pool.tokens:,}", "as vLLM prints them")
        yield from row("At once", f"{pool.max_concurrency:.2f}x", f"sequences of {most:,} tokens")
    if planned.average is not None:
        yield from _users("Average sequence", planned.average, device)
    yield from _users("Longest sequence", planned.worst, device)


def _users(label: str, one: Length, device: str) -> Iterator[Line]:
    last = (
        "" if one.last_block_used is None else f", the last one {share(one.last_block_used)} used"
    )
    blocks = f"{counted(one.blocks, 'block')}{last}; {byte_size(one.kv_bytes)} on a {device}"
    yield from row(label, f"{one.tokens:,} tokens", blocks)
    if one.users is not None:
        yield from row("", f"{counted(one.users, 'user')}", "at once, by whole sequences")


def _lengths(lengths: Sequence[Length], device: str) -> Iterator[Line]:
    rows = [
        (
            f"{one.tokens:,} tokens",
            f"{one.blocks:,}",
            "n/a" if one.last_block_used is None else share(one.last_block_used),
            byte_size(one.kv_bytes),
            _many(one.sequences),
        )
        for one in lengths
    ]
    yield from table(("", "blocks", "last one used", f"on a {device}", "at once"), rows)


def _many(sequences: float | None) -> str:
    return "n/a" if sequences is None else f"{sequences:,.2f}"


def _utilizations(found: Sequence[ByUtilization], most: int) -> Iterator[Line]:
    if not found:
        return
    rows = [
        (
            f"{one.gpu_memory_utilization:g}",
            byte_size(one.kv_bytes) if one.kv_bytes > 0 else "nothing",
            f"{one.pool.blocks:,}" if one.pool else "0",
            f"{one.pool.tokens:,}" if one.pool else "0",
            _many(one.pool.max_concurrency if one.pool else 0.0),
        )
        for one in found
    ]
    yield from table(("", "KV cache", "blocks", "tokens", f"at once, {most:,}"), rows)


def _block_sizes(found: Sequence[ByBlockSize]) -> Iterator[Line]:
    if not found:
        return
    rows = [
        (
            _size(one),
            byte_size(one.bytes_per_block),
            "n/a" if one.blocks is None else f"{one.blocks:,}",
            f"{one.length.blocks:,}",
            "n/a" if one.length.last_block_used is None else share(one.length.last_block_used),
            _many(one.length.sequences),
        )
        for one in found
    ]
    tokens = f"{found[0].length.tokens:,}"
    yield from table(("", "a block", "blocks", f"of {tokens}", "last used", "at once"), rows)
    if any(one.effective != one.block_size for one in found):
        yield from note("In brackets: what vLLM makes of it, so that a block holds a state.")


def _size(one: ByBlockSize) -> str:
    effective = f" ({one.effective:,})" if one.effective != one.block_size else ""
    return f"{one.block_size}{effective}"


def _steps(steps: Sequence[Step]) -> Iterator[Line]:
    for number, step in enumerate(steps, start=1):
        result = f"{step.result:,.2f}" if isinstance(step.result, float) else f"{step.result:,}"
        head = f"  {number:>2}. "
        yield from wrapped(head, step.name, "label", "label")
        equation = f"{step.arithmetic} = {result} {step.unit}"
        yield from wrapped(" " * len(head), equation, "", "figure")
        yield from wrapped(" " * len(head), f"({step.source})", "", "label")


def _notes(notes: Sequence[str]) -> Iterator[Line]:
    for one in notes:
        yield from wrapped("  - ", one, "", "")


def _reality(found: Reality) -> Iterator[Line]:
    rows = [_figure(one) for one in found.figures]
    yield from table(("", "planned", "engine", "difference"), rows)
    for one in found.figures:
        if one.parts and one.difference is not None:
            yield from _parts(one)
    for text in found.notes:
        yield from wrapped("  - ", text, "", "")


def _figure(one: Figure) -> tuple[str, ...]:
    # A difference that is rounded away has no sign.
    gap = "n/a" if one.difference is None else percent(round(100 * one.difference, 2) + 0.0)
    return (one.name, _amount(one.predicted, one.unit), _amount(one.measured, one.unit), gap)


def _parts(one: Figure) -> Iterator[Line]:
    yield ((f"  {one.name}: {_signed(one, one.unit)}, of which", ""),)
    for part in one.parts:
        sign = "+" if part.amount > 0 else "-"
        size = f"{sign}{_amount(abs(part.amount), one.unit)}"
        text = f"{part.name}: {size}; {part.note}"
        yield from wrapped("    ", text, "", "" if part.explained else "warning")


def _signed(one: Figure, unit: str) -> str:
    gap = (one.measured or 0) - (one.predicted or 0)
    return f"{'+' if gap > 0 else '-'}{_amount(abs(gap), unit)} against the plan"


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "n/a"
    if unit == "bytes":
        return byte_size(value)
    return f"{value:,.2f}" if unit == "sequences" else f"{round(value):,}"
