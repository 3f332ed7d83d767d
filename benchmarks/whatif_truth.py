# SPDX-License-Identifier: Apache-2.0
"""How true is ``profilemate whatif``? python -m benchmarks.whatif_truth

Drives vLLM's scheduler with the Mooncake trace's head at several settings and records each run,
then simulates every recorded session at the settings of all others. Prints the tables of
docs/whatif.md: what the simulation says, beside what vLLM counted when it really ran so.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Setting:
    """A run of the scheduler: its pool as vLLM counts it, and its other settings."""

    blocks: int
    others: dict[str, int] = field(default_factory=dict)

    @property
    def label(self) -> str:
        others = "".join(f", {name.replace('_', ' ')} {n}" for name, n in self.others.items())
        return f"{self.blocks:,} blocks{others}"


@dataclass(frozen=True)
class Group:
    """Settings that are compared with each other, on a trace that comes ``speed`` times as fast.

    ``model``: the KV cache groups, by their name in ``tests.whatif.hybrids``; None: full attention.
    ``retention``: the interval in tokens at which blocks of windows and states stay cached.
    """

    settings: tuple[Setting, ...]
    speed: float = 1.0
    model: str | None = None
    retention: int | None = None


GROUPS = {
    "pools": Group(tuple(map(Setting, (1_000, 2_000, 4_000, 16_000)))),
    "settings": Group(
        (
            Setting(4_000),
            Setting(2_000, {"block_size": 32}),
            Setting(4_000, {"max_num_seqs": 4}),
            Setting(2_000, {"block_size": 32, "max_num_seqs": 4}),
        )
    ),
    "crowded": Group((Setting(600), Setting(1_200), Setting(1_200, {"max_num_seqs": 16})), 12.0),
    "windows": Group((Setting(8_000), Setting(32_000)), model="windows", retention=0),
    "chunks": Group((Setting(4_000), Setting(16_000)), model="chunks"),
    "states": Group((Setting(2_000), Setting(8_000)), model="states", retention=0),
    "checkpoints": Group((Setting(1_000), Setting(4_000)), model="checkpoints", retention=0),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, "all"], default="all")
    parser.add_argument("--requests", type=int, help="only the trace's first N")
    options = parser.parse_args()
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    # As a vLLM process with the repository on its path does it.
    module = import_module("vllm.v1.core.sched.scheduler")
    import_module("profilemate.hooks.kv.scheduler").attach(module)
    with tempfile.TemporaryDirectory() as scratch:
        for name in GROUPS if "all" in options.groups else options.groups:
            for line in _table(name, Path(scratch) / name, options.requests):
                print(line, flush=True)


def _table(name: str, scratch: Path, limit: int | None) -> Iterator[str]:
    from tests.support.scheduler import write_model
    from tests.whatif.simulating import Recorded

    group, model = GROUPS[name], write_model(scratch / "model")
    truths = {
        setting.label: _really(group, setting, model, scratch, limit) for setting in group.settings
    }
    yield f"{name}: recorded at, simulated at | hit rate: true, simulated | evictions | preemptions"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
    for recorded_at, source in truths.items():
        recorded = Recorded(source.session)
        for setting in group.settings:
            truth = truths[setting.label]
            seqs = {"max_num_seqs": 64} | setting.others
            if group.model is None:
                seqs = {"block_size": 16} | seqs
            found = recorded.simulate(model, setting.blocks, **seqs)
            cells = (
                recorded_at,
                setting.label,
                f"{100 * truth.hit_rate:.2f} %",
                f"{100 * (found.hit_rate or 0):.2f} %",
                f"{truth.evictions:,}",
                f"{found.evictions:,}",
                f"{100 * ((found.evictions or 0) / truth.evictions - 1):+.2f} %",
                f"{truth.preemptions:,}, {found.preemptions:,}",
                f"{truth.steps:,}, {found.steps:,}",
            )
            yield f"| {' | '.join(cells)} |"


def _really(group: Group, setting: Setting, model: Path, scratch: Path, limit: int | None) -> Any:
    from tests.support.scheduler import RequestMaker, trace_requests
    from tests.whatif import hybrids, truth

    more: dict[str, Any] = {}
    if group.model is not None:
        more = hybrids.of_groups(hybrids.KINDS[group.model])
        more["retention_interval"] = group.retention
    make = RequestMaker(setting.others.get("block_size", 16))
    arrivals = [(at / group.speed, request) for at, request in trace_requests(make, limit)]
    found = truth.run(
        model,
        scratch / setting.label.replace(" ", "-"),
        setting.blocks,
        step_sec=truth.device,
        requests=arrivals,
        **more,
        **setting.others,
    )
    print(f"    ran at {setting.label}", file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
