# SPDX-License-Identifier: Apache-2.0
"""Profile a real vLLM server from start to end, on a machine without a GPU.

    python demo/run.py

The demo does what a user does: it puts this repository on PYTHONPATH, starts `vllm serve`, sends
load, stops the server, and analyzes the session. The model is tiny and random. The pool is too
small for the load, so requests share prefixes, lose cached blocks to evictions, and are preempted.
The demo downloads nothing, and writes to .demo/ in the repository.

Exit code: 0 done, 1 a step failed (one line and the end of its log), 130 interrupted.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from server import DemoError, serve, with_tail
from tiny_model import MAX_TOKENS, write_model

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / ".demo"
MODEL = WORK / "model"
SESSIONS = WORK / "sessions"
VLLM = Path(sys.executable).with_name("vllm")

# The pool has 64 blocks of 32 tokens. The prompts of each of eight families share 128 tokens, which
# is 4 blocks. A prompt adds 48 tokens and its answer 80, which is 4 blocks of its own. Ten requests
# at once and eight prefixes need 72 blocks.
SERVER_OPTIONS = [
    str(MODEL), "--served-model-name", "tiny",
    "--load-format", "dummy",
    "--max-model-len", str(MAX_TOKENS),
    "--block-size", "32",  # attention on CPUs needs a multiple of 32
    "--num-gpu-blocks-override", "64",
    "--max-num-seqs", "10",
    "--enforce-eager",  # to compile, vLLM would need a C++ compiler
]  # fmt: skip
LOAD_OPTIONS = [
    "--backend", "openai", "--model", "tiny", "--tokenizer", str(MODEL),
    "--dataset-name", "prefix_repetition",
    "--num-prompts", "160",
    "--prefix-repetition-num-prefixes", "8",
    "--prefix-repetition-prefix-len", "128",
    "--prefix-repetition-suffix-len", "48",
    "--prefix-repetition-output-len", "80",
    "--ignore-eos", "--seed", "0", "--temperature", "0",
    "--max-concurrency", "10",
    "--disable-tqdm",
]  # fmt: skip

START_SECONDS = 300
LOAD_SECONDS = 300
COMPLETE_SECONDS = 30
STEPS = 5


def environment() -> dict[str, str]:
    """The user's environment, with the repository on PYTHONPATH and without the network."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name not in ("VLLM_PROFILING", "VLLM_ENABLE_PROFILING")
    }
    return inherited | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "VLLM_PROFILING_DIR": str(SESSIONS),
        "PATH": os.pathsep.join([str(VLLM.parent), os.environ.get("PATH", os.defpath)]),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(WORK / "cache" / "huggingface"),
        "VLLM_CACHE_ROOT": str(WORK / "cache" / "vllm"),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # One thread is enough for this model, on whichever core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }


def send_load(port: int) -> str:
    """Run `vllm bench serve` against the server. Returns its requests and tokens, in one line."""
    log, result = WORK / "load.log", WORK / "load.json"
    result.unlink(missing_ok=True)
    command = [
        str(VLLM), "bench", "serve", *LOAD_OPTIONS, "--host", "127.0.0.1", "--port", str(port),
        "--save-result", "--result-dir", str(WORK), "--result-filename", result.name,
    ]  # fmt: skip
    with log.open("wb") as out:
        try:
            status = subprocess.run(
                command, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                timeout=LOAD_SECONDS, check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            raise DemoError(
                with_tail(f"vllm bench serve did not end in {LOAD_SECONDS} s", log)
            ) from None
    if status != 0 or not result.exists():
        raise DemoError(with_tail(f"vllm bench serve ended with status {status}", log))
    numbers = json.loads(result.read_text())
    if numbers["failed"]:
        raise DemoError(with_tail(f"{numbers['failed']} requests failed", log))
    return (
        f"{numbers['completed']} requests, {numbers['total_input_tokens']:,} tokens in, "
        f"{numbers['total_output_tokens']:,} out"
    )


def find_session(before: set[Path]) -> Path:
    """The session that the server left. Raises DemoError if there is none or several."""
    new = sorted(sessions() - before)
    if len(new) != 1:
        found = ", ".join(path.name for path in new) or "none"
        raise DemoError(
            with_tail(f"not one new session in {SESSIONS}: {found}", WORK / "server.log")
        )
    return new[0]


def sessions() -> set[Path]:
    """The folders of all sessions."""
    return set(SESSIONS.glob("session_*"))


def wait_until_complete(session: Path) -> str:
    """Wait until the tables are complete. Returns whether they are, in one line."""
    deadline = time.monotonic() + COMPLETE_SECONDS
    while time.monotonic() < deadline:
        try:
            if json.loads((session / "metadata.json").read_text()).get("complete"):
                return "complete"
        except (OSError, ValueError):
            pass  # the collector has not written it yet
        time.sleep(0.2)
    return f"not complete after {COMPLETE_SECONDS} s; the analysis completes them"


def step(number: int, title: str, work: Callable[[], str | None]) -> None:
    """Do `work` on one line of output, which ends with the seconds and what `work` returned."""
    print(f"[{number}/{STEPS}] {title} … ", end="", flush=True)
    began = time.monotonic()
    try:
        note = work()
    except BaseException:
        print("failed", flush=True)
        raise
    seconds = f"{time.monotonic() - began:.0f} s"
    print(f"{seconds}: {note}" if note else seconds, flush=True)


def profile() -> Path:
    """Serve under load, in steps. Returns the session's folder."""
    for folder in (WORK, SESSIONS):
        folder.mkdir(mode=0o700, exist_ok=True)
    before = sessions()
    step(1, "write a tiny random Llama", lambda: write_model(MODEL))
    with serve(VLLM, SERVER_OPTIONS, environment(), WORK / "server.log") as server:
        step(2, "start vllm serve", lambda: server.wait_until_ready(START_SECONDS))
        step(3, "send load with vllm bench serve", lambda: send_load(server.port))
        step(4, "stop the server", server.stop)
    session = find_session(before)
    step(5, "complete the tables", lambda: wait_until_complete(session))
    return session


def analyze(session: Path) -> None:
    """Print the session's summary. Raises DemoError if the analyzer fails."""
    command = [sys.executable, "-m", "analysis", str(session)]
    status = subprocess.run(command, cwd=ROOT, env=environment(), check=False).returncode
    if status != 0:
        raise DemoError(f"python -m analysis {session} ended with status {status}")


def end_on(signal_number: int, _frame: FrameType | None) -> None:
    """Exit through the `finally` blocks, which stop the server."""
    sys.exit(128 + signal_number)


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_on)
    try:
        session = profile()
        print(flush=True)
        analyze(session)
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; the server is stopped", file=sys.stderr)
        return 130
    folder, python = os.path.relpath(session), os.path.relpath(sys.executable)
    print(
        f"\nSession:       {folder}\n"
        f"All sections:  {python} -m profilemate summary --full {folder}\n"
        f"With charts:   {python} -m profilemate report {folder}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
