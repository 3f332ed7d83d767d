# SPDX-License-Identifier: Apache-2.0
"""Sessions that were cut into segments say what they said before."""

from __future__ import annotations

import json
import math
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import booleans, floats, lists

from analysis import open_session, summarize
from analysis.renderers import json as as_json
from benchmarks import large_session
from tests.analysis.builder import SessionBuilder
from tests.analysis.stories import swept
from tests.report import generated
from tests.support import segments

Figures = dict[str, Any]


def said(folder: Path, **options: Any) -> Figures:
    """All figures of a session, without its folder's name."""
    found: Figures = json.loads(as_json.render(summarize(open_session(folder, **options))))
    del found["session"]["directory"]
    return found


def differences(one: Any, other: Any, at: str = "") -> list[str]:
    """What differs, by its key. Polars adds floats up in any order, so their last digits may."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = sorted({*one, *other})
        parts = [differences(one.get(key), other.get(key), f"{at}.{key}") for key in keys]
        return [*chain(*parts)]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [*chain(*(differences(*pair, f"{at}[{number}]") for number, pair in pairs))]
    if isinstance(one, float) and isinstance(other, float):
        is_same = math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    else:
        is_same = one == other
    return [] if is_same else [f"{at}: {one!r} and {other!r}"]


class Stories:
    """Sessions of several kinds, and what is said of them."""

    def __init__(self, base: Path) -> None:
        swept(SessionBuilder(base / "swept"))
        generated.write(base / "busy", 100)
        large_session.write(base / "large", 2_000)
        self.said = {folder: said(folder) for folder in sorted(base.iterdir())}


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Stories:
    return Stories(tmp_path_factory.mktemp("stories"))


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shares=lists(floats(0, 1), max_size=4), closing=booleans())
def test_wherever_it_is_cut_it_says_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    stories: Stories,
    shares: list[float],
    closing: bool,
) -> None:
    base = tmp_path_factory.mktemp("cut")
    for folder, expected in stories.said.items():
        copy = shutil.copytree(folder, base / folder.name)
        cuts = [segments.by_share(copy, share) for share in sorted(shares)]
        segments.split(copy, *cuts, closing=closing)
        assert differences(said(copy), expected) == []
