# SPDX-License-Identifier: Apache-2.0
"""Start `vllm serve`, and end it with all its processes."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

STOP_SECONDS = 60


class DemoError(Exception):
    """The demo cannot go on. The message says why."""


@dataclass(frozen=True)
class Server:
    """A server process, the leader of its own process group."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def wait_until_ready(self, seconds: float) -> None:
        """Wait until /health answers. Raises DemoError if the server ends or takes too long."""
        deadline = time.monotonic() + seconds
        while not self._healthy():
            status = self.process.poll()
            if status is not None:
                raise DemoError(with_tail(f"vllm serve ended with status {status}", self.log))
            if time.monotonic() > deadline:
                raise DemoError(with_tail(f"vllm serve did not answer in {seconds} s", self.log))
            time.sleep(0.5)

    def stop(self) -> None:
        """Interrupt the server as Ctrl-C does, and wait. Raises DemoError if it does not end."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise DemoError(
                with_tail(f"vllm serve did not end in {STOP_SECONDS} s", self.log)
            ) from None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as got:
                return bool(got.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@contextmanager
def serve(
    vllm: Path, options: list[str], environment: Mapping[str, str], log: Path
) -> Iterator[Server]:
    """Start `vllm serve` with `options` on a free port of this machine. Its output goes to `log`.

    At the end of the block, the server and every process that it started are killed.
    """
    port = free_port()
    command = [str(vllm), "serve", *options, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        # In a process group of its own, one signal reaches the engine and its workers, too, and
        # a Ctrl-C in the terminal reaches this process alone.
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield Server(process, port, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def free_port() -> int:
    """A free TCP port of the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_tail(problem: str, log: Path, lines: int = 20) -> str:
    """The problem, the log's path, and the log's last lines."""
    tail = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"{problem}; the log, {log}, ends with:", *tail])
