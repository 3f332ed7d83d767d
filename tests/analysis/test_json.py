# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session, summarize
from analysis.renderers import json as renderer
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import on_the_gpu
from tests.analysis.moe import with_experts
from tests.analysis.stories import swept
from tests.analysis.test_preemptions import victim_of_another
from tests.analysis.test_prefix_cache import eight_alike
from tests.analysis.test_rent import two_that_share
from tests.analysis.test_text import busy
from tests.analysis.timed import with_gpu_time

DOCUMENTATION = Path(__file__).parent.parent.parent / "docs" / "json.md"


def json_of(session: SessionBuilder) -> Any:
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    rendered = renderer.render(summarize(open_session(session.folder)))
    return json.loads(rendered, parse_constant=no_constant)


def test_figures_stand_under_their_keys(session: SessionBuilder) -> None:
    eight_alike(session)
    session.usage((0, 50), (5, 0))
    session.evictions({"lifetime_sec": 3, "idle_sec": 2})
    summary = json_of(session)
    assert summary["summary_version"] == 1
    assert summary["session"]["state"] == "complete"
    assert summary["session"]["duration_sec"] == 10
    assert summary["facts"]["max_concurrency"] == 1.616
    assert summary["usage"]["combined"]["mean_pct"] == 25
    assert summary["usage"]["pools"][0]["bands"]["from_40_to_60"] == 0.5
    assert summary["lifetimes"]["lifetime"]["p99_sec"] == 3
    assert summary["evictions"]["by_reason"]["reallocated"]["blocks"] == 1
    assert summary["prefix_cache"]["true"]["token_rate"] == 7056 / 8192
    assert summary["prefix_cache"]["true"]["request_rate"] == 7 / 8
    assert summary["prefix_cache"]["vllm"]["token_rate"] == 7056 / 8192


def test_what_is_not_known_is_null(session: SessionBuilder) -> None:
    session.evictions({"lifetime_sec": "", "idle_sec": ""})
    (session.folder / "metadata.json").unlink()
    summary = json_of(session)
    assert summary["usage"]["combined"] is None
    assert summary["prefix_cache"]["true"]["token_rate"] is None
    assert summary["lifetimes"]["lifetime"]["mean_sec"] is None
    assert summary["lifetimes"]["idle"]["max_sec"] is None
    assert summary["facts"]["model"] is None


def test_a_session_that_is_not_complete_says_so(session: SessionBuilder) -> None:
    session.metadata(complete=False, ended_at=None)
    summary = json_of(session)["session"]
    assert summary["state"] == "cut off"
    assert "journal/ is missing" in summary["note"]


@pytest.mark.parametrize(
    "story",
    [busy, swept, two_that_share, victim_of_another, on_the_gpu, with_experts, with_gpu_time],
)
def test_every_key_is_documented(
    session: SessionBuilder, story: Callable[[SessionBuilder], None]
) -> None:
    story(session)
    names = set(re.findall(r"`([\w.\[\]]+)`", DOCUMENTATION.read_text()))
    # Of an empty list there is the list's own name alone.
    names |= {name[: found.start()] for name in names for found in re.finditer(r"\[\]", name)}

    def documented(path: str) -> bool:
        """Whether the path is named, or is a shape's key at a place that has this shape."""
        dots = [position for position, char in enumerate(path) if char == "."]
        return path in names or any(
            path[:dot] in names and documented(path[dot + 1 :]) for dot in dots
        )

    assert [path for path in keys(json_of(session)) if not documented(path)] == []


def keys(value: Any, path: str = "") -> Iterator[str]:
    """The dotted names of all figures; entries of lists and names out of the data are ``[]``."""
    names_from_data = (
        "by_reason",
        "by_origin",
        "by_engine",
        "by_group",
        "takers",
        "facts.versions",
    )
    if isinstance(value, dict) and value:
        for name, item in value.items():
            inner = "[]" if path.endswith(names_from_data) else f".{name}"
            yield from keys(item, (path + inner).removeprefix("."))
    elif isinstance(value, list) and value:
        for item in value:
            yield from keys(item, f"{path}[]")
    else:
        yield path
