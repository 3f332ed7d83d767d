# SPDX-License-Identifier: Apache-2.0
"""Sessions of a model with experts."""

from __future__ import annotations

from typing import Any

from tests.analysis.builder import SessionBuilder

COUNTED = {"layers": [0, 1], "experts": 4, "chosen": 2, "pairs": True, "problem": None}


def counted(session: SessionBuilder, *rows: tuple[float, int, int, str], **more: Any) -> None:
    """Rows of (time, layer, tokens, tokens by expert)."""
    session.rows(
        "moe_experts.csv",
        *(
            {
                "timestamp_sec": time,
                "since_sec": time - 1,
                "layer": layer,
                "tokens": tokens,
                "by_expert": by_expert,
                **more,
            }
            for time, layer, tokens, by_expert in rows
        ),
    )


def paired(session: SessionBuilder, time: float, pair: tuple[int, ...], **more: Any) -> None:
    """A pair of (layer, both experts, tokens of both, expected)."""
    layer, one, other, tokens, expected = pair
    session.rows(
        "moe_pairs.csv",
        {
            "timestamp_sec": time,
            "layer": layer,
            "expert": one,
            "other_expert": other,
            "routed_tokens": 100,
            "pair_tokens": tokens,
            "expected_tokens": expected,
            "expert_tokens": 50,
            "other_expert_tokens": 60,
            **more,
        },
    )


def with_experts(session: SessionBuilder) -> None:
    """In 10 s, two layers of four experts."""
    session.metadata(experts=COUNTED)
    counted(session, (1, 0, 5, "4 3 2 1"), (1, 1, 5, "5 5 0 0"))
    counted(session, (9, 0, 5, "4 3 2 1"), (9, 1, 5, "0 5 5 0"))
    paired(session, 1, (0, 0, 1, 30, 10))
