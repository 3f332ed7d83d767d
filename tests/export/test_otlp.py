# SPDX-License-Identifier: Apache-2.0
"""A session as spans: what a receiver of OTLP gets, and what the file of OTLP's JSON holds."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from analysis import open_session, summarize
from analysis.export.otlp import evictions, spans
from tests.analysis import stories
from tests.analysis.builder import SessionBuilder
from tests.analysis.conftest import session as session
from tests.analysis.invoke import invoke
from tests.analysis.test_cli import assert_fails
from tests.export.receiver import Span, receiver, spans_of

BEGAN_NS = 1769860800 * 10**9
"""2026-01-31T12:00:00Z, second 0 of a built session."""
SEC = 10**9
TRACE, ABOVE = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def sent(session: SessionBuilder, *options: object) -> list[Span]:
    with receiver() as found:
        done = invoke("export", "otlp", session.folder, "--endpoint", found.endpoint, *options)
    requests = sum(span.name == "request" for span in found.spans)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"sent the spans of {requests:,} requests\n"
    assert found.paths <= {"/v1/traces"}
    return found.spans


def of_requests(found: list[Span]) -> dict[str, Span]:
    return {
        span.attributes["profilemate.request.id"]: span for span in found if span.name == "request"
    }


def from_file(path: Path) -> list[Span]:
    """The spans of a file. Protobuf's JSON has other digits for ids than OTLP's."""
    found: list[Span] = []
    for line in path.read_text().splitlines():
        message: dict[str, Any] = json.loads(line)
        for of_resource in message["resourceSpans"]:
            for of_scope in of_resource["scopeSpans"]:
                for span in of_scope["spans"]:
                    for name in {"traceId", "spanId", "parentSpanId"} & set(span):
                        span[name] = b64encode(bytes.fromhex(span[name])).decode()
        found += spans_of(ParseDict(message, ExportTraceServiceRequest()))
    return found


def test_requests_have_the_summarys_figures(session: SessionBuilder) -> None:
    stories.swept(session)
    found = of_requests(sent(session))
    summary = summarize(open_session(session.folder))
    assert list(found) == ["A", "A2", "S", "B", "C"]
    names = ("input_tokens", "output_tokens", "cache_read.input_tokens")
    assert [
        sum(span.attributes[f"gen_ai.usage.{name}"] for span in found.values()) for name in names
    ] == [
        summary.requests.input_tokens,
        summary.requests.output_tokens,
        summary.prefix_cache.true.hit_tokens,
    ]
    assert found["A2"].attributes == {
        "gen_ai.request.id": "A2",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": 50,
        "gen_ai.usage.output_tokens": 1,
        "gen_ai.usage.cache_read.input_tokens": 48,
        "profilemate.request.id": "A2",
        "profilemate.engine": 0,
        "profilemate.hit_tokens": 48,
        "profilemate.computed_tokens": 50,
        "profilemate.preemptions": 0,
        "profilemate.evicted_blocks": 2,
    }
    taken = {
        name: span.attributes.get("profilemate.evicted_others_blocks")
        for name, span in found.items()
    }
    assert taken == {"A": None, "A2": None, "S": 3, "B": 1, "C": 1}
    assert found["A"].resource == {
        "service.name": "vllm",
        "service.instance.id": "session_20260131_120000_4711_c0ffee",
        "host.name": "gpu-1",
        "profilemate.session": "session_20260131_120000_4711_c0ffee",
    }
    assert found["A"].scope == "profilemate"


def test_who_took_a_requests_blocks_is_an_event_of_it(session: SessionBuilder) -> None:
    stories.swept(session)
    found = of_requests(sent(session))
    by = "profilemate.evicted_by"
    about = {"profilemate.blocks": 2, "profilemate.reason": "reallocated", by: "S"}
    assert found["A2"].events == [("evicted", BEGAN_NS + 3_001_000_000, about)]
    assert [one[2][by] for one in found["B"].events] == ["C"]
    # An A came before, and is not the one that held them last.
    assert found["A"].events == []


def test_phases_lie_below_their_request(session: SessionBuilder) -> None:
    stories.swept(session)
    found = sent(session)
    one = of_requests(found)["B"]
    below = [span for span in found if span.above == one.id]
    told = [(span.name, span.begin_ns - BEGAN_NS, span.end_ns - BEGAN_NS) for span in below]
    assert told == [
        ("queued", 5 * SEC, 5 * SEC),
        ("prefill", 5 * SEC, 11 * SEC // 2),
        ("decode", 11 * SEC // 2, 6 * SEC),
    ]
    assert {span.trace for span in below} == {one.trace}
    assert (one.begin_ns - BEGAN_NS, one.end_ns - BEGAN_NS) == (5 * SEC, 6 * SEC)
    assert len({span.trace for span in found}) == 5
    assert len({span.id for span in found}) == len(found)


def test_a_request_joins_the_trace_of_its_client(session: SessionBuilder) -> None:
    _, row = stories.request("chatcmpl-1-0a1b2c3d", 1, 2, 50, [1, 2, 3], 0)
    session.requests(
        {**row, "trace_id": TRACE, "parent_span_id": ABOVE}, {**row, "request_id": "alone"}
    )
    found = sent(session)
    requests = of_requests(found)
    joined, alone = requests["chatcmpl-1-0a1b2c3d"], requests["alone"]
    assert (joined.trace, joined.above) == (TRACE, ABOVE)
    # vLLM's own span has the id without what vLLM put behind it.
    assert joined.attributes["gen_ai.request.id"] == "chatcmpl-1"
    assert alone.above == ""
    assert alone.trace not in (TRACE, "0" * 32)
    assert {span.trace for span in found if span.above == joined.id} == {TRACE}


def test_a_second_export_sends_the_same_spans(session: SessionBuilder) -> None:
    stories.swept(session)
    assert sent(session) == sent(session)


def test_the_file_holds_what_is_sent(session: SessionBuilder) -> None:
    stories.swept(session)
    done = invoke("export", "otlp", session.folder)
    path = session.folder / "spans.otlp.jsonl"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{path}\n", "")
    assert path.stat().st_mode & 0o777 == 0o600
    assert from_file(path) == sent(session)
    (line,) = path.read_text().splitlines()
    (span, *_) = json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert (len(span["traceId"]), len(span["spanId"])) == (32, 16)
    assert (span["kind"], span["startTimeUnixNano"]) == (1, str(BEGAN_NS + SEC))


def test_a_part_is_what_the_options_say(session: SessionBuilder) -> None:
    stories.swept(session)
    assert list(of_requests(sent(session, "--window", "3.5s:6s"))) == ["S", "B"]
    found = of_requests(sent(session, "--requests", "A2"))
    assert list(found) == ["A2"]
    assert len(found["A2"].events) == 1


def test_what_the_collector_took_is_said(
    session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing can be sent on its own, and nothing comes twice as something else."""
    stories.swept(session)
    monkeypatch.setattr(spans, "_BATCH", 2)
    with receiver(refuses_after=1) as first:
        done = invoke("export", "otlp", session.folder, "--endpoint", first.endpoint)
    assert_fails(done, f"cannot send spans to {first.endpoint}/v1/traces: 400 Bad Request; ")
    assert "it took those of 2 requests; go on with --window 3.000000s:, as" in done.stderr
    rest = sent(session, "--window", "3.000000s:")
    assert list(of_requests(first.spans)) == ["A", "A2"]
    assert list(of_requests(rest)) == ["S", "B", "C"]
    whole = {span.id: span for span in sent(session)}
    together = {span.id: span for span in [*first.spans, *rest]}
    assert together == whole


