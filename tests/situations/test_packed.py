# SPDX-License-Identifier: Apache-2.0
"""What the collector wrote of vLLM's own scheduler is stored as rows, and comes back."""

from __future__ import annotations

from pathlib import Path

from tests.analysis.test_segments import differences, said
from tests.pack.sessions import pack, texts, unpack
from tests.situations.bench import Bench
from tests.support.scheduler import tokens


def test_rows_of_the_collector_need_no_text_beside_them(bench: Bench, tmp_path: Path) -> None:
    """40 requests on a pool that is far too small: preemptions, evictions, hits, and odd names."""
    engine = bench.engine(12, max_num_seqs=4, max_num_batched_tokens=32)
    names = ["plain", 'a,"b"', "=1+1", "zero\u200bwidth", "\u4e2d"]
    requests = [
        bench.request(f"{names[number % len(names)]}-{number}", tokens(1 + number % 7, 64), 40)
        for number in range(40)
    ]
    engine.run(*requests[:20], seconds=0.013_7)
    engine.run(*requests[20:], seconds=0.000_021)
    folder = engine.end().folder
    index = pack(folder, tmp_path / "parquet")
    assert [entry["path"] for entry in index["files"] if "table" not in entry] == []
    recorded = {
        *("kv_cache_usage", "kv_cache_allocations", "kv_cache_evictions"),
        *("prefix_cache_lookups", "scheduler_steps", "requests"),
    }
    assert index["tables"].keys() == recorded
    assert unpack(tmp_path / "parquet", tmp_path / "back") == texts(folder)
    expected = said(folder)
    assert expected["preemptions"]["count"] > 0
    assert differences(said(tmp_path / "parquet"), expected) == []
