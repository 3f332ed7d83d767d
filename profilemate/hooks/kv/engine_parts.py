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
        """What was lost in an earlier recording of the same engine is lost in this one, too."""
        for part, before in zip(self.all, earlier.all, strict=True):
            if before.lost:
                part.stay_lost()

    def leave_lost(self) -> None:
        """Take the hooks of all parts away that are lost."""
        for part in self.all:
            part.leave_if_lost()
