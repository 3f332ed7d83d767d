# SPDX-License-Identifier: Apache-2.0
"""A disk that does not answer, while a real scheduler goes on: how much memory waits for it?

The thread that writes waits in a stand-in for ``os.write`` as in one on such a disk. The memory is
that of the events that wait and of all that they refer to, but for vLLM's blocks, which are there
anyway.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.progress import track

from attacks.figure import Figure
from attacks.watching import watch_schedulers
from profilemate.record import journal_writer, recorder, writer
from tests.kv.recording import hooks_only
from tests.support.scheduler import RequestMaker, build_scheduler, step, tokens, write_model

PROMISED_MB = 200
"""100 MB, and what a single step may bring beyond: here 64 ids of 1 MB, of requests that run."""

RUNNING = 64

LOADS = ("short requests", "long answers", "ids of 1 MB", "prompts of 50,000 tokens")


class Hung:
    """``os`` as the journal sees it, on a disk that does not answer."""

    def __init__(self) -> None:
        self.is_back = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return self._write if name == "write" else getattr(os, name)

    def _write(self, fd: int, data: Any) -> int:
        if threading.current_thread().name == "profilemate":
            self.is_back.wait()
        return os.write(fd, data)


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    watch_schedulers()
    model = write_model(folder / "model")
    figures = []
    for load in track(LOADS[:count], "disk"):
        events, waiting_mb = hang(model, folder / load.replace(" ", "-"), load, seed)
        figures.append(Figure(f"{load}: events that waited", events))
        figures.append(Figure(f"{load}: memory of what waited", waiting_mb, "MB", PROMISED_MB))
    return figures


def hang(model: Path, sessions: Path, load: str, seed: int) -> tuple[int, float]:
    """How many events waited when the recording stopped, and what they held, in MB."""
    make, made, disk = RequestMaker(), 0, Hung()
    with pytest.MonkeyPatch.context() as patch, hooks_only(sessions):
        scheduler = build_scheduler(
            model, 15_000, max_num_seqs=RUNNING, max_model_len=65_536, max_num_batched_tokens=65_536
        )
        (opened,) = recorder._living()
        patch.setattr(journal_writer, "os", disk)
        patch.setattr(writer, "STUCK_SEC", 0.0)
        while opened.active:
            wanted = 4 if load.startswith("prompts") else RUNNING
            while len(scheduler.requests) < wanted:
                made += 1
                scheduler.add_request(_request(make, load, made, seed))
            step(scheduler)
        events = len(opened._events)
        waiting_mb = _size_of(opened._events) / 1e6
        disk.is_back.set()
    while recorder._living():
        time.sleep(0.1)
    return events, waiting_mb


def _request(make: RequestMaker, load: str, number: int, seed: int) -> Any:
    name, prompt, answer = f"request-{number}", 60, 2
    if load == "long answers":
        answer = 300
    elif load.startswith("ids"):
        name = "x" * 1_000_000 + name
    elif load.startswith("prompts"):
        prompt = 50_000
    # Prompts that share what is long: a prefix hit is one list of blocks.
    shared = tokens(seed, prompt) if prompt > 1_000 else []
    return make(name, shared + tokens(seed + number, 60), answer)


def _size_of(events: Any) -> int:
    """Bytes of all that these refer to, each object once."""
    seen: set[int] = set()
    total, left = 0, [events]
    while left:
        value = left.pop()
        if id(value) in seen or not isinstance(value, (list, tuple, int, bytes, str)):
            continue
        seen.add(id(value))
        total += sys.getsizeof(value)
        if isinstance(value, (list, tuple)):
            left.extend(value)
    return total
