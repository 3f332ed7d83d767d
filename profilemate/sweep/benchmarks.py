# SPDX-License-Identifier: Apache-2.0
"""What did a benchmark of vLLM's measure, by its output or by the JSON that it wrote?

The words are those of ``vllm bench throughput``, ``serve`` and ``latency``; releases differ in
capitals. Of several benchmarks in one log the last one counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from analysis.tables.metadata import number

_NUMBER = r"\s*([0-9.]+(?:e[+-]?\d+)?)"
_THROUGHPUT = re.compile(
    rf"Throughput:{_NUMBER} requests/s,{_NUMBER} total tokens/s(?:,{_NUMBER} output tokens/s)?"
)
_SERVE = {
    name: re.compile(rf"^{words}:{_NUMBER}", re.IGNORECASE | re.MULTILINE)
    for name, words in {
        "requests_per_sec": r"Request throughput \(req/s\)",
        "output_tokens_per_sec": r"Output token throughput \(tok/s\)",
        "total_tokens_per_sec": r"Total token throughput \(tok/s\)",
    }.items()
}
_LATENCY = re.compile(rf"Avg latency:{_NUMBER} seconds")

_JSON = {
    "requests_per_sec": ("requests_per_second", "request_throughput"),
    "output_tokens_per_sec": ("output_throughput",),
    "total_tokens_per_sec": ("tokens_per_second", "total_token_throughput"),
    "latency_sec": ("avg_latency",),
}
"""The keys of each figure in the JSON of ``throughput``, ``serve`` and ``latency``."""


@dataclass(frozen=True)
class Said:
    """What a benchmark measured, None where it does not say. ``source``: ``output`` or ``json``.

    ``latency_sec``: how long one batch took, on average; only ``vllm bench latency`` says.
    """

    source: str
    requests_per_sec: float | None = None
    total_tokens_per_sec: float | None = None
    output_tokens_per_sec: float | None = None
    latency_sec: float | None = None


def said(log: str, words: Sequence[str], began: float) -> Said | None:
    """The figures of the benchmark with this log and command; None where it gives none.

    ``began``: seconds since 1970; an older JSON file is another run's.
    """
    return _in_log(log) or _in_json(words, began)


def batch_size(words: Sequence[str]) -> int:
    """The prompts in a batch of ``vllm bench latency``: 8, unless its command says otherwise."""
    given = option(words, "batch-size")
    return int(given) if given and given.isascii() and given.isdigit() else 8


def option(words: Sequence[str], name: str) -> str | None:
    """The value of a flag in a command; the last one counts, as for argparse."""
    found = None
    for at, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("_", "-") == name:
            found = value if equals else next(iter(words[at + 1 : at + 2]), None)
    return found


def _in_log(log: str) -> Said | None:
    throughputs = [*_THROUGHPUT.finditer(log)]
    if throughputs:
        requests, total, output = throughputs[-1].groups()
        return Said("output", float(requests), float(total), float(output) if output else None)
    latencies = [*_LATENCY.finditer(log)]
    if latencies:
        return Said("output", latency_sec=float(latencies[-1][1]))
    served = {name: [*pattern.finditer(log)] for name, pattern in _SERVE.items()}
    if any(served.values()):
        return Said("output", **{name: float(m[-1][1]) for name, m in served.items() if m})
    return None


def _in_json(words: Sequence[str], began: float) -> Said | None:
    path = option(words, "output-json")
    file = option(words, "result-filename")
    if path is None and file is not None:
        path = str(Path(option(words, "result-dir") or "") / file)
    if path is None:
        return None
    try:
        if Path(path).stat().st_mtime < began:
            return None
        measured: Any = json.loads(Path(path).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(measured, dict):
        return None
    found = {
        name: next((number(measured[key]) for key in keys if key in measured), None)
        for name, keys in _JSON.items()
    }
    return Said("json", **found) if any(found.values()) else None
