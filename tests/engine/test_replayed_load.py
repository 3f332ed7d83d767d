# SPDX-License-Identifier: Apache-2.0
"""A recorded load, sent to another server by vLLM's own client: what it finds is the same.

The pool is large enough for all of it, so that the hit rate follows from the load alone, and not
from how busy the machine is.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from analysis import Summary, open_session, summarize
from demo.server import Server
from tests.analysis.invoke import invoke
from tests.support import engine
from tests.support.engine import BLOCK_SIZE, SERVED_NAME, START_SECONDS, Lab

pytestmark = pytest.mark.engine

PROMPTS, OUTPUT = 40, 12
POOL = "--num-gpu-blocks-override=1024"


def ended(server: Server, lab: Lab, name: str) -> Path:
    """The session of a server that is stopped."""
    session = engine.session_of(server, lab.sessions(name))
    server.stop()
    engine.wait_for(
        "the session to be complete",
        lambda: engine.metadata(session).get("complete"),
        engine.SETTLED_SECONDS,
    )
    return session


def summary_of(session: Path) -> Summary:
    return summarize(open_session(session))


def test_a_replayed_load_has_the_same_hit_rate(lab: Lab, tmp_path: Path) -> None:
    with (
        lab.server("recorded-load", POOL) as recorded,
        lab.server("replayed-load", POOL) as replayed,
    ):
        for server in (recorded, replayed):
            server.wait_until_ready(START_SECONDS)
        lab.vllm("bench", *engine.bench_options(lab.model, recorded.port, PROMPTS, OUTPUT))
        first = ended(recorded, lab, "recorded-load")
        file = tmp_path / "load.jsonl"
        done = invoke("export", "load", first, "-o", file, "--scale", "4x")
        assert done.returncode == 0, done.stderr
        command, path = done.stdout.splitlines()
        assert path == str(file)
        words = shlex.split(command.replace("--model MODEL", f"--model {SERVED_NAME}"))
        where = ["--host=127.0.0.1", f"--port={replayed.port}", f"--tokenizer={lab.model}"]
        said = lab.vllm("bench", *words[1:], *where, "--disable-tqdm")
        second = ended(replayed, lab, "replayed-load")
    before, after = summary_of(first), summary_of(second)
    assert f"Successful requests:                     {before.requests.ended}" in said
    assert after.requests.ended == before.requests.ended >= PROMPTS
    assert after.requests.input_tokens == before.requests.input_tokens
    assert after.requests.output_tokens == before.requests.output_tokens
    rates = [found.prefix_cache.true.token_rate or 0 for found in (before, after)]
    # Four prefixes of 128 tokens in prompts of 328: each is computed once.
    assert rates[0] > 0.25
    assert abs(rates[0] - rates[1]) <= 0.01
    assert before.facts.groups[0].block_size == BLOCK_SIZE
