# SPDX-License-Identifier: Apache-2.0
"""What benchmarks say, as vLLM prints it, and why commands fail, as they do."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from profilemate.sweep.benchmarks import Said, batch_size, option, said
from profilemate.sweep.logs import tail, telling_line

THROUGHPUT = """\
Throughput: 1.00 requests/s, 2.00 total tokens/s, 1.50 output tokens/s
Rendering prompts: 100%|##########| 24/24 [00:00<00:00, 3120.16it/s]
Throughput: 26.88 requests/s, 3459.08 total tokens/s, 860.01 output tokens/s
Total num prompt tokens:  2321
Total num output tokens:  768
"""
SERVE = """\
============ Serving Benchmark Result ============
Successful requests:                     40
Benchmark duration (s):                  5.20
Total input tokens:                      13120
Request throughput (req/s):              7.69
Output token throughput (tok/s):         307.55
Peak output token throughput (tok/s):    480.00
Total {token} throughput (tok/s):        2829.46
Mean TTFT (ms):                          101.77
"""
LATENCY = """\
Avg latency: 0.5215431 seconds
10% percentile latency: 0.5 seconds
"""


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (THROUGHPUT, Said("output", 26.88, 3459.08, 860.01)),
        ("Throughput: 1.5 requests/s, 20 total tokens/s\n", Said("output", 1.5, 20.0, None)),
        (SERVE.format(token="token"), Said("output", 7.69, 2829.46, 307.55)),
        (SERVE.format(token="Token"), Said("output", 7.69, 2829.46, 307.55)),
        (LATENCY, Said("output", latency_sec=0.5215431)),
        ("nothing of the kind", None),
    ],
)
def test_the_output_is_read(log: str, found: Said | None) -> None:
    assert said(log, [], 0) == found


def test_json_is_read_where_the_output_says_nothing(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(
        json.dumps({"elapsed_time": 2.0, "requests_per_second": 4.5, "tokens_per_second": 99.0})
    )
    words = ["vllm", "bench", "throughput", f"--output_json={path}"]
    assert said("", words, 0) == Said("json", 4.5, 99.0)
    assert said(THROUGHPUT, words, 0) == Said("output", 26.88, 3459.08, 860.01)
    os.utime(path, (100, 100))
    assert said("", words, 101) is None, "it is of a run before"
    path.write_text(
        json.dumps({"request_throughput": 1, "output_throughput": 2, "total_token_throughput": 3.5})
    )
    words = ["sh", "x", "--result-dir", str(tmp_path), "--result-filename", path.name]
    assert said("", words, 0) == Said("json", 1.0, 3.5, 2.0)
    path.write_text(json.dumps({"avg_latency": 0.25, "latencies": [0.25]}))
    assert said("", words, 0) == Said("json", latency_sec=0.25)


@pytest.mark.parametrize("content", ["", "[]", '{"tokens_per_second": "many"}', "[" * 100_000])
def test_json_that_is_none_says_nothing(content: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(content)
    assert said("", ["--output-json", str(path)], 0) is None


def test_the_last_of_a_flag_counts() -> None:
    words = ["x", "--batch-size", "4", "--batch_size=16", "--seed"]
    assert option(words, "batch-size") == "16"
    assert option(words, "seed") is None
    assert (batch_size(words), batch_size([])) == (16, 8)


ENGINE_FAILED = """\
INFO 11-28 12:00:00 [core.py:1] Initializing a V1 LLM engine
(EngineCore pid=77) ERROR 11-28 12:00:01 [core.py:9] EngineCore failed to start.
(EngineCore pid=77) ERROR 11-28 12:00:01 [core.py:9] ValueError: To serve at least one request \
with the model's max seq len (4096), 2.0 GiB KV cache is needed
(EngineCore pid=77) ERROR 11-28 12:00:01 [core.py:9]     raise e
Traceback (most recent call last):
  File "vllm", line 8, in <module>
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
/usr/lib/python3.11/multiprocessing/resource_tracker.py:254: UserWarning: leaked
"""


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            ENGINE_FAILED,
            (
                "ValueError: To serve at least one request with the model's max seq len (4096), "
                "2.0 GiB KV cache is needed"
            ),
        ),
        (
            "usage: x\nvllm: error: unrecognized arguments: --blok-size 16\n",
            "vllm: error: unrecognized arguments: --blok-size 16",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate: 2 GiB\nbye\n",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate: 2 GiB",
        ),
        ("sh: 1: vllm: not found\n", "sh: 1: vllm: not found"),
        ("first\nlast\n\n", "last"),
        ("", None),
        ("x" * 1000, "x" * 297 + "..."),
    ],
)
def test_the_line_that_says_why(log: str, line: str | None) -> None:
    assert telling_line(log) == line


def test_a_log_is_read_without_colours_and_redrawn_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\x1b[31mred\x1b[0m\n10%\r100%\n\xff\n")
    assert tail(path) == "red\n10%\n100%\n\ufffd\n"
    assert tail(tmp_path / "none") == ""
