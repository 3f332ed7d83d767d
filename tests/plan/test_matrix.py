# SPDX-License-Identifier: Apache-2.0
"""The matrix of vLLM's architectures: some of its rows, made again."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "plan-models.md").read_text()

SAID = {
    "BertModel": r"\[bert\]: keeps nothing ; read: equal",
    "Gemma3TextModel": r"\[gemma3_text\]: equal, 245,760 blocks 6 window of 4,096 \+ 1 full",
    "KimiLinearForCausalLM": r"\[kimi_linear\]: equal, 4,161 blocks 3 state \+ 1 latent, blocks of",
    "LLaMAForCausalLM": r"\[llama\]: equal, 7,680 blocks 1 full; read: equal",
    "MedusaModel": r"\[\]: no config  \(drafts for another model",
    "MiniCPM3ForCausalLM": r"\[minicpm3\]: equal, 4,228 blocks 1 full; read: not known",
}


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    command = [sys.executable, "-m", "scripts.plan_matrix", *SAID]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    lines = [line.split(" ", 1) for line in ended.stdout.splitlines()]
    return {line[0]: line[1] for line in lines if line[0] in SAID}


@pytest.mark.parametrize("name", SAID)
def test_rows(name: str, said: dict[str, str]) -> None:
    assert re.match(SAID[name], said[name]), said[name]


def test_the_page_has_all_of_them() -> None:
    (total,) = re.findall(r"has (\d+) architectures", PAGE)
    listed = re.findall(r"^\| (\w+) \|", PAGE, re.MULTILINE)
    others = re.findall(r"^\* [^:]+: (.*)$", PAGE, re.MULTILINE)
    names = [*listed, *(name for line in others for name in line.split(", "))]
    assert len({*names} - {"architecture"}) == int(total) > 300


def test_none_differs() -> None:
    """A plan by vLLM's class is what vLLM makes; one without is, or says that it does not know."""
    assert "**differs**" not in PAGE
    assert "are refused as vLLM refuses them, 0 differ." in PAGE
    assert "and differs for 0." in PAGE
