# SPDX-License-Identifier: Apache-2.0
"""docs/schemas/: what commands print with ``--json`` is valid by them, and has no other key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import analysis
from analysis import open_session, summarize
from analysis.renderers import json as renderer
from scripts import json_schemas
from tests.analysis.builder import SessionBuilder
from tests.analysis.graphs import on_the_gpu
from tests.analysis.invoke import invoke
from tests.analysis.moe import with_experts
from tests.analysis.stories import swept
from tests.analysis.test_prefix_cache import eight_alike
from tests.analysis.test_rent import two_that_share
from tests.analysis.test_text import busy
from tests.headroom.test_deployment import record
from tests.plan.truth import CONFIGS
from tests.sweep.test_best import swept as sweep_of

SCHEMAS = json_schemas.FOLDER
TRACE = [
    {"timestamp": 0, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 3]},
    {"timestamp": 900, "input_length": 40, "output_length": 3, "hash_ids": [1, 2, 4]},
]


def closed(schema: Any) -> Any:
    """The schema that forbids keys it does not name."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: closed(each) for key, each in schema.items()}
    if "properties" in kept and isinstance(kept.get("required"), list):
        kept["additionalProperties"] = False
    return kept


def check(kind: str, printed: str) -> None:
    """What is printed is valid by the schema of this kind, and has no other key."""
    schema = json.loads((SCHEMAS / f"{kind}.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    found = json.loads(printed)
    jsonschema.validate(found, schema)
    jsonschema.validate(found, closed(schema))


def test_the_files_are_those_that_follow_from_the_code() -> None:
    """If not: python -m scripts.json_schemas"""
    written = {path.stem: path.read_text() for path in SCHEMAS.iterdir()}
    made = {kind: json_schemas.text(schema) for kind, schema in json_schemas.schemas().items()}
    assert written == made


@pytest.mark.parametrize(
    "story", [swept, eight_alike, two_that_share, busy, on_the_gpu, with_experts, lambda _: None]
)
def test_a_summary(session: SessionBuilder, story: Callable[[SessionBuilder], object]) -> None:
    story(session)
    check("summary", renderer.render(summarize(open_session(session.folder))))


def test_a_key_that_is_not_there_or_of_another_kind_is_seen(session: SessionBuilder) -> None:
    swept(session)
    printed = json.loads(renderer.render(summarize(open_session(session.folder))))
    for change in ({"usage": None}, {"summary_version": 2}, {"another": 1}):
        with pytest.raises(jsonschema.ValidationError):
            check("summary", json.dumps(printed | change))
    del printed["lifetimes"]["lifetime"]["p99_sec"]
    with pytest.raises(jsonschema.ValidationError):
        check("summary", json.dumps(printed))


def test_other_commands(session: SessionBuilder, tmp_path: Path) -> None:
    swept(session)
    folder = str(session.folder)
    other = str(shutil.copytree(folder, tmp_path / "other"))
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    page = tmp_path / "metrics.txt"
    page.write_text('vllm:prefix_cache_queries_total{engine="0"} 300\n')
    config = str(CONFIGS / "llama-3.1-8b.json")
    for kind, *arguments in (
        ("siblings", "summary", "--all", folder),
        ("comparison", "compare", folder, other),
        ("reconciliation", "reconcile", folder, "--metrics-file", str(page)),
        ("curve", "whatif", "--fast", str(trace), "--blocks", "10,20"),
        ("curve", "whatif", "--fast", folder),
        ("plan", "plan", config, "--gpu", "80GiB", "--without-vllm"),
    ):
        done = invoke(*arguments, "--json")
        assert done.stdout.startswith("{"), (arguments, done.stderr)
        check(kind, done.stdout)


def test_a_check(session: SessionBuilder) -> None:
    swept(session)
    found = analysis.check(summarize(open_session(session.folder)), ["hit_rate<0.4"])
    check("check", renderer.render(found))


def test_a_deployment(session: SessionBuilder) -> None:
    record(session)
    check("deployment", invoke("plan", "--from", session.folder, "--rate", "5", "--json").stdout)


def test_a_sweep(tmp_path: Path) -> None:
    check("sweep", renderer.render(sweep_of(tmp_path, [1.0, 2.0], [3.0])))


def test_a_simulation(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in TRACE))
    done = invoke("whatif", trace, "--blocks", "20", "--json")
    check("whatif", done.stdout)
