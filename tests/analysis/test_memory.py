# SPDX-License-Identifier: Apache-2.0
"""Start-up lines that add up, the worker that decides, and memory over time, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from analysis import open_session, summarize
from analysis.gpu.memory import GpuUse, Memory, Spare
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import GIB, MIB, set_up
from tests.analysis.test_session import error_of
from tests.analysis.test_text import one_line, text_of

RITUAL = {
    "worker": 0,
    "total_bytes": 80 * GIB,
    "requested_bytes": 72 * GIB,
    "weights_bytes": 16 * GIB,
    "activation_bytes": 4 * GIB,
    "non_torch_bytes": GIB,
    "graphs_estimated_bytes": 2 * GIB,
    "graphs_estimate_applied": True,
    "graphs_bytes": GIB,
    "kv_bytes": 49 * GIB,
    "kv_allocated_bytes": 49 * GIB,
    "blocks": 25088,
}
"""72 - 16 - 4 - 1 - 2 = 49 GiB."""
GROUPS = [{"kind": "FullAttentionSpec", "block_size": 16, "bytes_per_block": 2 * MIB}]


def memory_of(session: SessionBuilder, after_sec: float = 0) -> Memory:
    return summarize(open_session(session.folder, after_sec=after_sec)).memory


def started(session: SessionBuilder, *workers: dict[str, Any], **other: Any) -> None:
    least = min(workers, key=lambda worker: worker.get("kv_bytes") or 0)
    set_up(session, groups=GROUPS, memory={**least, "workers": list(workers)}, **other)


class TestStartUp:
    def test_lines_that_add_up(self, session: SessionBuilder) -> None:
        started(session, RITUAL)
        found = memory_of(session).start_up
        assert found is not None
        assert (found.unexplained_bytes, found.blocks) == (0, 25088)
        text = one_line(text_of(session).partition("GPU memory\n")[2])
        assert text.startswith(
            "Asked for 72.0 GiB 90.00 % of 80.0 GiB - weights 16.0 GiB "
            "- activations 4.0 GiB at the peak of a trial run - not by torch 1.0 GiB "
            "- graphs, estimated 2.0 GiB = for the KV cache 49.0 GiB "
            "KV cache made of 49.0 GiB in 25,088 blocks "
            "Graphs, measured 1.0 GiB after all of this was allocated"
        )

    @pytest.mark.parametrize(
        ("kv", "off", "says"),
        [
            (46 * GIB, 3 * GIB, "Does not add up 3.0 GiB less than the lines above come to"),
            (50 * GIB, -GIB, "Does not add up 1.0 GiB more than the lines above come to"),
        ],
    )
    def test_the_line_that_does_not(
        self, session: SessionBuilder, kv: int, off: int, says: str
    ) -> None:
        started(session, {**RITUAL, "kv_bytes": kv})
        found = memory_of(session).start_up
        assert found is not None
        assert found.unexplained_bytes == off
        assert says in one_line(text_of(session))

    def test_an_estimate_that_is_not_applied_is_not_taken_off(
        self, session: SessionBuilder
    ) -> None:
        started(session, {**RITUAL, "graphs_estimate_applied": False, "kv_bytes": 51 * GIB})
        found = memory_of(session).start_up
        assert found is not None
        assert found.unexplained_bytes == 0
        assert "Graphs, estimated 2.0 GiB not taken off the KV cache" in one_line(text_of(session))

    @pytest.mark.parametrize("missing", ["requested_bytes", "weights_bytes", "kv_bytes"])
    def test_with_a_part_missing_there_is_no_sum(
        self, session: SessionBuilder, missing: str
    ) -> None:
        started(session, {**RITUAL, missing: None})
        found = memory_of(session).start_up
        assert found is not None
        assert found.unexplained_bytes is None
        assert "Does not add up" not in text_of(session)

    @pytest.mark.parametrize("memory", [None, 7, [], {}, {"workers": 3}, {"workers": [4, {}]}])
    def test_what_is_no_memory_is_none(self, session: SessionBuilder, memory: Any) -> None:
        session.metadata(memory=memory)
        found = memory_of(session)
        assert found.spare == ()
        assert found.start_up is None or found.start_up.kv_bytes is None
        text_of(session)

    def test_numbers_that_make_no_sense_are_not_known(self, session: SessionBuilder) -> None:
        started(session, {**RITUAL, "weights_bytes": -1, "total_bytes": 10**15, "blocks": "many"})
        found = memory_of(session).start_up
        assert found is not None
        assert (found.weights_bytes, found.total_bytes, found.blocks) == (None, None, None)


class TestSmallestWorker:
    """Situation 21: the smallest worker decides."""

    def test_who_decides_and_what_others_have_more(self, session: SessionBuilder) -> None:
        sizes = {0: 50 * GIB, 1: 49 * GIB, 2: 49 * GIB + 3 * MIB, 3: 49 * GIB}
        started(
            session, *({**RITUAL, "worker": rank, "kv_bytes": kv} for rank, kv in sizes.items())
        )
        found = memory_of(session)
        assert found.start_up is not None
        assert found.start_up.worker == 1
        assert found.spare == (Spare(0, GIB, 512), Spare(2, 3 * MIB, 1))
        text = one_line(text_of(session))
        assert "Worker 1 has the least for the KV cache, and decides:" in text
        assert "Unused elsewhere worker 0 1.0 GiB (512 blocks), worker 2 3.0 MiB (1 blocks)" in text


class TestOverTime:
    def samples(self, session: SessionBuilder) -> None:
        gpus = [{"gpu": 1, "uuid": "GPU-1", "name": "H100", "total_bytes": 80, "workers": [3, "x"]}]
        set_up(session, gpus=gpus, gpu_memory={"interval_sec": 0.5, "problem": None})
        session.rows(
            "gpu_memory.csv",
            *(
                {
                    "timestamp_sec": time,
                    "gpu": gpu,
                    "used_bytes": used,
                    "free_bytes": free,
                    "utilization_pct": busy,
                }
                for time, gpu, used, free, busy in (
                    (1, 1, 70, 10, 0),
                    (1, 0, 10, 70, ""),
                    (2, 1, 76, 3, 100),
                    (3, 1, 76, 4, 50),
                    (4, 1, 58, 22, 90),
                )
            ),
        )

    def test_peak_free_then_and_utilization(self, session: SessionBuilder) -> None:
        self.samples(session)
        found = memory_of(session)
        assert found.interval_sec == 0.5
        # Of 0, 50, 90, 100: at position 0.95 x 3.
        assert found.gpus == (
            GpuUse(0, None, None, (), 1, 10, 1.0, 70, 10.0, None, None),
            GpuUse(1, "H100", 80, (3,), 4, 76, 2.0, 3, 70.0, 60.0, pytest.approx(98.5)),
        )

    def test_without_the_warm_up(self, session: SessionBuilder) -> None:
        self.samples(session)
        (gpu,) = memory_of(session, after_sec=3).gpus
        assert (gpu.peak_used_bytes, gpu.peak_sec, gpu.samples) == (76, 3.0, 2)

    def test_why_nothing_was_sampled(self, session: SessionBuilder) -> None:
        set_up(session, gpu_memory={"interval_sec": 1, "problem": "nvidia-ml-py is not installed"})
        assert memory_of(session).problem == "nvidia-ml-py is not installed"
        assert "GPU memory\n  Not sampled: nvidia-ml-py is not installed." in text_of(session)

    def test_damage_is_one_line(self, session: SessionBuilder) -> None:
        self.samples(session)
        session.append("gpu_memory.csv", "5,1,60\n")
        assert "gpu_memory.csv, line 7: 3 fields instead of 5" in error_of(session)
