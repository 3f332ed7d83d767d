# SPDX-License-Identifier: Apache-2.0
"""One look: each figure comes from its place, and damage is one line."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.errors import SessionError
from analysis.tables import run_totals
from profilemate.format.totals import TIMES_NS
from profilemate.live.reading import (
    Counters,
    Engine,
    Gpu,
    Histogram,
    Look,
    NoTotalsError,
    Pool,
    Process,
    Worker,
    look,
)
from tests.live.figures import totals, write
from tests.metrics.stories import totals_of


def test_each_figure_comes_from_its_place(tmp_path: Path) -> None:
    last = len(TIMES_NS) + 1
    assert look(write(tmp_path, totals(), written=1_700_000_000)) == Look(
        session_id="session_x",
        written_ns=1_700_000_000_000_000_000,
        until_ns=90_000_000_000,
        ended=False,
        versions={"vllm": "0.32.0"},
        engines=(
            Engine(
                engine=4,
                lost=("frees",),
                pools=(Pool(0, 100, 40, 25, 35, 60),),
                running=5,
                waiting=6,
                counters=Counters(
                    query_tokens=1300,
                    hit_tokens=650,
                    evictions=27,
                    regretted=5,
                    never_reused=8,
                    preemptions=16,
                    arrived=15,
                    ended=32,
                    steps=321,
                    idle_steps=18,
                    prefill_tokens=19,
                    decode_tokens=21,
                    unknown_evictions=4,
                ),
                lifetime=Histogram(TIMES_NS, tuple(range(1, last + 1))),
                idle=Histogram(TIMES_NS, tuple(range(101, last + 101))),
            ),
        ),
        # Dummy executions serve nobody, and eager ones have no padding.
        workers=(Worker(2, 100, 40, 640, 560),),
        gpus=(Gpu(3, 3 << 30, 1 << 30, None),),
        processes=(Process("engine", 4, 23, 24, 25, 26),),
        lag_ns=29,
        longest_lag_ns=30,
    )


def test_without_totals(tmp_path: Path) -> None:
    with pytest.raises(NoTotalsError):
        look(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is damaged"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("{}", "is damaged"),
        ('{"format_version": 2}', "format version 2; this profilemate reads 1"),
        (json.dumps(totals(until_ns=-1)), "is damaged"),
        (json.dumps(totals(until_ns=True)), "is damaged"),
        (json.dumps(totals(until_ns=1.5)), "is damaged"),
        (json.dumps(totals(until_ns=10**40)), "is damaged"),
        (json.dumps(totals(engines=None)), "is damaged"),
        ("9" * 5000, "is damaged"),
        ("\ufffd", "is damaged"),
    ],
)
def test_damage_is_one_line(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "totals.json").write_text(content)
    with pytest.raises(SessionError, match=says) as error:
        look(tmp_path)
    assert "\n" not in str(error.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "totals.json")
    with pytest.raises(SessionError, match="no plain file"):
        look(tmp_path)


def test_too_large_a_file_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "totals.json").open("wb") as file:
        file.truncate((16 << 20) + 1)
    with pytest.raises(SessionError, match="larger than 16 MiB"):
        look(tmp_path)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all values of the content."""
    yield path
    if isinstance(value, (dict, list)):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*path, key))


odd = st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.just([]) | st.just({})


@settings(max_examples=300)
@given(place=st.sampled_from(list(places(totals()))), value=odd)
def test_any_odd_value_is_read_or_damage(place: tuple[Any, ...], value: Any) -> None:
    content: Any = [copy.deepcopy(totals())]
    *way, last = (0, *place)
    inner = content
    for key in way:
        inner = inner[key]
    inner[last] = value
    with tempfile.TemporaryDirectory() as folder:
        session = write(Path(folder), content[0])
        with contextlib.suppress(SessionError):
            assert look(session).until_ns >= 0


def said_of(read: Callable[[Path], object], session: Path) -> str | None:
    """What is wrong with the session's totals.json, says who reads it; None where nothing is."""
    try:
        read(session)
    except SessionError as error:
        return str(error)
    return None


def is_first_of_its_list(place: tuple[Any, ...]) -> bool:
    return place[-2:-1] not in [("bounds",), ("counts",)] or not place[-1]


@pytest.mark.parametrize("place", list(filter(is_first_of_its_list, places(totals()))), ids=str)
def test_all_who_read_it_say_the_same_of_it(tmp_path: Path, place: tuple[Any, ...]) -> None:
    """Of each figure in turn, in place of which something else stands."""
    readers = (look, run_totals.read, totals_of)
    content: Any = [totals()]
    assert {said_of(read, write(tmp_path, content[0])) for read in readers} == {None}
    *way, last = (0, *place)
    inner = content
    for key in way:
        inner = inner[key]
    # A name that the totals do not settle may have any figure.
    is_figure = type(inner[last]) is int
    inner[last] = -1 if is_figure else ["odd", {}]
    session = write(tmp_path, content[0])
    said = {said_of(read, session) for read in readers}
    (one,) = said
    assert one is not None
    assert f"{tmp_path}/totals.json is damaged: " in one
    if is_figure and len(place) > 1:
        assert f"{place[-1] if isinstance(place[-1], str) else place[-2]}" in one


@pytest.mark.parametrize("bounds", [list(TIMES_NS[1:]), sorted(TIMES_NS, reverse=True)])
def test_a_histogram_whose_bounds_do_not_fit_is_named(tmp_path: Path, bounds: list[int]) -> None:
    content = totals()
    content["engines"][0]["blocks"]["idle"]["bounds"] = bounds
    said = said_of(look, write(tmp_path, content))
    assert said is not None
    assert "engines[0].blocks.idle.counts do not fit its bounds" in said


@pytest.mark.parametrize("key", sorted(totals()))
def test_a_key_that_is_missing_is_named(tmp_path: Path, key: str) -> None:
    content = totals()
    del content[key]
    said = said_of(look, write(tmp_path, content))
    assert said is not None
    assert f" {key} is missing" in said
