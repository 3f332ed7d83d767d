# SPDX-License-Identifier: Apache-2.0
"""The parts of an engine's recording, and what else the loss of each one costs."""

from __future__ import annotations

from profilemate.hooks.kv.requests import Requests
from profilemate.hooks.parts import Part
from profilemate.record.recorder import Recorder


class EngineParts:
    """All parts of an engine's recording but its steps, without which there is nothing."""

    def __init__(self, recorder: Recorder, requests: Requests) -> None:
        self.blocks = Part(recorder, "blocks", on_loss=requests.record_hashes)
        self.frees = Part(recorder, "frees", self.blocks, on_loss=requests.lose_ends)
        self.lookups = Part(recorder, "lookups")
        self.requests = Part(recorder, "requests", on_loss=requests.lose_ends)
        self.updates = Part(recorder, "updates")

    @property
    def all(self) -> tuple[Part, ...]:
        return self.blocks, self.frees, self.lookups, self.requests, self.updates

    def stay_lost(self, earlier: EngineParts) -> None:
        """Of an earlier recording of the same engine, what was lost is lost in this one, too."""
        for part, before in zip(self.all, earlier.all, strict=True):
            if before.lost and not part.lost:
                part.leave()
