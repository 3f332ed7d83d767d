# SPDX-License-Identifier: Apache-2.0
"""Phases and blame in a trace of vLLM's own scheduler: to the microsecond that is known."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from analysis import Summary, open_session, summarize
from tests.analysis.invoke import invoke
from tests.export.reading import Read, read
from tests.export.receiver import Span, receiver
from tests.situations.bench import Bench, Engine
from tests.situations.test_evicted import run
from tests.support.scheduler import tokens


def exported(engine: Engine) -> tuple[Read, Path]:
    folder = engine.end().folder
    assert invoke("export", "perfetto", folder).returncode == 0
    return read(folder / "trace.pftrace"), folder


def phases(found: Read, name: str) -> list[tuple[str, int, int]]:
    """A request's phases, in milliseconds since the session began."""
    began = found.wall_ns or 0
    return [
        (one.name, (one.begin_ns - began) // 10**6, (one.end_ns - began) // 10**6)
        for one in found.slices
        if one.track[-1] == name and one.depth
    ]


def test_the_phases_of_a_preempted_request(bench: Bench) -> None:
    """Ten usable blocks, eight tokens a step of 10 ms. a's prompt takes steps 1 to 8. b gets what a
    leaves of the steps from then on. When a needs a sixth block, in step 25, b is preempted. It
    runs again after a has ended, finds three of its blocks, and fills its fourth in two steps."""
    engine = bench.engine(10, max_num_seqs=4, max_num_batched_tokens=8)
    engine.run(bench.request("a", tokens(1, 64), 49), bench.request("b", tokens(2, 64), 20))
    found, folder = exported(engine)
    summary = summarize(open_session(folder))
    assert phases(found, "a") == [("queued", 0, 10), ("prefill", 10, 80), ("decode", 80, 560)]
    assert phases(found, "b") == [
        ("queued", 0, 90),
        ("prefill", 90, 180),
        ("decode", 180, 250),
        ("preempted", 250, 570),
        ("prefill", 570, 580),
        ("decode", 580, 710),
    ]
    (one,) = summary.preemptions.costliest
    (preempted,) = found.named("preempted")
    began = found.wall_ns or 0
    assert preempted.begin_ns - began == round(one.preempted_sec * 1e9)
    assert preempted.end_ns - began == round(one.resumed_sec * 1e9)
    assert preempted.args == {"made_room_for": "a", "recomputed_tokens": 22}
    (arrow,) = [pair for pair in found.arrows if pair[1].name == "preempts"]
    assert arrow[0] is preempted
    assert (arrow[1].track[-1], arrow[1].begin_ns) == ("a", preempted.begin_ns)
    assert arrow[1].args == {"victim": "b", "recomputed_tokens": 22}
    evicted = found.named("evicted")
    assert sum(one.args["blocks"] for one in evicted) == summary.evictions.total.blocks
    # When a has ended, b takes one of its blocks, too.
    assert {(one.track[-1], one.args["by"]) for one in evicted} == {("b", "a"), ("a", "b")}
    assert sum(one.args["blocks"] for one in evicted if one.args["by"] == "a") == one_taken(summary)


def one_taken(summary: Summary) -> int:
    """Blocks that the summary says were taken from the one victim."""
    return sum(summary.preemptions.costliest[0].takers.values())


def test_who_preempts_itself_has_no_arrow(bench: Bench) -> None:
    engine = bench.engine(12, max_num_batched_tokens=65, scheduler_reserve_full_isl=False)
    engine.add(bench.request("holder", tokens(1, 64), 34))
    run(engine, bench.request("glutton", tokens(2, 128), 1), 0.01)
    found, _ = exported(engine)
    (preempted,) = found.named("preempted")
    assert preempted.args["made_room_for"] == "glutton"
    assert not [pair for pair in found.arrows if pair[1].name == "preempts"]
    assert [name for name, _, _ in phases(found, "glutton")] == [
        *("queued", "prefill", "preempted", "prefill")
    ]


def test_a_preempted_request_as_spans(bench: Bench) -> None:
    """The run of ``test_the_phases_of_a_preempted_request``."""
    engine = bench.engine(10, max_num_seqs=4, max_num_batched_tokens=8)
    trace, above = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace}-{above}-01"}
    victim = bench.request("b", tokens(2, 64), 20, trace_headers=headers)
    engine.run(bench.request("a", tokens(1, 64), 49), victim)
    folder = engine.end().folder
    (preempted,) = summarize(open_session(folder)).preemptions.costliest
    with receiver() as found:
        done = invoke("export", "otlp", folder, "--endpoint", found.endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    requests = {
        span.attributes["profilemate.request.id"]: span
        for span in found.spans
        if span.name == "request"
    }
    one = requests["b"]
    assert (one.trace, one.above) == (trace, above)
    below = [span for span in found.spans if span.above == one.id]
    assert [span.name for span in below] == [
        *("queued", "prefill", "decode", "preempted", "prefill", "decode")
    ]
    assert all(one.end_ns == other.begin_ns for one, other in pairwise(below))
    lost = below[3]
    assert lost.end_ns - lost.begin_ns == round(
        (preempted.resumed_sec - preempted.preempted_sec) * 1e9
    )
    said = {"profilemate.recomputed_tokens": 22, "profilemate.made_room_for": "a"}
    assert lost.attributes == said
    assert ("preempted", lost.begin_ns, said) in one.events
    assert sum(_blocks_lost(span) for span in requests.values()) == (
        summarize(open_session(folder)).evictions.total.blocks
    )


def _blocks_lost(request: Span) -> int:
    named = sum(about.get("profilemate.blocks", 0) for _, _, about in request.events)
    assert named == request.attributes["profilemate.evicted_blocks"]
    return int(named)
