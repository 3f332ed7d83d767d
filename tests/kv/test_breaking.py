# SPDX-License-Identifier: Apache-2.0
"""A hook that fails at any of its lines: vLLM does the same, and the session says what it lacks.

Here some lines stand for all; ``python -m attacks raising`` takes each.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kv.breaking import broken, is_hook, places_of, run
from tests.support.faults import Lines

pytestmark = pytest.mark.usefixtures("hooks_on")


@pytest.mark.parametrize(
    ("error", "tabled"), [(RuntimeError, True), (MemoryError, True), (KeyError, False)]
)
def test_a_hook_that_fails_at_a_line(model: Path, error: type[Exception], tabled: bool) -> None:
    whole, places = places_of(model, tabled=tabled)
    assert whole.complete
    assert len(places) > 400
    for place in places[len(error.__name__) % 40 :: 40]:
        lines = Lines(is_hook, error, place=place)
        ran = run(model, lines, tabled=tabled)
        assert lines.raised == place
        assert not list(broken(whole, ran)), place


def test_an_interrupt_is_vllms(model: Path) -> None:
    """Who presses Ctrl-C stops vLLM, also where it is a hook that runs just then."""
    _, places = places_of(model)
    (place,) = [place for place in places if place[0].endswith("/kv/steps.py")][-1:]
    with pytest.raises(KeyboardInterrupt):
        run(model, Lines(is_hook, KeyboardInterrupt, place=place))
