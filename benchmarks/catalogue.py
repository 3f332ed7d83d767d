# SPDX-License-Identifier: Apache-2.0
"""All benchmarks, by the names that ``python -m benchmarks`` takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """A benchmark as it is run for the table: ``python -m benchmarks.MODULE OPTIONS``."""

    key: str
    about: str
    module: str
    options: tuple[str, ...] = ()
    minutes: float = 1
    """About how long it takes."""
    extra: bool = False
    """Run only where it is named, or everything is asked for."""

    @property
    def command(self) -> list[str]:
        """What follows the interpreter."""
        return ["-m", f"benchmarks.{self.module}", *self.options]


LOOP = "scheduler_loop"

CATALOGUE = (
    Entry("loop", "scheduler loop, 128 running", LOOP, minutes=4),
    Entry("loop-alone", "the same, runs in turn", LOOP, ("--alone",), 4),
    Entry("loop-1024", "scheduler loop, 1,024 running", LOOP, ("--running=1024", "--runs=4"), 4),
    Entry(
        "loop-100k",
        "scheduler loop, 100,000-token prompts",
        LOOP,
        ("--prompt=100000", "--runs=4"),
        4,
    ),
    Entry("graph", "CUDA graph replay", "graph_replay"),
    Entry("experts", "counting experts, on a CPU", "expert_counting", minutes=5, extra=True),
    Entry("phases", "timing steps by phase, on a CPU", "step_timing", minutes=3, extra=True),
    Entry("start", "interpreter start without vLLM", "start_up"),
    Entry("delay", "event to CSV row", "row_delay", minutes=2),
    Entry("collector", "the collector's speed and memory", "collector", minutes=4),
    Entry("journal", "bytes in the journal", "journal"),
    Entry("memory", "the engine's memory", "engine_memory", minutes=8),
    Entry("analyzer", "10 million evictions", "analyzer", minutes=2),
    Entry("whatif", "13 pool sizes, 3 eviction rules", "whatif"),
    Entry("fleet", "1,000 sessions of a fleet", "fleet", minutes=3, extra=True),
    Entry("fleet-ray", "the same on a Ray cluster", "fleet", ("--ray",), 5, True),
    Entry("serve", "vllm bench serve, end to end", "serve", minutes=20, extra=True),
    Entry("parts", "what each part costs", "parts", minutes=3, extra=True),
    Entry("paused", "the same while the recording is paused", LOOP, ("--paused",), 4, True),
    Entry("resume", "the engine's halt when the recording goes on", "resuming", minutes=1),
    Entry("noise", "off against off", LOOP, ("--null",), 4, True),
    Entry("metrics", "vLLM's own at its 1 % sample", LOOP, ("--vllm-metrics=0.01",), 4, True),
    Entry("metrics-all", "vLLM's own at 100 %", LOOP, ("--vllm-metrics=1",), 4, True),
    Entry("events", "vLLM's KV events", LOOP, ("--vllm-events",), 4, True),
)
