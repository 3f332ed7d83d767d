# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import open_session, series, summarize
from analysis.renderers import json
from analysis.renderers.html import page as html
from analysis.renderers.text import summary as text
from tests.analysis.builder import METADATA, SessionBuilder
from tests.analysis.stories import swept
from tests.analysis.test_prefix_cache import eight_alike, waiting_and_preempted

ROOT = Path(__file__).parent.parent.parent


def text_of(session: SessionBuilder) -> str:
    return text.render(summarize(open_session(session.folder)))


def one_line(rendered: str) -> str:
    """The text without its line breaks, for sentences that are wrapped."""
    return " ".join(rendered.split())


def test_engines_with_pools_of_different_sizes(session: SessionBuilder) -> None:
    """The configuration that is recorded is the first one's: 101 blocks with the null block."""
    session.usage((1, 40))
    session.usage((1, 40), engine=1)
    said = one_line(text_of(session))
    assert "Pool 101 blocks of 16 tokens = 1,616 tokens of KV cache" in said
    assert "blocks mean" not in said
    session.usage((1, 40), engine=2, total_blocks=80, free_blocks=0)
    said = one_line(text_of(session))
    assert "Pool engine 0 101, engine 1 101, engine 2 81 blocks of 16 tokens" in said
    assert "per request: 1.62x (engine 0)" in said
    assert "1,616 tokens" not in said
    assert "blocks mean median" in said
    assert "Engine 2 80 40.00 %" in said


def test_names_of_thousands_of_characters_are_cut(session: SessionBuilder) -> None:
    swept(session)
    for file in ("requests.jsonl", "prefix_cache_lookups.csv", "kv_cache_evictions.csv"):
        path = session.folder / file
        path.write_text(re.sub(r"\b[ABCS]\b", lambda name: name[0] * 5_000, path.read_text()))
    summary = summarize(open_session(session.folder))
    shown = "".join(text.render(summary).split())
    assert "B" * 117 + "...computed" in shown
    page = html.render(summary, series.measure(open_session(session.folder), summary))
    for name in "ABCS":
        assert name * 118 not in shown
        assert name * 118 not in page
    assert "B" * 117 + "..." in page
    assert "B" * 5_000 in json.render(summary)


def busy(session: SessionBuilder) -> None:
    """Something of everything, with figures as large as they get."""
    many = 10**8
    session.usage((1, 0), (2, 95), (9, 10))
    session.usage((1, 0), (2, 65), engine=11)
    for event in ("allocate", "reuse", "free", "cache", "reset", "reset_refused"):
        session.rows("kv_cache_allocations.csv", {"event": event, "num_blocks": many})
    session.evictions(*({"lifetime_sec": many, "engine": engine} for engine in (0, 11)))
    waiting_and_preempted(session)
    session.lookups(
        {
            "request_id": "x" * 200,
            "query_tokens": many,
            "hit_tokens": many,
            "external_hit_tokens": many,
            "lookups": many,
        }
    )
    session.requests(
        *({"finish_reason": reason, "input_length": many} for reason in ("stop", "abort")),
        {"finish_reason": "length", "preemptions": many},
    )
    session.rows("scheduler_steps.csv", {"preempted_reqs": many, "repeats": many})
    session.metadata(
        dropped_events=many,
        model={**METADATA["model"], "name": "organisation/" + "long-model-name-" * 8},
        versions={**METADATA["versions"], "vllm": "0.10.2"},
        parallel={"tensor": 8, "pipeline": 2, "data": 12},
    )


def test_a_page_has_a_long_name_in_one_piece(session: SessionBuilder) -> None:
    busy(session)
    summary = summarize(open_session(session.folder))
    page = html.render(summary, series.measure(open_session(session.folder), summary))
    assert f"<dd>organisation/{'long-model-name-' * 8} (" in page


def test_both_hit_rates_are_named(session: SessionBuilder) -> None:
    eight_alike(session)
    rendered = text_of(session)
    assert "86.13 % of tokens  7,056 of 8,192" in rendered
    assert "87.50 % of requests  7 of 8" in rendered
    assert "vLLM's own rate     86.13 % of tokens" in rendered
    assert "Why they agree" in rendered


def test_where_vllm_counts_more_it_is_said_what(session: SessionBuilder) -> None:
    waiting_and_preempted(session)
    session.metadata(versions={"vllm": "0.11.0"})
    rendered = one_line(text_of(session))
    assert "True hit rate 46.67 % of tokens" in rendered
    assert "vLLM's own rate 19.90 % of tokens 10,230 of 51,410" in rendered
    assert "1,005 lookups of waiting requests looked up again (10,000 of 51,000" in rendered
    assert "1 lookups of preempted requests that find their own blocks (90 of 110" in rendered


def test_concurrency_is_written_as_vllm_prints_it(session: SessionBuilder) -> None:
    session.metadata(
        cache={**METADATA["cache"], "max_model_len": 131072, "max_concurrency": 2.4049}
    )
    expected = "Maximum concurrency for 131,072 tokens per request: 2.40x"
    assert expected in one_line(text_of(session))


