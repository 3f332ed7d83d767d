# SPDX-License-Identifier: Apache-2.0
"""The hottest prefixes: those of a recount of requests.jsonl, and of vLLM's own requests."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilemate.collector.requests import Finish, Request, row
from profilemate.format.segments import folder_name
from profilemate.live import prefixes
from profilemate.live.prefixes import SHOWN, WINDOW_SEC, Prefix, Prefixes
from profilemate.live.text import How, draw
from profilemate.live.watching import Watcher
from tests.live.running import Running, mixed, running
from tests.support.scheduler import tokens

BLOCK = 16
FILE = "requests.jsonl"


class Found(NamedTuple):
    """What a request found: a name for the prompt up to the end of each block."""

    prompt: Sequence[Hashable]
    admitted_sec: float


def stretches(requests: Iterable[Found]) -> set[tuple[Any, ...]]:
    """All stretches, block by block: the name of the last block, first and last token, requests,
    tokens saved, and when they were first and last admitted."""
    known = list(requests)
    who: dict[Hashable, frozenset[int]] = {}
    for number, request in enumerate(known):
        for name in request.prompt:
            who[name] = who.get(name, frozenset()) | {number}
    found = set()
    for request in known:
        begin = 0
        for place, name in enumerate(request.prompt):
            after = request.prompt[place + 1 : place + 2]
            if after and who[after[0]] == who[name]:
                continue
            times = [known[number].admitted_sec for number in who[name]]
            saved = len(times) * (place + 1 - begin) * BLOCK
            span = (round(min(times), 6), round(max(times), 6))
            found.add((name, begin * BLOCK, (place + 1) * BLOCK, len(times), saved, *span))
            begin = place + 1
    return found


def plain(prefix: Prefix) -> tuple[Any, ...]:
    assert (prefix.end_token - prefix.begin_token) == prefix.blocks * BLOCK
    span = (round(prefix.first_sec, 6), round(prefix.last_sec, 6))
    where = (prefix.content_id, prefix.begin_token, prefix.end_token)
    return (*where, prefix.found, prefix.saved_tokens, *span)


def shown_of(found: Sequence[Prefix], engine: int) -> list[tuple[Any, ...]]:
    return [plain(prefix) for prefix in found if prefix.engine == engine]


def check(found: Sequence[Prefix], engine: int, requests: Iterable[Found]) -> None:
    """Those that are shown are the ones that saved most, the most first."""
    shown, expected = shown_of(found, engine), stretches(requests)
    assert set(shown) <= expected
    saved = sorted((each[4] for each in expected), reverse=True)
    assert [each[4] for each in shown] == saved[:SHOWN]


class Ended(NamedTuple):
    """A request that has ended: the way that its prompt takes, and how much of it was found."""

    engine: int
    path: tuple[int, ...]
    hit_blocks: int
    queue_sec: float
    gap_sec: float


ENDED = st.builds(
    Ended,
    st.integers(0, 1),
    st.lists(st.integers(0, 1), max_size=7).map(tuple),
    st.integers(0, 7),
    st.integers(0, 5_000).map(lambda n: n / 1000),
    st.sampled_from([0.0, 0.001, 1.5, 19.0]),
)


def content(path: Sequence[int]) -> int:
    """The content id of a prompt up to the end of its last block."""
    return int("1" + "".join(map(str, path)), 2) * 1_000_003


def line(ended: Ended, number: int, finish_sec: float) -> str:
    """Its row, as the collector writes it."""
    arrived = max(0.0, finish_sec - 5.5)
    request = Request(
        number, f'{number}","engine":9,"hit_tokens":1 \\', "", 0, None, None, 0, [], 0
    )
    request.arrived = round(arrived * 1e9)
    request.admitted = request.arrived + round(ended.queue_sec * 1e9)
    request.hit_tokens = min(ended.hit_blocks, len(ended.path)) * BLOCK
    ids = [str(content(ended.path[: place + 1])) for place in range(len(ended.path))]
    finish = Finish("stop", len(ids) * BLOCK, 1, 1, round(finish_sec * 1e9))
    return row(request, finish, ended.engine, 0, BLOCK, ids, [], [], ())


def recount(lines: Iterable[Mapping[str, Any]], engine: int, since: float) -> list[Found]:
    """What the rows of requests.jsonl say that ended later."""
    return [
        Found(
            each["hash_ids"][: each["hit_tokens"] // each["block_size"]],
            each["timestamp"] / 1e3 + each["queue_sec"],
        )
        for each in lines
        if each["engine"] == engine and each["finish_sec"] > since
    ]


@settings(max_examples=60, deadline=None)
@given(
    looks=st.lists(st.lists(ENDED, max_size=8), min_size=1, max_size=6),
    idle=st.lists(st.sampled_from([0.0, 45.0, 61.0]), min_size=6, max_size=6),
)
def test_they_are_those_of_a_recount_of_the_table(
    looks: list[list[Ended]], idle: list[float]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, FILE)
        seen, now, lines = Prefixes(Path(folder)), 0.001, []
        for of_look, rest in zip(looks, idle, strict=False):
            for ended in of_look:
                now += ended.gap_sec
                lines.append(line(ended, len(lines), now))
            path.write_text("".join(f"{each}\n" for each in lines))
            now += rest
            seen.look(now)
            hottest = seen.hottest()
            since = max(0.0, now - WINDOW_SEC)
            assert hottest.seconds == pytest.approx(now - since)
            rows = [json.loads(each) for each in lines]
            counted = [recount(rows, engine, since) for engine in (0, 1)]
            assert hottest.requests == sum(bool(one.prompt) for each in counted for one in each)
            for engine in (0, 1):
                check(hottest.prefixes, engine, counted[engine])
        seen.close()


class Watched:
    """What vLLM itself says that requests found with the lookup that admitted them, and which have
    ended."""

    def __init__(self, live: Running, looked_up: Mapping[str, int]) -> None:
        self._live = live
        self._looked_up = looked_up
        self.known: dict[str, Any] = {}
        self.hits: dict[str, int] = {}

    @property
    def ended(self) -> set[str]:
        return self.known.keys() - self._live.scheduler.requests.keys()

    def step(self) -> None:
        scheduler = self._live.scheduler
        self.known.update(scheduler.requests)
        scheduled = scheduler.schedule
        scheduler.schedule = lambda: self._admit(scheduled())
        try:
            self._live.step()
        finally:
            scheduler.schedule = scheduled

    def _admit(self, output: Any) -> Any:
        for request in self._live.scheduler.running:
            self.hits.setdefault(request.request_id, self._looked_up[request.request_id])
        return output

    def found(self, name: str) -> list[tuple[int, ...]]:
        prompt, count = self.known[name].prompt_token_ids, self.hits[name] // BLOCK
        return [tuple(prompt[: (place + 1) * BLOCK]) for place in range(count)]


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What vLLM's last lookup of each request found, beneath the hooks."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    found: dict[str, int] = {}
    look_up = KVCacheManager.get_computed_blocks

    def instead(manager: Any, request: Any) -> Any:
        result = look_up(manager, request)
        found[request.request_id] = result[1]
        return result

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", instead)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_they_are_those_of_vllm_s_own_requests(
    model: Path, hooks_on: None, tmp_path: Path, looked_up: dict[str, int], seed: int
) -> None:
    """By tokens, not by content ids, through preemptions, in a minute and beyond it."""
    chance = random.Random(seed)
    with running(model, tmp_path, 24, max_num_seqs=5) as live:
        watched, told = Watched(live, looked_up), 0
        seen = Prefixes(live.folder)
        for number in range(90):
            mixed(live, chance, number)
            for _ in range(chance.randrange(1, 6)):
                watched.step()
            live.clock.tick(chance.choice([0, 0, 5_000_000]))
            if number % 10 == 9:
                live.write()
                told += _compare(live, watched, seen)
        assert told > 30
        assert any(request.num_preemptions for request in watched.known.values())


def _compare(live: Running, watched: Watched, seen: Prefixes) -> int:
    """Compare what is seen with what vLLM says; returns how many prefixes are shown."""
    text = (live.folder / FILE).read_text() if (live.folder / FILE).exists() else ""
    rows = {each["request_id"]: each for each in map(json.loads, text.splitlines())}
    assert rows.keys() == watched.ended
    until = json.loads((live.folder / "totals.json").read_bytes())["until_ns"] / 1e9
    seen.look(until)
    since = max(0.0, until - WINDOW_SEC)
    names = [name for name in watched.ended if rows[name]["finish_sec"] > since]
    # The content id stands for these very tokens.
    ids = {
        prefix: content_id
        for name in watched.ended
        for prefix, content_id in zip(watched.found(name), rows[name]["hash_ids"], strict=False)
    }
    assert len(set(ids.values())) == len(ids)
    expected = []
    for name in names:
        admitted = rows[name]["timestamp"] / 1e3 + rows[name]["queue_sec"]
        expected.append(Found([ids[prefix] for prefix in watched.found(name)], admitted))
    prefixes_now = seen.hottest().prefixes
    check(prefixes_now, 0, expected)
    return len(prefixes_now)


def test_a_minute_of_many_requests_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is bounded, and it says of which time it is."""
    lines = [line(Ended(0, (0, n % 2, 1, 1), 4, 0, 0), n, n + 1.0) for n in range(20)]
    (tmp_path / FILE).write_text("".join(f"{each}\n" for each in lines))
    rows = [json.loads(each) for each in lines]
    for name, most in (("MOST_HITS", 7), ("MOST_BLOCKS", 6)):
        with monkeypatch.context() as patch:
            patch.setattr(prefixes, name, most)
            seen = Prefixes(tmp_path)
            seen.look(20.0)
            hottest = seen.hottest()
        if name == "MOST_HITS":
            assert (hottest.requests, hottest.seconds) == (7, 7.0)
        else:
            # Both ways have 7 different blocks, so that only one request's may stay.
            assert (hottest.requests, hottest.seconds) == (1, 1.0)
        check(hottest.prefixes, 0, recount(rows, 0, 20.0 - hottest.seconds))


