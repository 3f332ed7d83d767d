# SPDX-License-Identifier: Apache-2.0
"""Head room of one session against what vLLM's scheduler really does on other settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from analysis import open_session
from analysis.headroom import demand, head_room, lives, together
from analysis.headroom.demand import Demand
from analysis.headroom.head_room import Setting
from analysis.headroom.together import Together
from analysis.prefix import prompts, reuse, stretches
from analysis.tables import facts
from analysis.tables.session import Session
from tests.headroom.loads import USUAL
from tests.whatif.truth import Truth

pytestmark = pytest.mark.usefixtures("hooks_on")

LOAD = replace(USUAL, requests=300)
PLACES = 256
ROOMY = 8_001


def read(session: Session) -> tuple[Together, Demand]:
    """What the session's requests hold together, and how many were there at once."""
    asked = prompts.read(session)
    uses = reuse.uses(asked.without_contents(), stretches.in_common(asked))
    known = lives.read(session, uses, 16, facts.read(session).scheduler)
    return together.draw(known, 100), demand.measure(session)


@pytest.fixture(scope="module")
def roomy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return LOAD.run(model, tmp_path_factory.mktemp("roomy") / "s", ROOMY, PLACES)


@pytest.fixture(scope="module")
def recorded(roomy: Truth) -> tuple[Together, Demand]:
    return read(open_session(roomy.session))


@pytest.mark.parametrize(
    ("blocks", "places", "preemptions"),
    [
        # 20 take the pool's size on average, 26 half of the time, and there are always as many.
        (401, 20, (60, 100)),
        (501, 26, (50, 100)),
        # As many as come: one in five waits.
        (701, PLACES, (45, 90)),
    ],
)
def test_what_other_settings_would_have_done(
    model: Path,
    tmp_path: Path,
    recorded: tuple[Together, Demand],
    blocks: int,
    places: int,
    preemptions: tuple[int, int],
) -> None:
    """The estimate is within a quarter of what the scheduler does."""
    truth = LOAD.run(model, tmp_path / "s", blocks, places)
    least, most = preemptions
    assert least <= truth.preemptions <= most
    found = head_room.setting(*recorded, blocks - 1, places)
    assert found.preemptions == pytest.approx(truth.preemptions, rel=0.25)
    assert found.waiting_share == pytest.approx(waited(truth), abs=0.15)


def test_a_roomy_pool_preempts_nobody(roomy: Truth, recorded: tuple[Together, Demand]) -> None:
    assert roomy.preemptions == 0
    found: Setting = head_room.setting(*recorded, ROOMY - 1, PLACES)
    assert (found.preemptions, found.waiting_share) == (0, 0)


def test_at_what_fits_hardly_anybody_is_preempted(
    model: Path, tmp_path: Path, recorded: tuple[Together, Demand]
) -> None:
    """With as many places as fit, one request in a hundred is preempted at most; with as many as
    fit half of the time, far more are."""
    drawn, _ = recorded
    fit, half = drawn.fit(500, 0.01), drawn.at_once(500)
    assert fit is not None
    assert fit < half
    calm = LOAD.run(model, tmp_path / "calm", 501, fit)
    crowded = LOAD.run(model, tmp_path / "crowded", 501, half)
    assert calm.preemptions <= 0.01 * LOAD.requests
    assert crowded.preemptions >= 0.2 * LOAD.requests


def waited(truth: Truth) -> float:
    """The share of the requests that were not admitted by the next step or the one after it."""
    steps = 0.03
    return (
        open_session(truth.session)
        .collect("requests", lambda table: table.select((pl.col("queue_sec") > steps).mean()))
        .item()
    )
