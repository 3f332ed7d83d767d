# SPDX-License-Identifier: Apache-2.0
"""What a client of a real server notices: python -m benchmarks.serve

Three `vllm serve` on the CPU engine with a tiny model are up at once: one with the repository on
PYTHONPATH and two without. `vllm bench serve` loads one of them at a time, in turns whose order is
drawn anew. The change from one without to the one with counts, against what differs between
the two without. Servers are started anew several times, since no two processes are alike.
It takes some twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import environment, sessions
from benchmarks.command import Options, count, progress, run
from benchmarks.result import BenchmarkError, Result, Target, middle

if TYPE_CHECKING:
    from tests.support.engine import Lab

OFF, OFF_AGAIN, ON = "off", "off-again", "on"


@dataclass(frozen=True)
class Served:
    """What the client saw of one load."""

    token_ms: float
    """Mean time per output token after the first, in milliseconds."""
    throughput: float
    """Output tokens a second."""
    answered: int
    """Requests."""


Turn = dict[str, Served]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", type=count, default=2, help="times they are started (2)")
    parser.add_argument("--loads", type=count, default=3, help="of each server (3)")
    parser.add_argument("--prompts", type=count, default=150, help="of a load (150)")
    parser.add_argument("--output", type=count, default=100, help="tokens of each answer (100)")


def measure(options: Options) -> list[Result]:
    """Changes in per cent of the time per token and of the throughput."""
    environment.need_vllm()
    from tests.support.engine import Lab

    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for number in range(options.servers):
                folder = Path(scratch, str(number))
                folder.mkdir()
                turns += serve(Lab(folder), options, random.Random(number))
        except AssertionError as error:
            raise BenchmarkError(" | ".join(str(error).splitlines()[-3:])) from None
    times = [{name: seen.token_ms for name, seen in turn.items()} for turn in turns]
    lost = [{name: 1 / seen.throughput for name, seen in turn.items()} for turn in turns]
    return [
        compared("serve: time per output token", times),
        compared("serve: throughput lost", lost),
    ]


def compared(name: str, turns: Sequence[dict[str, float]]) -> Result:
    """The change with recording, against what differs without."""
    noise = [100 * (turn[OFF_AGAIN] / turn[OFF] - 1) for turn in turns]
    changes = [100 * (turn[ON] / turn[OFF] - 1) for turn in turns]
    bound = max(map(abs, noise))
    note = f"off against off {min(noise):+.2f} … {max(noise):+.2f} % over {len(turns)} turns"
    target = Target(bound, words="within the spread of off against off")
    return middle(name, changes, "%", target, note)


def serve(lab: Lab, options: Options, draw: random.Random) -> list[Turn]:
    """Start the servers, load them in turns, and see that the one was recorded."""
    from tests.support.engine import START_SECONDS

    order = [OFF, OFF_AGAIN, ON]
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(lab.server(name, profiled=name == ON)) for name in order
        }
        for server in servers.values():
            server.wait_until_ready(START_SECONDS)
        progress("three servers are up")
        for name in order:  # What only a first load does is not measured.
            load(lab, name, servers[name].port, 16, options.output)
        turns: list[Turn] = []
        for _ in range(options.loads):
            draw.shuffle(order)
            turn = {
                name: load(lab, name, servers[name].port, options.prompts, options.output)
                for name in order
            }
            progress(", ".join(f"{name} {turn[name].token_ms:.3f} ms" for name in sorted(turn)))
            turns.append(turn)
        for server in servers.values():
            server.stop()
    session = sessions.only(lab.sessions(ON))
    sessions.wait_until_complete(session)
    with open(session / "requests.jsonl", "rb") as file:
        recorded = sum(1 for _ in file)
    answered = sum(turn[ON].answered for turn in turns)
    if recorded < answered:
        raise BenchmarkError(f"{recorded} requests were recorded, and {answered} were answered")
    return turns


def load(lab: Lab, name: str, port: int, prompts: int, output: int) -> Served:
    """Run ``vllm bench serve`` against the server of this name."""
    from tests.support.engine import bench_options

    result = lab.folder / "load.json"
    saving = [
        "--save-detailed",
        "--save-result",
        f"--result-dir={lab.folder}",
        f"--result-filename={result.name}",
    ]
    lab.vllm("load", *bench_options(lab.model, port, prompts, output), *saving)
    numbers = json.loads(result.read_text())
    result.unlink()
    if numbers["failed"] or not numbers["completed"]:
        why = {error.strip().rpartition("\n")[2] for error in numbers["errors"] if error}
        raise BenchmarkError(f"{name}: {numbers['failed']} requests failed: {'; '.join(why)}")
    return Served(numbers["mean_tpot_ms"], numbers["output_throughput"], numbers["completed"])


if __name__ == "__main__":
    run(__doc__, add_options, measure)
