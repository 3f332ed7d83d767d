# SPDX-License-Identifier: Apache-2.0
"""``profilemate run``: start a command with profilemate on its PYTHONPATH."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from analysis.errors import RuleError
from profilemate import config, door
from profilemate.record.claim import make_base

PROBE_SEC = 60
"""How long a Python may take to start."""

_NEEDED = "import wrapt, orjson, profilemate.bootstrap"


@dataclass(frozen=True)
class RunOptions:
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND",
            help="The command to start, after '--': vllm serve MODEL.",
            show_default=False,
        ),
    ]
    directory: Annotated[
        str | None,
        typer.Option(
            "--dir",
            metavar="FOLDER",
            help="Where sessions go. Default: vllm_profiling in the temporary folder.",
            show_default=False,
        ),
    ] = None
    keep: Annotated[
        str | None,
        typer.Option(
            "--keep",
            metavar="SIZE,TIME",
            help="How much of a session is kept: 5GB, 6h, both as 5GB,6h, or all. Default: 2GB.",
            show_default=False,
        ),
    ] = None
    metrics: Annotated[
        str | None,
        typer.Option(
            "--metrics",
            metavar="ADDRESS",
            help="Offer metrics for Prometheus there: 127.0.0.1:9400.",
            show_default=False,
        ),
    ] = None
    snapshot_when: Annotated[
        str | None,
        typer.Option(
            "--snapshot-when",
            metavar="CONDITIONS",
            help="Take snapshots by itself: 'preemptions>20/1m or crash'.",
            show_default=False,
        ),
    ] = None
    gpu_timing: Annotated[
        bool, typer.Option("--gpu-timing", help="Measure how long replays take on the GPU, too.")
    ] = False


def run(options: RunOptions) -> int:
    """Start a command, and record every vLLM in it.

    The command takes the place of this program: its output, its signals and its exit code are its
    own. It gets PYTHONPATH, and a variable for each option that is given here. Other variables of
    'docs/configuration.md' are passed on as they are.

    profilemate has to be installed for the Python that runs the command. 'profilemate inject' makes
    a folder that needs no installation.

    \b
    Examples:
      profilemate run -- vllm serve MODEL
      profilemate run --dir ~/runs --keep 10GB -- vllm serve MODEL
      profilemate run -- python my_program.py

    \b
    Exit codes:
      the command's own
      2   an option is not understood, there is no such command, or its Python
          lacks a package
    """
    variables = dict(_variables(options))
    environment = {**os.environ, **variables}
    environment["PYTHONPATH"] = door.pythonpath(os.environ.get("PYTHONPATH"))
    # A session of a command around this one is none of this command's.
    environment.pop(config.SESSION, None)
    _refuse_what_is_not_understood(variables)
    _refuse_a_folder_that_cannot_be_written(config.read(environment).directory)
    path = shutil.which(options.command[0])
    if path is None:
        raise RuleError(f"there is no command {options.command[0]!r}; name one after --")
    _refuse_a_python_without_us(path, environment)
    _become(path, options.command, environment)


def _variables(options: RunOptions) -> Iterator[tuple[str, str]]:
    """The variables that the options stand for."""
    for name, value in (
        (config.DIRECTORY, options.directory and _absolute(options.directory)),
        (config.KEEP, options.keep),
        (config.METRICS, options.metrics),
        (config.SNAPSHOT_WHEN, options.snapshot_when),
    ):
        if value is not None:
            yield name, value
    if options.gpu_timing:
        yield config.GPU_TIMING, "1"


def _absolute(folder: str) -> str:
    """The command may start vLLM in another folder than this one."""
    return os.path.abspath(os.path.expanduser(folder))


def _refuse_what_is_not_understood(variables: Mapping[str, str]) -> None:
    problems = config.read(variables).problems
    if problems:
        what, _, _ = problems[0].rpartition(";")
        raise RuleError(what)


def _refuse_a_folder_that_cannot_be_written(folder: Path) -> None:
    try:
        make_base(folder)
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise RuleError(
            f"cannot write sessions to {folder}: {error.strerror or error}; give --dir a folder "
            "of yours"
        ) from None


def _refuse_a_python_without_us(path: str, environment: Mapping[str, str]) -> None:
    """A command whose Python cannot load profilemate would run as if nothing had been asked."""
    python = interpreter(path)
    if python is None:
        return
    try:
        done = subprocess.run(
            [*python, "-c", _NEEDED],
            env={**environment, config.SWITCH: "0"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=PROBE_SEC,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        # Whatever is wrong with it, the command will say so.
        return
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["it does not start"])[-1]
        raise RuleError(
            f"{shlex.join(python)}, which runs {path}, cannot load profilemate ({why}): install "
            "it there, or put a folder of 'profilemate inject' on PYTHONPATH"
        )


def interpreter(path: str) -> Sequence[str] | None:
    """The Python that runs this file: itself, or the one of its first line; None for others."""
    if os.path.basename(path).startswith("python"):
        return [path]
    try:
        with open(path, "rb") as file:
            first = file.readline(1024)
    except OSError:
        return None
    if not first.startswith(b"#!"):
        return None
    words = os.fsdecode(first[2:]).split()
    if words and os.path.basename(words[0]) == "env":
        found = shutil.which(words[1]) if len(words) > 1 else None
        words = [found] if found else []
    if not words or not os.path.basename(words[0]).startswith("python"):
        return None
    return words[:1]


def _become(path: str, command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    # Python ignores these two, and the command would, too.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execve(path, list(command), environment)
    except OSError as error:
        raise RuleError(f"cannot start {path}: {error.strerror or error}") from None
