# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs and GPU memory in words, with figures as large as they get."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from analysis.wording.formats import ranges
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import SETUP, captured, eager, full, on_the_gpu, ran, replayed, set_up
from tests.analysis.test_memory import RITUAL
from tests.analysis.test_text import one_line, text_of

MANY = 10**8
LARGE = 2**31 - 1


def enormous(session: SessionBuilder) -> None:
    """Twelve workers, each with graphs, batches and memory of more than there will be."""
    on_the_gpu(session)
    workers = [{**RITUAL, "worker": rank, "kv_bytes": 10**11 + rank * 10**10} for rank in range(12)]
    set_up(
        session,
        memory={**workers[0], "workers": workers},
        groups=[{"kind": "FullAttentionSpec", "block_size": 16, "bytes_per_block": 512}],
        cuda_graphs={**SETUP, "attention_backends": ["FLASH_ATTENTION_" * 9] * 3},
        gpu_memory={"interval_sec": 1, "problem": "no such GPU " * 20},
    )
    adapted = full(MANY) | {"part": "encoder", "has_lora": 1}
    for rank in range(12):
        graph = adapted | {"memory_bytes": 2**40, "num_graphs": MANY, "duration_sec": MANY}
        captured(session, [graph, graph | {"num_tokens": MANY + 1}], worker=rank)
        replayed(session, adapted, LARGE, worker=rank)
        ran(session, full(LARGE), MANY + rank, 3 + rank, worker=rank, launch_us=1e9, gpu_us=1e9)
        ran(session, eager(LARGE), LARGE, 3, worker=rank)
        sample = {"timestamp_sec": MANY, "gpu": rank, "used_bytes": 2**49, "free_bytes": 2**49}
        session.rows("gpu_memory.csv", sample)


def test_nothing_is_wider_than_80_columns(session: SessionBuilder) -> None:
    enormous(session)
    # The session's folder is a line of its own.
    lines = text_of(session).splitlines()[2:]
    assert [line for line in lines if len(line) > 80 or not line.isascii()] == []


def test_what_is_left_out_is_said(session: SessionBuilder) -> None:
    enormous(session)
    text = one_line(text_of(session))
    assert "4 more workers have a larger share in graphs." in text
    assert "and 3 more workers" in text
    assert "4 more GPUs had more free." in text
    assert "Not all was sampled: no such GPU" in text
    assert "FULL 100,000,000 ... 25,769,803,764" in text


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2, 4], "1, 2, 4"),
        ([1, 2, 3], "1, 2, 3"),
        ([1, 2, 3, 4], "1 to 4"),
        (
            [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)],
            "1, 2, 4, 8 to 256 by 8, 272 to 512 by 16",
        ),
        ([1000, 2000, 3000, 4000, 4001], "1,000 to 4,000 by 1,000, 4,001"),
    ],
)
def test_sizes_at_an_even_distance_are_one(numbers: Sequence[int], words: str) -> None:
    assert ranges(numbers) == words
