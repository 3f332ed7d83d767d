# SPDX-License-Identifier: Apache-2.0
"""Data-parallel engines on two hosts: two network namespaces with names of their own, which reach
each other by one virtual cable and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from analysis import open_session, summarize
from profilemate.commands.join import write_joined
from tests.support import engine
from tests.support.engine import ENGINE_OPTIONS, SERVED_NAME, START_SECONDS, VLLM, Lab

pytestmark = pytest.mark.engine

HOSTS = ("a", "b")
ADDRESSES = {"a": "10.213.7.1", "b": "10.213.7.2"}
RPC_PORT = 13345
PORT = 8000
ANSWERS = 12
OUTPUT = 20
SECRET = b"one secret on both of the hosts"


def ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(("ip", *words), capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Network:
    """Two namespaces of this test's own."""

    name: str

    def namespace(self, host: str) -> str:
        return f"{self.name}{host}"

    def run(self, host: str, *command: str) -> list[str]:
        """The command in that host's network, under that host's name."""
        named = f'hostname host-{host}; exec "$@"'
        inside = ("ip", "netns", "exec", self.namespace(host), "unshare", "--uts")
        return [*inside, "sh", "-c", named, "sh", *command]

    def pids(self, host: str) -> list[int]:
        """Processes in that host's network."""
        return [int(pid) for pid in ip("netns", "pids", self.namespace(host)).stdout.split()]


@contextmanager
def network() -> Iterator[Network]:
    """Both namespaces, and the cable; gone after the block, with all that runs in them.

    Skips where the machine allows none.
    """
    made = Network(f"pm{os.getpid()}")
    with ExitStack() as stack:
        for host in HOSTS:
            try:
                done = ip("netns", "add", made.namespace(host))
            except FileNotFoundError:
                pytest.skip("there is no command ip")
            if done.returncode:
                pytest.skip(f"no network namespaces here: {done.stderr.strip()}")
            stack.callback(ip, "netns", "del", made.namespace(host))
            stack.callback(lambda host=host: engine.kill(*made.pids(host)))
        one, other = (f"{made.name}v{host}"[-15:] for host in HOSTS)
        spaces = [made.namespace(host) for host in HOSTS]
        cable = ("type", "veth", "peer", "name", other, "netns", spaces[1])
        if (done := ip("link", "add", one, "netns", spaces[0], *cable)).returncode:
            pytest.skip(f"no virtual cables here: {done.stderr.strip()}")
        for host, space, end in zip(HOSTS, spaces, (one, other), strict=True):
            ip("-n", space, "addr", "add", f"{ADDRESSES[host]}/30", "dev", end)
            ip("-n", space, "link", "set", "lo", "up")
            ip("-n", space, "link", "set", end, "up")
        yield made


@dataclass(frozen=True)
class Hosts:
    """The session that each host left."""

    sessions: dict[str, Path]


