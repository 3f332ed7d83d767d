# SPDX-License-Identifier: Apache-2.0
"""vLLM's own spans and ours, of one server: in the same traces, and with the same times."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from demo.server import Server
from tests.analysis.invoke import invoke
from tests.export.receiver import Span, receiver
from tests.support import engine
from tests.support.engine import SERVED_NAME, START_SECONDS, Lab

pytestmark = pytest.mark.engine

TRACES = {f"{number:032x}": f"{number:016x}" for number in (0xA1, 0xB2, 0xC3)}
"""By trace: the client's span."""

TOKENS = 20
"""Of a slow answer: 2 s."""

NEAR_SEC = 0.25
"""vLLM's front end and its engine look at their clocks at other moments than the hooks do. A slow
answer takes many times as long."""


def asked(server: Server, tokens: int, headers: dict[str, str], **fields: Any) -> str:
    """Ask for an answer of so many tokens; returns its id."""
    body = {"model": SERVED_NAME, "prompt": "Once upon a time", "max_tokens": tokens}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/completions",
        json.dumps({**body, "ignore_eos": True, **fields}).encode(),
        {"Content-Type": "application/json", **headers},
    )
    with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
        return str(json.load(answer)["id"])


def spans_of_both(lab: Lab) -> tuple[list[Span], list[Span], Path, list[str]]:
    """vLLM's spans of requests, ours, the session, and the ids of the answers."""
    variables = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with receiver() as found:
        option = f"--otlp-traces-endpoint={found.endpoint}/v1/traces"
        with lab.server("traced", option, **variables) as server:
            server.wait_until_ready(START_SECONDS)
            with lab.slow_answers() as slow:
                ids = [
                    asked(
                        server,
                        TOKENS,
                        {"traceparent": f"00-{trace}-{span}-01", "tracestate": "vendor=secret"},
                        **slow,
                    )
                    for trace, span in TRACES.items()
                ]
            ids.append(asked(server, TOKENS, {}))
            session = engine.session_of(server, lab.sessions("traced"))
            server.stop()
        engine.wait_until_settled(lab.sessions("traced"))
        vllms = [span for span in found.spans if span.name == "llm_request"]
        found.posts.clear()
        done = invoke("export", "otlp", session, "--endpoint", found.endpoint)
        assert (done.returncode, done.stderr) == (0, "")
        return vllms, found.spans, session, ids


def test_our_spans_stand_beside_vllms(lab: Lab) -> None:
    vllms, ours, session, ids = spans_of_both(lab)
    requests = [span for span in ours if span.name == "request"]
    traced = {span.trace: span for span in requests if span.above}
    assert {trace: span.above for trace, span in traced.items()} == TRACES
    assert len(requests) == len(vllms) == len(ids) == 4
    of_vllm = {span.attributes["gen_ai.request.id"]: span for span in vllms}
    for span in requests:
        known = of_vllm.pop(span.attributes["gen_ai.request.id"])
        if span.above:
            assert (known.trace, known.above) == (span.trace, span.above)
        else:
            assert known.trace not in TRACES
        check_times(span, {one.name: one for one in ours if one.above == span.id}, known)
        attributes = known.attributes
        assert span.attributes["gen_ai.usage.output_tokens"] == TOKENS
        assert (
            span.attributes["gen_ai.usage.input_tokens"]
            == (attributes["gen_ai.usage.prompt_tokens"])
        )
    slowest = max(span.end_ns - span.begin_ns for span in traced.values()) / 1e9
    assert slowest > 4 * NEAR_SEC
    for file in session.rglob("*"):
        assert not file.is_file() or b"secret" not in file.read_bytes()


def check_times(request: Span, phases: dict[str, Span], vllms: Span) -> None:
    """The request lies within vLLM's span of it, and its phases take as long as vLLM says."""
    slack = NEAR_SEC * 1e9
    assert vllms.begin_ns - slack <= request.begin_ns <= request.end_ns <= vllms.end_ns + slack
    for phase, name in (
        ("queued", "queue"),
        ("prefill", "model_prefill"),
        ("decode", "model_decode"),
    ):
        took = (phases[phase].end_ns - phases[phase].begin_ns) / 1e9
        said = vllms.attributes[f"gen_ai.latency.time_in_{name}"]
        assert took == pytest.approx(said, abs=NEAR_SEC), phase