def test_nobody_listens(session: SessionBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    stories.swept(session)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    with receiver() as gone:
        pass
    where = gone.endpoint.replace("http://", "http://me:secret@")
    done = invoke("export", "otlp", session.folder, "--endpoint", where)
    said = f"cannot send spans to {gone.endpoint}/v1/traces: Connection refused; it took none"
    assert_fails(done, said)
    assert "secret" not in done.stderr


def test_headers_and_names_come_from_the_environment(
    session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stories.swept(session)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ours")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    with receiver() as found:
        endpoint = f"{found.endpoint}/otlp/v1/traces"
        done = invoke("export", "otlp", session.folder, "--endpoint", endpoint)
    assert done.returncode == 0
    assert found.paths == {"/otlp/v1/traces"}
    assert {one.get("x-tenant") for one in found.headers} == {"ours"}
    assert {span.resource["service.name"] for span in found.spans} == {"chat"}


@pytest.mark.parametrize(
    "address", ["127.0.0.1:4317", "ftp://me:secret@127.0.0.1", "http://", "http://[::1", ""]
)
def test_no_address(session: SessionBuilder, address: str) -> None:
    stories.swept(session)
    done = invoke("export", "otlp", session.folder, "--endpoint", address)
    assert done.returncode == 2
    assert "is no address; write http://127.0.0.1:4318" in " ".join(done.stderr.split())
    assert "secret" not in done.stderr


def test_a_file_or_an_address(session: SessionBuilder, tmp_path: Path) -> None:
    stories.swept(session)
    options = ("-o", tmp_path / "f", "--endpoint", "http://127.0.0.1:4318")
    assert_fails(invoke("export", "otlp", session.folder, *options), "give one of them")


def test_without_a_wall_clock(session: SessionBuilder) -> None:
    stories.swept(session)
    session.metadata(started_at=None)
    assert_fails(invoke("export", "otlp", session.folder), "spans need the time of day")
    assert not (session.folder / "spans.otlp.jsonl").exists()


def test_an_empty_session_has_no_span(session: SessionBuilder) -> None:
    session.usage((0, 0))
    assert sent(session) == []


def test_the_largest_takers_are_named_and_all_blocks_are_counted(
    session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who took from whom is thinned out while the table is read, whatever its length."""
    monkeypatch.setattr(evictions, "_ROWS", 50)
    _, row = stories.request("A", 1, 2, 50, [1, 2, 3], 0)
    session.requests(row)
    session.evictions(
        *(
            {"timestamp_sec": 3 + taker / 100, "evicting_request": f"T{taker}"}
            | {"owner_request": "A", "content_id": 100 * taker + block}
            for taker in range(40)
            for block in range(2 + (taker % 20 == 7))
        )
    )
    (one,) = of_requests(sent(session)).values()
    assert one.attributes["profilemate.evicted_blocks"] == 82
    assert len(one.events) == evictions.MOST_TAKERS
    named = {
        about["profilemate.evicted_by"]: about["profilemate.blocks"] for *_, about in one.events
    }
    assert named["T7"] == named["T27"] == 3
    times = [at for _, at, _ in one.events]
    assert times == sorted(times)


def test_an_id_that_comes_again_has_its_own_losses(session: SessionBuilder) -> None:
    first, again = (stories.request("A", at, at + 1, 50, [1, 2, 3], 0)[1] for at in (1, 5))
    session.requests(first, again)
    session.evictions(
        {"timestamp_sec": 3, "evicting_request": "S", "owner_request": "A"},
        {"timestamp_sec": 7, "evicting_request": "T", "owner_request": "A"},
    )
    found = [span for span in sent(session) if span.name == "request"]
    assert len({span.trace for span in found}) == 2
    events = [[one[2]["profilemate.evicted_by"] for one in span.events] for span in found]
    assert events == [["S"], ["T"]]
