# SPDX-License-Identifier: Apache-2.0
"""Prometheus itself, where it is installed: it reads our files, scrapes a collector, and answers
what the dashboard and the alerts ask."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from profilemate.metrics import exposition
from profilemate.metrics.server import Address, Server
from tests.kv.recording import hooks_only, only_session
from tests.metrics.stories import recorded, totals_of
from tests.metrics.test_collector import COUNTED, FIGURES, PATIENCE_SEC, REQUESTS, run, settled
from tests.metrics.test_deploy import DEPLOY, EXPRESSIONS
from tests.metrics.test_server import free_address
from tests.metrics.text import Values
from tests.support.scheduler import build_scheduler

pytestmark = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="Prometheus is not installed (on Debian: apt install prometheus)",
)

RULES = DEPLOY / "prometheus" / "rules.yml"


def promtool(*arguments: str, given: bytes = b"") -> str:
    done = subprocess.run(
        ["promtool", *arguments], input=given, capture_output=True, check=False, timeout=60
    )
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def test_it_reads_our_files() -> None:
    promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))
    assert "7 rules found" in promtool("check", "rules", str(RULES))


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    shutil.copy(Path(__file__).with_name("alerts.yml"), tmp_path)
    assert "SUCCESS" in promtool("test", "rules", str(tmp_path / "alerts.yml"))


def test_it_has_nothing_to_say_against_our_metrics(tmp_path: Path) -> None:
    assert promtool("check", "metrics", given=exposition.render(totals_of(recorded(tmp_path)))) == (
        ""
    )


@dataclass(frozen=True)
class Prometheus:
    """One that runs, and what it answers."""

    address: Address

    def get(self, path: str, **query: str) -> Any:
        """The data of its answer; none while it does not answer."""
        url = f"http://{self.address[0]}:{self.address[1]}/api/v1/{path}"
        try:
            with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=10) as at:
                answer = json.load(at)
        except (urllib.error.URLError, ConnectionError):
            return None
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, expression: str) -> Values:
        """The samples that an expression has now, by name and labels."""
        found = (self.get("query", query=expression) or {"result": []})["result"]
        return {
            (each["metric"].pop("__name__", ""), frozenset(each["metric"].items())): float(
                each["value"][1]
            )
            for each in found
        }


@contextmanager
def prometheus(folder: Path, *targets: Address) -> Iterator[Prometheus]:
    """Prometheus with our alerts, which scrapes these addresses each second."""
    address = free_address()
    shown = json.dumps([f"{host}:{port}" for host, port in targets])
    (folder / "prometheus.yml").write_text(f"""
global: {{evaluation_interval: 1s}}
rule_files: [{RULES}]
scrape_configs:
  - job_name: profilemate
    scrape_interval: 1s
    static_configs: [{{targets: {shown}}}]
""")
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address[0]}:{address[1]}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield Prometheus(address)
        finally:
            process.kill()


def test_it_scrapes_a_collector(model: Path, hooks_on: None, tmp_path: Path) -> None:
    """Its counters are the collector's, and each expression of the dashboard has an answer."""
    address, of_gpus = free_address(), free_address()
    Server(of_gpus, totals_of(recorded(tmp_path / "story")))
    sessions, folder = tmp_path / "sessions", tmp_path / "prometheus"
    sessions.mkdir()
    folder.mkdir()
    with (
        hooks_only(sessions, collector=True),
        pytest.MonkeyPatch.context() as patch,
        prometheus(folder, address, of_gpus) as server,
    ):
        patch.setenv("VLLM_PROFILING_METRICS", f"{address[0]}:{address[1]}")
        scheduler = build_scheduler(model, 40)
        run(scheduler, 0, REQUESTS)
        last = settled(address, only_session(sessions))
        instance = f"{address[0]}:{address[1]}"
        counted = {
            key: value
            for key, value in last.items()
            if key[0].startswith(FIGURES) and key[0].endswith(COUNTED) and "band" not in key[0]
        }
        assert len(counted) > 150
        of_prometheus = frozenset({("job", "profilemate"), ("instance", instance)})
        give_up = time.monotonic() + PATIENCE_SEC
        twice = "count_over_time(profilemate_session_info[5m]) > 1"
        while not (
            compared(server, of_prometheus, counted, instance)
            and [*server.values(f"count(count by (instance) ({twice}))").values()] == [2]
        ):
            assert time.monotonic() < give_up, (folder / "log").read_text()[-2000:]
            time.sleep(0.5)
        for expression in EXPRESSIONS:
            found = server.get("query", query=expression)
            assert found is not None, expression
            if " > " not in expression and "== 0" not in expression:
                assert found["result"], expression
        (group,) = server.get("rules")["groups"]
        assert {rule["health"] for rule in group["rules"]} == {"ok"}
        # The story's recording lost a part.
        firing = {
            (alert["labels"]["alertname"], alert["labels"]["instance"])
            for alert in server.get("alerts")["alerts"]
            if alert["state"] == "firing"
        }
        assert firing == {("RecordingStopped", f"{of_gpus[0]}:{of_gpus[1]}")}
        del scheduler


def compared(
    server: Prometheus, labels: frozenset[tuple[str, str]], counted: Values, instance: str
) -> bool:
    """Whether what it has of these counters is what they were."""
    stored = server.values(f'{{__name__=~"profilemate_.+", instance="{instance}"}}')
    return all(stored.get((name, own | labels)) == value for (name, own), value in counted.items())
