# SPDX-License-Identifier: Apache-2.0
"""A real collector beside a real scheduler: what is scraped is totals.json is the tables."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path

import polars as pl
import pytest

from profilemate.format.totals import TOTALS_FILE
from profilemate.metrics import exposition
from profilemate.metrics.server import Address
from tests.kv.recording import hooks_only, only_session
from tests.metrics.stories import totals_of
from tests.metrics.test_server import free_address
from tests.metrics.text import Values, total, values
from tests.support.scheduler import RequestMaker, build_scheduler, step, tokens

PATIENCE_SEC = 60.0
REQUESTS = 60


def scraped(address: Address) -> Values | None:
    """What a scrape gives; None where nobody answers yet."""
    try:
        with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/metrics", timeout=5) as page:
            return values(page.read().decode())
    except (urllib.error.URLError, ConnectionError):
        return None


def run(scheduler: object, first: int, requests: int) -> None:
    """So many requests, a third of whose prompts each are alike, in a pool that is too small."""
    make = RequestMaker()
    for number in range(first, first + requests):
        prompt = tokens(number % 3, 160) + tokens(100 + number, 40)
        scheduler.add_request(make(f"secret-{number}", prompt, 8))  # type: ignore[attr-defined]
    while scheduler.has_unfinished_requests():  # type: ignore[attr-defined]
        step(scheduler)


def test_scrapes_totals_and_tables_agree(model: Path, hooks_on: None, tmp_path: Path) -> None:
    address = free_address()
    with hooks_only(tmp_path, collector=True), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PROFILING_METRICS", f"{address[0]}:{address[1]}")
        scheduler = build_scheduler(model, 40)
        run(scheduler, 0, REQUESTS // 2)
        run(scheduler, REQUESTS // 2, REQUESTS // 2)
        last = settled(address, only_session(tmp_path))
        session = only_session(tmp_path)
        metadata = json.loads((session / "metadata.json").read_bytes())
        assert metadata["metrics"] == {"address": f"{address[0]}:{address[1]}", "problem": None}
        del scheduler
    wait_until_complete(session)
    assert scraped(address) is None

    ended = values(exposition.render(totals_of(session)).decode())
    counters = [key for key in last if key[0].startswith(FIGURES) and key[0].endswith(COUNTED)]
    assert len(counters) > 150
    for key in counters:
        assert ended[key] == last[key], key
    check_tables(session, ended)
    assert not any("secret" in str(key) for key in ended)


FIGURES = tuple(
    f"profilemate_{name}"
    for name in (
        *(
            "kv_cache_moved",
            "kv_cache_evictions",
            "kv_cache_never",
            "kv_cache_dup",
            "kv_cache_block_",
        ),
        *("prefix_cache", "request", "scheduler"),
    )
)
COUNTED = ("_total", "_bucket", "_sum", "_count")


def settled(address: Address, session: Path) -> Values:
    """A scrape that has all requests. Meanwhile counters never go down, and what is scraped is a
    ``totals.json`` that was there."""
    give_up = time.monotonic() + PATIENCE_SEC
    before: Values = {}
    while time.monotonic() < give_up:
        time.sleep(0.2)
        written = (session / TOTALS_FILE).exists() and values(
            exposition.render(totals_of(session)).decode()
        )
        found = scraped(address)
        if not found or not written:
            continue
        counted = {key for key in before if key[0].endswith(COUNTED)}
        assert all(found[key] >= before[key] for key in counted)
        before = found
        finished = sum(n for (name, _), n in found.items() if name == FINISHED)
        if finished == REQUESTS and found == written:
            return found
    raise AssertionError(f"not all requests were counted: {before}")


FINISHED = "profilemate_requests_finished_total"


def wait_until_complete(session: Path) -> None:
    give_up = time.monotonic() + PATIENCE_SEC
    while (session / "journal").exists():
        assert time.monotonic() < give_up
        time.sleep(0.1)


def check_tables(session: Path, found: Values) -> None:
    """The counters are sums over the tables."""
    moves = pl.read_csv(session / "kv_cache_allocations.csv")
    for event in ("allocate", "reuse", "cache", "free"):
        blocks = moves.filter(pl.col("event") == event)["num_blocks"].sum()
        assert total(found, "profilemate_kv_cache_moved_blocks_total", event=event) == blocks > 0
    evictions = pl.read_csv(session / "kv_cache_evictions.csv")
    assert total(found, "profilemate_kv_cache_evictions_total") == evictions.height > 0
    never = (evictions["reuse_count"] == 0).sum()
    assert total(found, "profilemate_kv_cache_never_reused_evictions_total") == never > 0
    lifetime = "profilemate_kv_cache_block_lifetime_seconds"
    assert total(found, f"{lifetime}_count") == evictions.height
    # The table's times are rounded to microseconds.
    assert total(found, f"{lifetime}_sum") == pytest.approx(
        evictions["lifetime_sec"].sum(), abs=evictions.height * 5.1e-7
    )
    lookups = pl.read_csv(session / "prefix_cache_lookups.csv")
    once = lookups.filter((pl.col("admitted") == 1) & pl.col("kind").is_in(["first", "retry"]))
    for name in ("query_tokens", "hit_tokens"):
        assert total(found, f"profilemate_prefix_cache_{name}_total") == once[name].sum() > 0
    steps = pl.read_csv(session / "scheduler_steps.csv")
    assert total(found, "profilemate_scheduler_steps_total") == steps["repeats"].sum()
    for kind in ("prefill", "decode"):
        scheduled = steps[f"{kind}_tokens"].sum()
        assert total(found, "profilemate_scheduler_tokens_total", kind=kind) == scheduled > 0
    preempted = steps["preempted_reqs"].sum()
    assert total(found, "profilemate_requests_preempted_total") == preempted
    lines = (session / "requests.jsonl").read_text().splitlines()
    assert total(found, "profilemate_request_duration_seconds_count") == len(lines) == REQUESTS
    assert total(found, "profilemate_requests_arrived_total") == REQUESTS


def test_a_second_session_on_one_port_is_recorded_without_metrics(
    model: Path, hooks_on: None, tmp_path: Path
) -> None:
    address = free_address()
    with hooks_only(tmp_path, collector=True), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PROFILING_METRICS", f"{address[0]}:{address[1]}")
        first = build_scheduler(model, 40)
        run(first, 0, 3)
        give_up = time.monotonic() + PATIENCE_SEC
        while scraped(address) is None:
            assert time.monotonic() < give_up
            time.sleep(0.1)
        second = build_scheduler(model, 40)
        run(second, 0, 3)
        sessions = sorted(tmp_path.glob("session_*"))
        assert len(sessions) == 2
        while not (sessions[1] / "metadata.json").exists():
            assert time.monotonic() < give_up
            time.sleep(0.1)
        shown = f"{address[0]}:{address[1]}"
        problem = f"{shown} cannot be used (Address already in use)"
        metadata = json.loads((sessions[1] / "metadata.json").read_bytes())
        assert metadata["metrics"] == {"address": shown, "problem": problem}
        log = (sessions[1] / "journal" / "collector.log").read_text()
        assert log == f"no metrics: {problem}; the session is recorded\n"
        del first, second
    for session in sessions:
        wait_until_complete(session)
        assert json.loads((session / "metadata.json").read_bytes())["complete"]
