# SPDX-License-Identifier: Apache-2.0
"""A load as a trace: a line of JSON for each request, with its time, its lengths and its ids.

Mooncake published its traces like this. ``vllm bench serve`` replays such a file as its data set
``timed_trace``: it makes random tokens, the same ones for the same id.
"""

from __future__ import annotations

import json
from typing import BinaryIO

from analysis.export.load import Load

MOONCAKE_TOKENS = 512
"""Tokens that an id of Mooncake's traces stands for."""


def write(load: Load, file: BinaryIO, *, whole_ms: bool = False) -> None:
    """Write the load.

    Args:
        load: the requests.
        file: where they go.
        whole_ms: times are whole milliseconds, as Mooncake's are; else they have microseconds.

    """
    rows = zip(
        load.at_sec.tolist(),
        load.input_tokens.tolist(),
        load.output_tokens.tolist(),
        load.ids,
        strict=True,
    )
    for at_sec, input_tokens, output_tokens, ids in rows:
        line = {
            "timestamp": round(at_sec * 1e3) if whole_ms else round(at_sec * 1e3, 3),
            "input_length": input_tokens,
            "output_length": output_tokens,
            "hash_ids": ids.tolist(),
            "block_size": load.block_size,
        }
        file.write(f"{json.dumps(line, separators=(',', ':'))}\n".encode())