def test_usage_shows_held_cached_and_free(session: SessionBuilder) -> None:
    session.usage((0, 60), cached_blocks=40, free_blocks=0)
    session.usage((5, 0), cached_blocks=40, free_blocks=60)
    rendered = one_line(text_of(session))
    assert "Mean 30.00 % 60.00 % while any block was held, 50.00 % of the time" in rendered
    assert "Peak 60.00 % at 0 us: 60 held, 40 cached, 0 free of 100" in rendered
    assert "At the end 0.00 % 0 held, 40 cached, 60 free of 100" in rendered
    assert "Time 60 to 80 % 50.00 % ############" in rendered


def test_every_engine_has_its_line(session: SessionBuilder) -> None:
    busy(session)
    rendered = one_line(text_of(session))
    assert "All 2 pools together" in rendered
    assert re.search(r"Engine 0 75\.00 % 95\.00 % 95\.00 % 95\.00 % 77\.78 %", rendered)
    assert re.search(r"Engine 11 57\.78 %", rendered)


def test_what_is_missing_is_said_at_the_top(session: SessionBuilder) -> None:
    hooks = {"hooks_missing": {"scheduler": "no module"}, "hooks_failed": {"free": "KeyError: 1"}}
    process = {"role": "engine", "rank": 1, "problem": "torn", "mismatches": 3, **hooks}
    session.metadata(
        complete=False,
        ended_at=None,
        dropped_events=7,
        processes=[process],
        cost={"rows_dropped": 9},
    )
    top = one_line(text_of(session).partition("\nSession\n")[0])
    for said in (
        "Cut off: journal/ is missing",
        "Warning: 7 events were dropped",
        "Warning: 9 rows were dropped",
        "Warning: engine 1: torn",
        "Warning: engine 1: in 3 rows the blocks held are not those that vLLM counted",
        "Warning: engine 1: hook scheduler is not attached: no module",
        "Warning: engine 1: free failed (KeyError: 1)",
    ):
        assert said in top


def test_requests_that_can_never_run_are_named(session: SessionBuilder) -> None:
    session.lookups({"request_id": "huge", "query_tokens": 1601, "hit_tokens": 0, "admitted": 0})
    rendered = one_line(text_of(session))
    assert "Can never run 1 huge needs 101 blocks for 1,601 tokens, 100 are usable" in rendered


def test_an_empty_session_is_described_in_words(session: SessionBuilder) -> None:
    rendered = text_of(session)
    for said in ("No block was ever held.", "No cached block was evicted.", "No request was"):
        assert said in rendered
    assert "nan" not in rendered.lower()
    session.metadata(cache={**METADATA["cache"], "prefix_caching": False})
    assert "Prefix caching was off." in text_of(session)


def test_without_metadata_nothing_is_made_up(session: SessionBuilder) -> None:
    session.usage((1, 10))
    (session.folder / "metadata.json").unlink()
    rendered = one_line(text_of(session))
    assert "Model unknown" in rendered
    assert "Pool unknown" in rendered
    assert "unknown: vLLM is of no known release" in rendered


def test_no_line_is_wider_than_80_columns(session: SessionBuilder) -> None:
    busy(session)
    lines = text_of(session).splitlines()
    assert lines[1] == str(session.folder)
    assert [line for line in lines[2:] if len(line) > 80] == []
    assert all(line == line.rstrip() for line in lines)


def test_without_a_terminal_it_is_plain_ascii(session: SessionBuilder) -> None:
    busy(session)
    out = io.StringIO()
    text.write(summarize(open_session(session.folder)), out)
    assert out.getvalue() == text_of(session) + "\n"
    assert out.getvalue().isascii()
    assert "\x1b" not in out.getvalue()


def test_without_rich_it_is_the_same(
    session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy(session)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    out = io.StringIO()
    text.write(summarize(open_session(session.folder)), out)
    assert out.getvalue() == text_of(session) + "\n"


def test_on_a_terminal_it_has_colours_and_says_the_same(session: SessionBuilder) -> None:
    busy(session)
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "analysis", "--full", str(session.folder)],
        stdout=theirs,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "COLUMNS": "40"},
    )
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 1 << 16):
            seen += part
    except OSError:
        pass  # Linux says so where the other end has closed.
    assert process.wait() == 0
    os.close(ours)
    assert b"\x1b[1;36mSession" in seen
    painted = re.sub(r"\x1b\[[\d;]*m", "", seen.decode()).replace("\r\n", "\n")
    assert painted.replace("█", "#") == text_of(session) + "\n"


def test_what_clients_and_models_are_called_cannot_drive_a_terminal(
    session: SessionBuilder,
) -> None:
    session.metadata(model={"name": "evil\x1b]0;title\x07[bold red]"}, host="host\u202egnp")
    session.lookups({"request_id": "\x1b[31m", "query_tokens": 9999, "hit_tokens": 0})
    rendered = text_of(session)
    assert all(char.isprintable() or char == "\n" for char in rendered)
    assert "[bold red]" in rendered
    assert "\\x1b[31m needs" in rendered
