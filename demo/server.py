# SPDX-License-Identifier: Apache-2.0
"""A `vllm serve` that is certain to be gone afterwards."""

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
    """The demo cannot go on; the message is for the user."""


@dataclass(frozen=True)
class Server:
    """A server process, the leader of its own process group."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    def wait_until_ready(self, seconds: float) -> None:
        """Return when /health answers. Raises DemoError if it ends or takes too long."""
        deadline = time.monotonic() + seconds
        while not self._healthy():
            status = self.process.poll()
            if status is not None:
                raise DemoError(with_tail(f"vllm serve ended with status {status}", self.log))
            if time.monotonic() > deadline:
                raise DemoError(with_tail(f"no answer from vllm serve in {seconds} s", self.log))
            time.sleep(0.5)

    def stop(self) -> None:
        """Interrupt it as Ctrl-C would, and wait. Raises DemoError if it does not end."""
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
    """Start `vllm serve` with `options` on a free port of this machine, output to `log`.

    However the block is left, the server and every process it started are gone after it.
    """
    port = free_port()
    command = [str(vllm), "serve", *options, "--host", "127.0.0.1", "--port", str(port)]
    with log.open("wb") as out:
        # A group of its own: one signal at the end reaches the engine and its workers too,
        # and a Ctrl-C in the terminal does not reach them before this process has seen it.
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
    """A TCP port of the loopback address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def with_tail(problem: str, log: Path, lines: int = 20) -> str:
    """`problem`, where the log lies, and the log's last lines."""
    tail = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join([f"{problem}; {log} has all of it and ends with:", *tail])
