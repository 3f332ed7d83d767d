# SPDX-License-Identifier: Apache-2.0
"""Loads that crowd a small pool, and what vLLM's scheduler does with them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.scheduler import RequestMaker, tokens
from tests.whatif import truth
from tests.whatif.truth import Truth

SYSTEM = 128
"""Tokens of the system prompt."""
LONGEST = 1_500
"""Tokens of a prompt without it, and of an answer, at most."""


@dataclass(frozen=True)
class Load:
    """Requests that come by themselves, ``per_sec`` a second. ``prompt`` and ``answer``: the mean
    of the logarithm of their tokens, which is spread by 0.8. ``shared``: the share of the requests
    that begin with the system prompt."""

    per_sec: float
    requests: int
    prompt: float
    answer: float
    shared: float

    def arrivals(self) -> Iterator[tuple[float, Any]]:
        """The time of each in milliseconds, and the request."""
        chance, make, at = random.Random(1), RequestMaker(16), 0.0
        for number in range(self.requests):
            at += chance.expovariate(self.per_sec)
            length = _between(8, chance.lognormvariate(self.prompt, 0.8))
            answer = _between(4, chance.lognormvariate(self.answer, 0.8))
            prompt = tokens(number, length)
            if chance.random() < self.shared:
                prompt = tokens(999_999, SYSTEM) + prompt
            yield at * 1e3, make(f"request-{number}", prompt, answer)

    def run(self, model: Path, folder: Path, blocks: int, max_num_seqs: int) -> Truth:
        """Drive the scheduler over so many blocks as vLLM counts them, and record it."""
        return truth.run(
            model,
            folder,
            blocks,
            step_sec=truth.device,
            requests=self.arrivals(),
            max_num_seqs=max_num_seqs,
        )


def _between(least: int, value: float) -> int:
    return min(LONGEST, max(least, int(value)))


USUAL = Load(per_sec=11, requests=800, prompt=4.8, answer=4.9, shared=0.5)
LONG_PROMPTS = Load(per_sec=20, requests=800, prompt=6.2, answer=4.0, shared=0.5)
LONG_ANSWERS = Load(per_sec=9, requests=600, prompt=3.0, answer=5.2, shared=0.0)
