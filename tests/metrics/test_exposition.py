# SPDX-License-Identifier: Apache-2.0
"""The text of the metrics: what Prometheus reads is what totals.json says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import polars as pl
import pytest

from profilemate.metrics import exposition
from profilemate.metrics.catalogue import METRICS
from tests.analysis.invoke import invoke
from tests.metrics.stories import recorded, totals_of
from tests.metrics.text import total, values

ROOT = Path(__file__).resolve().parents[2]
CLIENTS_TEXT = {"request_id", "owner_request", "evicting_request", "lora", "tenant"}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("metrics"))


@pytest.mark.parametrize("as_openmetrics", [False, True])
def test_prometheus_reads_every_metric(session: Path, as_openmetrics: bool) -> None:
    """Each name once, with its type; only what the engine's story lacks has no sample."""
    text = exposition.render(totals_of(session), as_openmetrics=as_openmetrics).decode()
    found = values(text, as_openmetrics=as_openmetrics)
    names = {name for name, _ in found}
    for metric in METRICS:
        assert f"# TYPE {metric.name if as_openmetrics else metric.shown} " in text
        sample = metric.shown + ("_count" if metric.kind == "histogram" else "")
        assert (sample in names) == (metric.name not in WITHOUT_SAMPLES), metric.name


WITHOUT_SAMPLES = {
    "profilemate_kv_cache_evictions",
    "profilemate_kv_cache_never_reused_evictions",
    "profilemate_kv_cache_duplicate_evictions",
    "profilemate_requests_finished",
}


def test_names_and_labels_are_prometheus_way() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"profilemate(_[a-z]+)+", metric.name)
        assert not metric.name.endswith(("_total", "_info", "_bucket", "_count", "_sum", "_ns"))
        assert not CLIENTS_TEXT & {*metric.labels}
        assert metric.about.endswith(".")
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_values_are_the_tables(session: Path) -> None:
    """Of the worker, the GPUs and the engine, computed from the tables."""
    found = values(exposition.render(totals_of(session)).decode())
    timeline = pl.read_csv(session / "cuda_graph_timeline.csv")
    for dummy in (0, 1):
        rows = timeline.filter(pl.col("dummy") == dummy)
        served = {"worker": "3", "dummy": ("no", "yes")[dummy]}
        for name, value in (
            ("executions", rows.height),
            ("padded_tokens", rows["num_tokens"].sum()),
            ("unpadded_tokens", rows["unpadded_tokens"].sum()),
        ):
            assert total(found, f"profilemate_cuda_graph_{name}_total", **served) == value > 0
    graphs = timeline.filter((pl.col("runtime_mode") != "NONE") & (pl.col("num_graphs") > 0))
    name = "profilemate_cuda_graph_executions_total"
    assert total(found, name, mode="PIECEWISE", graph="yes") == graphs.height > 0
    usage = pl.read_csv(session / "cuda_graph_usage.csv")
    name = "profilemate_cuda_graph_replays_total"
    for mode, rows in (
        ("PIECEWISE", usage.filter(pl.col("runtime_mode") == "PIECEWISE")),
        ("unknown", usage.filter(pl.col("runtime_mode").is_null())),
    ):
        assert total(found, name, mode=mode) == rows["replay_count"].sum() > 0
        launch = total(found, "profilemate_cuda_graph_launch_seconds_total", mode=mode)
        assert launch == pytest.approx(rows["total_launch_sec"].sum(), abs=1e-6)
    assert total(found, "profilemate_gpu_memory_bytes", gpu="0", state="used") == 2000
    assert total(found, "profilemate_gpu_memory_bytes", gpu="1", state="free") == 6
    assert total(found, "profilemate_gpu_utilization_ratio") == 0.75
    assert total(found, "profilemate_collector_lag_seconds") == 0.5
    assert total(found, "profilemate_collector_longest_lag_seconds") == 2.5
    moved = "profilemate_kv_cache_moved_blocks_total"
    assert total(found, moved, event="allocate", engine="0", pool="0", group="0") == 3
    assert total(found, "profilemate_kv_cache_blocks", state="held") == 3
    metadata = json.loads((session / "metadata.json").read_bytes())
    bytes_name = "profilemate_collector_table_bytes_total"
    assert total(found, bytes_name) == metadata["cost"]["table_bytes"]


def test_buckets_hold_what_lies_up_to_their_bound() -> None:
    buckets, total_seconds = exposition._buckets(
        {"bounds": [1_000_000, 2_000_000], "counts": [3, 0, 4], "count": 7, "sum": 9_500_000}
    )
    assert buckets == [("0.001", 3), ("0.002", 3), ("+Inf", 7)]
    assert total_seconds == 0.0095
    reuses, _ = exposition._buckets(
        {
            "bounds": [1, 2, 4, 8, 16, 32, 64],
            "counts": [5, 1, 2, 0, 0, 0, 0, 1],
            "count": 9,
            "sum": 70,
        }
    )
    # Below 4 reuses is up to 3 of them.
    assert reuses[:3] == [("0.0", 5), ("1.0", 6), ("3.0", 8)]
    assert reuses[-1] == ("+Inf", 9)


def test_the_command_prints_the_same(session: Path) -> None:
    shown = invoke("metrics", session)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert values(shown.stdout) == values(exposition.render(totals_of(session)).decode())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "has no totals.json"),
        (b"{", "is damaged"),
        (b'{"format_version":1}', "is damaged"),
        (b'{"format_version":2}', "format version 2"),
        (b"[" * 100_000, "is damaged"),
    ],
)
def test_a_session_without_totals_is_one_line(
    session: Path, tmp_path: Path, content: bytes | None, said: str
) -> None:
    folder = tmp_path / "session"
    folder.mkdir()
    (folder / "metadata.json").write_bytes((session / "metadata.json").read_bytes())
    if content is not None:
        (folder / "totals.json").write_bytes(content)
    shown = invoke("metrics", folder)
    assert (shown.returncode, shown.stdout) == (2, "")
    (line,) = shown.stderr.splitlines()
    assert said in line


def test_every_metric_is_documented() -> None:
    """In the catalogue's order, with its labels."""
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(profilemate_\w+)` \| (\w+) \| ([^|]*) \|", text, re.MULTILINE)
    assert rows == [
        (metric.shown, metric.kind, ", ".join(f"`{label}`" for label in metric.labels))
        for metric in METRICS
    ]


def test_every_key_of_the_totals_is_documented(session: Path) -> None:
    """Between backticks, in docs/totals.md."""
    documented = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "totals.md").read_text()))
    assert keys(totals_of(session)) <= documented | VALUES


VALUES = {"engine", "profilemate", "python", "torch", "vllm"}
"""Keys of versions, which metadata.json describes."""


def keys(value: object) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys, value))
    if isinstance(value, dict):
        return {*value}.union(*map(keys, value.values()))
    return set()
