# SPDX-License-Identifier: Apache-2.0
"""A session of the real scheduler that goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.running import Running, running


@pytest.fixture
def live(model: Path, hooks_on: None, tmp_path: Path) -> Iterator[Running]:
    """A session with 40 blocks that requests can hold, and at most four requests at once."""
    with running(model, tmp_path, 40, max_num_seqs=4) as found:
        yield found
