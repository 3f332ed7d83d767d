# SPDX-License-Identifier: Apache-2.0
"""What a step takes, out of steps whose rule is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from analysis.tables.session import open_session
from analysis.whatif import arrivals, step_time
from analysis.whatif.clock import StepTime
from analysis.whatif.workload import of_session
from tests.analysis.builder import SessionBuilder

Row = dict[str, float]


def steps(*kinds: tuple[int, int, int], takes: StepTime, lag: int = 0) -> list[Row]:
    """Rows of steps of these (prefill tokens, decode tokens, requests) that follow each other.

    With ``lag`` the time to the next step is that of the step so many before.
    """
    rows, now = [], 1.0
    for number, (prefill, decode, requests) in enumerate(kinds):
        rows.append(
            {
                "timestamp_sec": round(now, 6),
                "step": number + 1,
                "running_reqs": requests,
                "waiting_reqs": 0,
                "scheduled_tokens": prefill + decode,
                "prefill_tokens": prefill,
                "decode_tokens": decode,
                "scheduled_reqs": requests,
                "finished_reqs": 0,
            }
        )
        now += takes.seconds(*kinds[max(0, number - lag)])
    return rows


RULE = StepTime(0.01, 1e-4, 2e-3, 5e-4)
KINDS = [(100, 0, 1), (50, 3, 5), (0, 4, 4), (700, 1, 3), (0, 9, 9), (30, 30, 31), (0, 2, 2)] * 3


def session(folder: Path, rows: list[Row]) -> SessionBuilder:
    builder = SessionBuilder(folder)
    builder.rows("scheduler_steps.csv", *rows)
    return builder


def test_a_rule_is_found(tmp_path: Path) -> None:
    built = session(tmp_path, steps(*KINDS, takes=RULE))
    found = step_time.fit(open_session(built.folder))
    assert found is not None
    assert found.constant_sec == pytest.approx(0.01, abs=2e-6)
    assert found.prefill_token_sec == pytest.approx(1e-4, rel=1e-3)
    assert found.decode_token_sec == pytest.approx(2e-3, rel=1e-2)
    assert found.request_sec == pytest.approx(5e-4, rel=3e-2)
    # The last one's end is not known.
    assert found.steps == len(KINDS) - 1
    expected = np.mean([RULE.seconds(*kind) for kind in KINDS[:-1]])
    assert found.mean_sec == pytest.approx(expected, abs=1e-6)
    assert found.rms_error_sec == pytest.approx(0, abs=2e-6)


def test_no_term_is_negative(tmp_path: Path) -> None:
    """Steps that are the shorter the more they decode: their mean is the best that is left."""
    built = session(tmp_path, steps(*KINDS, takes=StepTime(0.1, 0.0, -2e-3, 0.0)))
    found = step_time.fit(open_session(built.folder))
    assert found is not None
    terms = (found.prefill_token_sec, found.decode_token_sec, found.request_sec)
    assert min(found.constant_sec, *terms) >= 0
    assert found.decode_token_sec == 0
    assert found.rms_error_sec > 0.01


def test_waiting_for_requests_is_no_step(tmp_path: Path) -> None:
    """After the fourth step nothing is left, and the next request comes a minute later. A step
    that scheduled nothing counts as none."""
    rows = steps(*KINDS, takes=RULE)
    rows[4]["finished_reqs"] = rows[3]["running_reqs"]
    for row in rows[4:]:
        row["timestamp_sec"] = round(row["timestamp_sec"] + 60, 6)
    empty = rows[8] | {"scheduled_tokens": 0, "prefill_tokens": 0, "decode_tokens": 0}
    rows[8] = empty | {"scheduled_reqs": 0, "repeats": 1}
    found = step_time.fit(open_session(session(tmp_path, rows).folder))
    assert found is not None
    assert found.steps == len(KINDS) - 3
    assert found.mean_sec < 0.1
    assert found.rms_error_sec == pytest.approx(0, abs=2e-6)


def test_engines_are_kept_apart(tmp_path: Path) -> None:
    """The steps of two engines between each other."""
    one, other = steps(*KINDS, takes=RULE), steps(*KINDS[::-1], takes=RULE)
    rows = one + [row | {"engine": 1} for row in other]
    rows.sort(key=lambda row: row["timestamp_sec"])
    found = step_time.fit(open_session(session(tmp_path, rows).folder))
    assert found is not None
    assert found.steps == 2 * len(KINDS) - 2
    assert found.rms_error_sec == pytest.approx(0, abs=2e-6)


def test_with_two_steps_in_flight_a_step_waits_for_the_one_before(tmp_path: Path) -> None:
    built = session(tmp_path, steps(*KINDS, takes=RULE, lag=1))
    found = step_time.fit(open_session(built.folder), batches=2)
    assert found is not None
    assert found.rms_error_sec == pytest.approx(0, abs=2e-6)
    plain = step_time.fit(open_session(built.folder))
    assert plain is not None
    assert plain.rms_error_sec > 1e-3


def test_too_few_steps_say_nothing(tmp_path: Path) -> None:
    built = session(tmp_path, steps(*KINDS[:2], takes=RULE))
    assert step_time.fit(open_session(built.folder)) is None


def test_arrivals_lie_within_the_step_in_which_they_came(tmp_path: Path) -> None:
    """Steps of 0.1 s at 1.0, 1.1, 1.2 s, after which nothing is left; the next is at 3.0 s.

    The first two requests were there before any step. The third was seen at 1.1 s, so it came
    after 1.0 s; the fourth and the fifth came to an idle engine, which took over both at once.
    """
    steady = StepTime(0.1)
    rows = steps((8, 0, 1), (0, 1, 1), (0, 1, 1), (8, 0, 2), takes=steady)
    rows[3] |= {"timestamp_sec": 3.0, "finished_reqs": 1}
    built = session(tmp_path, rows)
    built.requests(
        *(
            {
                "timestamp": 1000 * seen,
                "input_length": 20,
                "output_length": 2,
                "hash_ids": [number, 100 + number],
                "block_size": 16,
                "request_id": f"r{number}",
                "engine": 0,
            }
            for number, seen in enumerate((0.98, 0.99, 1.09, 2.998, 2.999))
        )
    )
    opened = open_session(built.folder)
    found = arrivals.estimated(opened, of_session(opened), steady)
    assert found.arrival_sec.tolist() == pytest.approx([0.98, 0.98, 1.045, 2.998, 2.998])
