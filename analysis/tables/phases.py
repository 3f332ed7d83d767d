# SPDX-License-Identifier: Apache-2.0
"""What does a step compute: prompts, answers, or both?"""

from __future__ import annotations

import polars as pl

PHASES = ("prefill", "mixed", "decode")
"""Tokens of prompts alone, tokens of prompts and of answers, tokens of answers alone."""

PHASE = (
    pl.when(pl.col("decode_tokens") == 0)
    .then(pl.lit("prefill"))
    .when(pl.col("prefill_tokens") == 0)
    .then(pl.lit("decode"))
    .otherwise(pl.lit("mixed"))
)
"""The phase of a row with tokens of prompts and of answers."""