def test_rows_that_were_not_read_make_it_shorter(tmp_path: Path) -> None:
    lines = [line(Ended(0, (0, 1), 2, 0, 0), n, n + 1.0) for n in range(9)]
    path = tmp_path / FILE
    path.write_text("".join(f"{each}\n" for each in lines[:4]))
    half = Prefixes(tmp_path, first_bytes=len(lines[0]) * 5 // 2)
    half.look(4.0)
    # Of the two whole rows that it read the first one only says when they begin.
    assert (half.hottest().seconds, half.hottest().requests) == (1.0, 1)
    seen = Prefixes(tmp_path)
    seen.look(4.0)
    assert seen.hottest().requests == 4
    segments = tmp_path / "segments"
    cut(path, segments, 1, lines[4:6])
    seen.look(6.0)
    # What it has open is read to its end, wherever it went.
    assert (seen.hottest().seconds, seen.hottest().requests) == (6.0, 6)
    # Two cuts between two looks: there was a file that nobody saw.
    path.write_text("")
    cut(path, segments, 2, lines[6:7])
    path.write_text("")
    cut(path, segments, 3, lines[7:8])
    path.write_text("".join(f"{each}\n" for each in (*lines[7:9],)))
    seen.look(9.0)
    assert (seen.hottest().seconds, seen.hottest().requests) == (1.0, 1)
    cut(path, segments, 4, [])
    late = Prefixes(tmp_path)
    late.look(9.5)
    assert (late.hottest().seconds, late.hottest().requests) == (0.0, 0)


def cut(path: Path, segments: Path, number: int, last: Sequence[str]) -> None:
    """Write these rows and end the segment."""
    with path.open("a") as file:
        file.write("".join(f"{each}\n" for each in last))
    folder = segments / folder_name(number)
    folder.mkdir(parents=True)
    path.rename(folder / path.name)


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "{}",
        '{"timestamp":1,"input_length":2',
        line(Ended(0, (0,), 1, 0, 0), 1, 1.0).replace('"block_size":16', '"block_size":0'),
        line(Ended(0, (0,), 1, 0, 0), 1, 1.0).replace('"hit_tokens":16', '"hit_tokens":9999'),
        line(Ended(0, (0,), 1, 0, 0), 1, 1.0).replace("[2000006]", f"[{1 << 70}]"),
        line(Ended(0, (0,), 1, 0, 0), 1, 1.0).replace("[2000006]", "[,]"),
        line(Ended(0, (0,), 1, 0, 0), 1, 1.0).replace('"finish_sec":1.0', '"finish_sec":1.1.1'),
    ],
)
def test_a_damaged_row_is_left_out(tmp_path: Path, bad: str) -> None:
    good = line(Ended(0, (0,), 1, 0, 0), 1, 1.0)
    (tmp_path / FILE).write_text(f"{good}\n{bad}\n{good}\n")
    seen = Prefixes(tmp_path)
    seen.look(2.0)
    assert seen.hottest().requests == 2


def test_what_is_shown_and_how_it_is_sorted(live: Running) -> None:
    """Two families: one of many short hits, one of a long hit that came first."""
    live.add("long-0", tokens(1, 320), 1)
    live.step(2)
    live.add("long-1", [*tokens(1, 320), *tokens(2, 5)], 1)
    live.step(2)
    for number in range(6):
        live.add(f"short-{number}", [*tokens(7, 32), *tokens(20 + number, 20)], 1)
        live.step(2)
    live.write()
    view = Watcher(live.folder).view()

    def order(by: str) -> list[str]:
        lines = [each.plain for each in draw(view, How(width=80, is_ascii=True, prefixes_by=by))]
        (head,) = [n for n, each in enumerate(lines) if each.startswith("Hottest prefixes")]
        assert lines[head] == (
            f"Hottest prefixes  by {by}, of 6 requests that ended in the last 0 s"
        )
        return [each.split("  ")[0] for each in lines[head + 2 : head + 4]]

    assert order("tokens saved") == ["0 to 320", "0 to 32"]
    assert order("requests") == order("last hit") == ["0 to 32", "0 to 320"]
