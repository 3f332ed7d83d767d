# SPDX-License-Identifier: Apache-2.0
"""Sessions whose steps were timed on the GPU."""

from __future__ import annotations

from typing import Any

from tests.analysis.builder import SessionBuilder


def timed(session: SessionBuilder, *rows: tuple[float, int, int, Any], **more: Any) -> None:
    """Rows of (time, prefill tokens, decode tokens, microseconds on the GPU)."""
    session.rows(
        "gpu_steps.csv",
        *(
            {
                "timestamp_sec": time,
                "prefill_tokens": prefill,
                "decode_tokens": decode,
                "prefill_reqs": int(prefill > 0),
                "decode_reqs": decode,
                "gpu_us": gpu_us,
                **more,
            }
            for time, prefill, decode, gpu_us in rows
        ),
    )


def with_gpu_time(session: SessionBuilder) -> None:
    """In 10 s: two steps of prompts, one of both, three of answers, of which one has no time."""
    session.metadata(phases={"workers": [0], "problem": None})
    timed(session, (1, 1000, 0, 400_000), encoder_items=2, encoder_us=100_000)
    timed(session, (2, 500, 0, 200_000), (3, 400, 4, 300_000))
    timed(session, (4, 0, 4, 20_000), (5, 0, 4, 40_000), (6, 0, 2, ""))
    session.rows(
        "scheduler_steps.csv",
        *(
            {
                "timestamp_sec": time,
                "scheduled_tokens": prefill + decode,
                "prefill_tokens": prefill,
                "decode_tokens": decode,
                "scheduled_reqs": decode + (prefill > 0),
                "encoder_items": items,
                "encoder_tokens": 300 * items,
            }
            for time, prefill, decode, items in (
                (1, 1000, 0, 2),
                (2, 500, 0, 0),
                (3, 400, 4, 0),
                (4, 0, 4, 0),
                (5, 0, 4, 0),
                (6, 0, 2, 0),
            )
        ),
    )
