# SPDX-License-Identifier: Apache-2.0
"""The view in a real terminal, of a session that a real collector follows."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATIENCE_SEC = 120

pytestmark = pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is not installed")


class Terminal:
    """A tmux server of the test's own."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", str(self._socket), "-f", "/dev/null", *arguments]
        # These say how large the terminal is, whatever it is.
        environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "TMUX")}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        return done.stdout

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p")

    def wait(self, holds: Callable[[str], bool]) -> str:
        """The screen, as soon as this holds of it."""
        deadline = time.monotonic() + PATIENCE_SEC
        while not holds(self.screen()):
            assert time.monotonic() < deadline, self.screen()
            time.sleep(0.2)
        return self.screen()


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of sessions, in one of which requests run until the tests are done."""
    folder = tmp_path_factory.mktemp("sessions")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "VLLM_PROFILING_DIR": str(folder),
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    feed = [sys.executable, "-m", "tests.live.feed", "--seconds", "600", "--rate", "30"]
    with subprocess.Popen(feed, cwd=ROOT, env=environment, stdin=subprocess.PIPE) as process:
        deadline = time.monotonic() + PATIENCE_SEC
        while not _runs(folder):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.2)
        yield folder
        # It ends at the end of its input.
        process.communicate()


def _runs(folder: Path) -> bool:
    for path in folder.glob("session_*/totals.json"):
        engines = json.loads(path.read_bytes())["engines"]
        return any(engine["requests"]["running"] for engine in engines)
    return False


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    found = Terminal(tmp_path / "tmux")
    yield found
    subprocess.run(["tmux", "-S", str(tmp_path / "tmux"), "kill-server"], check=False)


def number(screen: str, before: str) -> int:
    """The number in front of these words."""
    return int(screen.partition(before)[0].split()[-1].replace(",", ""))


def test_in_a_terminal(sessions: Path, terminal: Terminal) -> None:
    command = f"{sys.executable} -m profilemate live {sessions}"
    shell = f"cd {ROOT}; {command}; echo exit code $?; sleep 600"
    terminal.tmux("new-session", "-d", "-x", "80", "-y", "24", shell)
    screen = terminal.wait(lambda screen: "In all:" in screen and "last " in screen)
    assert "running" in screen.splitlines()[0]
    assert "q Quit" in screen.splitlines()[-1]
    assert max(map(len, screen.splitlines())) <= 80
    # It goes on by itself.
    ended = number(screen, " requests ended")
    terminal.wait(lambda screen: number(screen, " requests ended") > ended)
    terminal.tmux("send-keys", "p")
    paused = terminal.wait(lambda screen: "PAUSED" in screen)
    time.sleep(3)
    assert terminal.screen() == paused
    terminal.tmux("send-keys", "p")
    terminal.wait(lambda screen: "PAUSED" not in screen)
    terminal.tmux("send-keys", "h")
    terminal.wait(lambda screen: "holders by blocks" in screen)
    terminal.tmux("send-keys", "End")
    terminal.wait(lambda screen: "On disk" in screen)
    terminal.tmux("resize-window", "-x", "200", "-y", "60")
    terminal.wait(lambda screen: "Holders of blocks" in screen.splitlines()[3])
    terminal.tmux("send-keys", "q")
    assert "exit code 0" in terminal.wait(lambda screen: "exit code" in screen)


def test_ctrl_c_ends_it(sessions: Path, terminal: Terminal) -> None:
    shell = (
        f"cd {ROOT}; {sys.executable} -m profilemate live {sessions}; echo exit code $?; sleep 600"
    )
    terminal.tmux("new-session", "-d", "-x", "80", "-y", "24", shell)
    terminal.wait(lambda screen: "In all:" in screen)
    terminal.tmux("send-keys", "C-c")
    assert "exit code 0" in terminal.wait(lambda screen: "exit code" in screen)


def test_once_of_a_real_collector_s_session(sessions: Path) -> None:
    command = [sys.executable, "-m", "profilemate", "live", "--once", "--json", str(sessions)]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    (session,) = json.loads(said)["sessions"]
    (engine,) = session["engines"]
    assert session["state"] == "running"
    assert engine["windows"][0]["seconds"] >= 0.5
    assert engine["windows"][0]["steps_per_sec"] > 0
    # A process says every few seconds what recording took of it.
    assert session["processes"][0]["hooks_pct"] is not None
    assert session["disk"]["bytes"] > 0
