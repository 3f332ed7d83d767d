# SPDX-License-Identifier: Apache-2.0
"""docs/plan.md names every key of the JSON, and every option of the command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.test_memory import RITUAL
from tests.plan.test_reality import record
from tests.plan.truth import CONFIGS

DOCS = (Path(__file__).parent.parent.parent / "docs" / "plan.md").read_text()


def keys(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from keys(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            # Figures of the model's family are keys there.
            if key != "sources":
                yield from keys(item)


def test_every_key_is_documented(session: SessionBuilder) -> None:
    record(session, RITUAL)
    arguments = ("--session", session.folder, "--average-len", 100, "--without-vllm", "--json")
    ended = invoke("plan", CONFIGS / "llama-3.1-8b.json", *arguments)
    documented = set(re.findall(r"\w+", DOCS.partition("## JSON")[2]))
    assert set(keys(json.loads(ended.stdout))) <= documented


def test_every_option_is_documented() -> None:
    options = set(re.findall(r"--[a-z-]+", invoke("plan", "--help").stdout))
    assert len(options) > 20
    assert {one for one in options if one not in DOCS} == {"--help", "--no-enable-prefix-caching"}
