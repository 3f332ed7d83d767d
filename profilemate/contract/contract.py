# SPDX-License-Identifier: Apache-2.0
"""What a test gets as ``kv``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from analysis.errors import RuleError
from profilemate.contract import expected
from profilemate.contract.prompts import Given, Prompt, Tokenize, parting, read, shared_tokens
from profilemate.contract.simulated import Run, simulate
from profilemate.simulation.processes import Simulations


class Contract:
    """Runs prompts through vLLM's scheduler and block pool, and says what the cache finds.

    ``tokenize``: gives the token ids of a text; set it where prompts are texts.
    """

    def __init__(self, simulations: Simulations, folder: Path, *, update: bool = False) -> None:
        self.tokenize: Tokenize | None = None
        self._simulations = simulations
        self._folder = folder
        self._update = update

    def run(
        self,
        prompts: Sequence[Given],
        *,
        blocks: int = 10_000,
        block_size: int = 16,
        output_tokens: int = 1,
        max_num_seqs: int = 256,
        at_once: bool = False,
    ) -> Run:
        """What becomes of the prompts; as ``profilemate.contract.simulated.simulate`` does it.

        Raises:
            RuleError: a prompt or a number makes no sense.
            SessionError: vLLM's scheduler cannot run them.

        """
        for name, value in (
            ("blocks", blocks),
            ("block_size", block_size),
            ("output_tokens", output_tokens),
            ("max_num_seqs", max_num_seqs),
        ):
            if value < 1:
                raise RuleError(f"{name} is {value}; give a number from 1 on")
        if find_spec("vllm") is None:
            raise RuleError("vLLM is not installed here, and its scheduler runs the prompts")
        return simulate(
            self._simulations,
            read(prompts, self.tokenize),
            blocks=blocks,
            block_size=block_size,
            output_tokens=output_tokens,
            max_num_seqs=max_num_seqs,
            at_once=at_once,
        )

    def assert_prefix_shared(
        self, prompts: Sequence[Given], *, at_least: int, block_size: int = 16
    ) -> None:
        """Each prompt begins with ``at_least`` tokens of the first one. Needs no vLLM.

        Raises:
            AssertionError: one parts earlier; the message says where.

        """
        __tracebackhide__ = True
        if at_least < 1 or block_size < 1:
            raise RuleError("at_least and block_size are numbers from 1 on")
        known = read(prompts, self.tokenize)
        for number in range(1, len(known)):
            if shared_tokens(known[0], known[number]) < at_least:
                raise AssertionError(
                    f"fewer than {at_least:,} tokens are shared: "
                    f"{parting(known, 0, number, block_size)}"
                )

    def assert_unchanged(
        self, name: str, run: Run, prompts: Sequence[Given], *, tolerance: float = 0.01
    ) -> None:
        """The run is what the file of this name says; ``pytest --kv-update`` writes the file.

        Args:
            name: of the file in the folder ``kv_expected`` beside the test.
            run: of ``run``.
            prompts: those that were run, for the message.
            tolerance: how much a figure may differ, as a share; the hit rate, in points of 1.

        Raises:
            AssertionError: it is not, or there is no such file; the message says what differs.

        """
        __tracebackhide__ = True
        if not name.isidentifier():
            raise RuleError(f"the name {name!r} is no name of a file: letters, digits and _")
        path = self._folder / expected.FOLDER / f"{name}.json"
        if self._update:
            expected.write(path, run)
            return
        try:
            was = json.loads(path.read_text())
        except FileNotFoundError:
            raise AssertionError(
                f"there is no {os.path.relpath(path)}: 'pytest --kv-update' writes it as the run is"
            ) from None
        known: tuple[Prompt, ...] = read(prompts, self.tokenize)
        found = [*expected.changes(was, run, known, tolerance)]
        if found:
            shown = "\n".join(found)
            raise AssertionError(f"{name} changed ('pytest --kv-update' accepts it):\n{shown}")
