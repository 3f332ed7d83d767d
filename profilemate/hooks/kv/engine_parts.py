# SPDX-License-Identifier: Apache-2.0
"""The parts of what an engine records, and what each means to the others where it is lost."""

from __future__ import annotations

from profilemate.hooks.kv.requests import Requests
from profilemate.hooks.parts import Part
from profilemate.record.recorder import Recorder


class EngineParts:
    """The parts of what an engine records, its steps apart, without which there is nothing."""

    def __init__(self, recorder: Recorder, requests: Requests) -> None:
        self.blocks = Part(recorder, "blocks", on_loss=requests.tell_hashes)
        self.frees = Part(recorder, "frees", self.blocks, on_loss=requests.lose_ends)
        self.lookups = Part(recorder, "lookups")
        self.requests = Part(recorder, "requests", on_loss=requests.lose_ends)
        self.updates = Part(recorder, "updates")