@pytest.fixture(scope="module")
def hosts(lab: Lab) -> Hosts:
    """A server on the first host, with an engine on each; twelve requests, three prompts."""
    folder = lab.folder / "two-hosts"
    folder.mkdir()
    key = folder / "content.key"
    key.write_bytes(SECRET)
    key.chmod(0o600)
    serve = (
        *(str(VLLM), "serve", str(lab.model), f"--served-model-name={SERVED_NAME}"),
        *ENGINE_OPTIONS,
        *("--data-parallel-size=2", "--data-parallel-size-local=1"),
        f"--data-parallel-address={ADDRESSES['a']}",
        f"--data-parallel-rpc-port={RPC_PORT}",
    )
    own = {
        "a": ("--host=127.0.0.1", f"--port={PORT}"),
        "b": ("--headless", "--data-parallel-start-rank=1"),
    }
    with network() as made, ExitStack() as stack:
        started = {}
        for host in HOSTS:
            log = stack.enter_context((folder / f"log-{host}").open("wb"))
            environment = lab.environment(
                f"two-hosts-{host}",
                VLLM_HOST_IP=ADDRESSES[host],
                GLOO_SOCKET_IFNAME=f"{made.name}v{host}"[-15:],
                VLLM_PROFILING_CONTENT_KEY=str(key),
            )
            started[host] = stack.enter_context(
                subprocess.Popen(
                    made.run(host, *serve, *own[host]), env=environment, stdout=log, stderr=log
                )
            )
        # Whatever is raised, all of them end before they are waited for.
        stack.callback(lambda: [engine.kill(*made.pids(host)) for host in HOSTS])

        def ask(path: str, body: str = "") -> str:
            """The answer of the server, asked from its own host."""
            script = (
                "import sys, urllib.request as u; "
                f"r = u.Request('http://127.0.0.1:{PORT}' + sys.argv[1], "
                "sys.argv[2].encode() or None, {'Content-Type': 'application/json'}); "
                "print(u.urlopen(r, timeout=120).read().decode())"
            )
            words = (sys.executable, "-I", "-c", script, path, body)
            done = subprocess.run(
                made.run("a", *words), capture_output=True, text=True, check=False
            )
            return done.stdout

        def is_ready() -> bool:
            log = (folder / "log-a").read_text(errors="replace")
            assert all(one.poll() is None for one in started.values()), log[-3000:]
            return "Application startup complete" in log and bool(ask("/health"))

        engine.wait_for("the server", is_ready, START_SECONDS)
        bodies = [
            json.dumps(
                {
                    "model": SERVED_NAME,
                    "prompt": f"{number % 3} " + "words that all of them have " * 12,
                    "max_tokens": OUTPUT,
                    "temperature": 0,
                    "ignore_eos": True,
                }
            )
            for number in range(ANSWERS)
        ]
        with ThreadPoolExecutor(4) as clients:
            answers = list(clients.map(lambda body: ask("/v1/completions", body), bodies))
        assert all('"completion_tokens"' in each for each in answers)
        for one in started.values():
            one.terminate()
        for host in HOSTS:
            engine.wait_for(
                "the host's end", lambda host=host: not _serving(made, host), engine.END_SECONDS
            )
    for host in HOSTS:
        engine.wait_until_settled(lab.sessions(f"two-hosts-{host}"))
    found = {host: engine.only_session(lab.sessions(f"two-hosts-{host}")) for host in HOSTS}
    return Hosts(found)


def _serving(made: Network, host: str) -> list[str]:
    """What runs there but the collector."""
    titles = []
    for pid in made.pids(host):
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "collector" not in title:
            titles.append(title)
    return titles


def _metadata(hosts: Hosts, host: str) -> dict[str, Any]:
    return engine.metadata(hosts.sessions[host])


def test_each_host_has_a_session_of_one_deployment(hosts: Hosts) -> None:
    """Both took its id from vLLM's own settings."""
    for rank, host in enumerate(HOSTS):
        known = _metadata(hosts, host)
        assert known["host"] == f"host-{host}"
        assert known["deployment"] == f"{ADDRESSES['a']}:{RPC_PORT}"
        assert [(each["role"], each["rank"]) for each in known["processes"]] == [("engine", rank)]
        assert known["clock"]["checkpoints"] > 1
        # They are namespaces of one machine, whose clock nobody sets meanwhile.
        assert known["clock"]["most_drift_sec"] - known["clock"]["least_drift_sec"] < 0.1


def test_contents_of_both_hosts_compare(hosts: Hosts) -> None:
    """All prompts begin with one of three words, and both engines got some of each kind."""
    keys = {_metadata(hosts, host)["contents_key"] for host in HOSTS}
    assert len(keys) == 1
    assert None not in keys
    contents = []
    for host in HOSTS:
        lines = (hosts.sessions[host] / "requests.jsonl").read_text().splitlines()
        rows = [json.loads(each) for each in lines]
        assert rows
        contents.append({number for row in rows for number in row["hash_ids"][:-1]})
    assert contents[0] & contents[1]


def test_the_joined_session(hosts: Hosts, tmp_path: Path) -> None:
    sessions = [open_session(path) for path in hosts.sessions.values()]
    write_joined(sessions, tmp_path)
    joined = open_session(tmp_path)
    found = summarize(joined)
    assert found.warnings == ()
    assert found.facts.engines == (0, 1)
    assert found.requests.ended == ANSWERS
    assert found.facts.data_parallel == 2
    assert found.facts.host in ("host-a, host-b", "host-b, host-a")
    rows = joined.scan("requests").collect()
    # Each request took less than all of them together, on both hosts' clocks.
    asked = {rank: rows.filter(rows["engine"] == rank) for rank in found.facts.engines}
    first = {rank: each["timestamp"].min() for rank, each in asked.items()}
    last = {rank: each["finish_sec"].max() for rank, each in asked.items()}
    assert first[0] < 1000 * last[1]
    assert first[1] < 1000 * last[0]
