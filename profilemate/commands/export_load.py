# SPDX-License-Identifier: Apache-2.0
"""``profilemate export load``: the recorded load, to be replayed."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import RuleError
from profilemate.commands.shared.files import writable, written
from profilemate.commands.shared.options import (
    FROM_THE_BEGINNING,
    After,
    LastHalf,
    Period,
    RequestsAfter,
    SessionArgument,
    opened,
    output_file,
)
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show_line
from profilemate.commands.shared.values import count
from profilemate.messages import say

if TYPE_CHECKING:
    from analysis.export.load import Load
    from analysis.tables.session import Session

_MOST_USERS = 1_000


class Format(str, Enum):
    """A format that another tool reads."""

    TIMED_TRACE = "timed-trace"
    MOONCAKE = "mooncake"
    CUSTOM = "custom"


def factor(text: str) -> float:
    """A number above 0, with or without an x.

    >>> factor("2x"), factor("0.5")
    (2.0, 0.5)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+)x?", str(text).strip(), re.ASCII)
    value = float(match[1]) if match else 0.0
    if not 0 < value < float("inf"):
        raise typer.BadParameter(f"{text!r} is not a factor; write 2x or 0.5x")
    return value


def users(text: str) -> int:
    """A whole factor from 1 on. The x tells it from a number of users.

    >>> users("3x")
    3
    """
    match = re.fullmatch(r"(\d{1,9})x", str(text).strip(), re.ASCII)
    value = int(match[1]) if match else 0
    if not 1 <= value <= _MOST_USERS:
        raise typer.BadParameter(
            f"{text!r} is no whole factor; write 2x, or {_MOST_USERS}x at most"
        )
    return value


@dataclass(frozen=True)
class LoadOptions:
    session: SessionArgument = None
    output: Annotated[Path | None, output_file("The load's file.", "load.FORMAT.jsonl")] = None
    format: Annotated[
        Format,
        typer.Option(
            "--format",
            help="timed-trace and custom are data sets of 'vllm bench serve'; mooncake is a trace "
            "with 512 tokens an id.",
        ),
    ] = Format.TIMED_TRACE
    scale: Annotated[
        float,
        typer.Option(
            "--scale",
            metavar="FACTOR",
            parser=factor,
            help="So many times as many requests a second: 2x, 0.5x.",
            show_default=False,
        ),
    ] = 1.0
    users: Annotated[
        int | None,
        typer.Option(
            "--users",
            metavar="FACTOR",
            parser=users,
            help="So many times as many conversations at once, with contents of their own: 3x. "
            "What several conversations share, all of them share.",
            show_default=False,
        ),
    ] = None
    tokens_per_id: Annotated[
        int | None,
        typer.Option(
            "--tokens-per-id",
            metavar="TOKENS",
            parser=count,
            help="Tokens that an id stands for. Default: the recorded block size; 512 for "
            "mooncake.",
            show_default=False,
        ),
    ] = None
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="PATH",
            help="Of the model that will be served, for custom: its folder, or its tokenizer.json.",
            show_default=False,
        ),
    ] = None
    after: After = FROM_THE_BEGINNING
    requests_after: RequestsAfter = 0
    last_half: LastHalf = False
    period: Period = None


def load(options: LoadOptions) -> int:
    """Write the recorded load, to be replayed against any server.

    The requests that ended, with their times, their lengths and what their prompts share. Tokens
    are random: no prompt was recorded. For a data set of 'vllm bench serve', the first line that
    is printed is the command that replays it.

    \b
    Examples:
      profilemate export load              the newest session, for vllm bench
      profilemate export load ~/runs --scale 2x -o twice.jsonl
      profilemate export load --users 3x --after 30s
      profilemate export load --format mooncake
      profilemate export load --format custom --tokenizer ~/models/mine

    \b
    Exit codes:
      0   done; the last line is the file's path
      2   no such session, it has no request, the file cannot be written, or
          a wrong option
    """
    from analysis.export import custom, timed_trace

    _refuse_slips(options)
    with status("opening the session"):
        session = opened(options.session, options)
    path = options.output or session.outputs / f"load.{options.format.value}.jsonl"
    target = writable(path, "-o")
    with status("reading the requests"):
        asked = _asked(session, options)
    for note in asked.notes:
        say(f"note: {note}")
    with status("writing the load"), written(target) as file:
        if options.tokenizer is not None:
            custom.write(asked, file, options.tokenizer)
        else:
            timed_trace.write(asked, file, whole_ms=options.format is Format.MOONCAKE)
    if options.format is not Format.MOONCAKE:
        show_line(_replay(asked, path, options))
    show_line(str(path))
    return 0


def _refuse_slips(options: LoadOptions) -> None:
    """Find mistakes in the options before a session is read.

    Raises:
        RuleError: the options make no sense.

    """
    if (options.format is Format.CUSTOM) != (options.tokenizer is not None):
        raise RuleError("--format custom and --tokenizer PATH need each other")
    if options.tokens_per_id == 0:
        raise RuleError("--tokens-per-id is at least 1")
    if options.format is Format.CUSTOM and options.scale != 1:
        raise RuleError("--format custom has no times; give 'vllm bench serve' a --request-rate")


def _asked(session: Session, options: LoadOptions) -> Load:
    from analysis.export import load as loads
    from analysis.export.timed_trace import MOONCAKE_TOKENS

    size = options.tokens_per_id
    if size is None and options.format is Format.MOONCAKE:
        size = MOONCAKE_TOKENS
    return loads.read(session, size, options.users or 1).faster(options.scale)


def _replay(asked: Load, path: Path, options: LoadOptions) -> str:
    """The command that replays the load. The check that the server is there would send a prompt."""
    words = [*("vllm", "bench", "serve", "--backend", "openai"), "--ready-check-timeout-sec", "0"]
    if options.format is Format.CUSTOM:
        words += ["--dataset-name", "custom", "--skip-chat-template", "--disable-shuffle"]
        words += ["--ignore-eos", "--custom-output-len", "-1"]
    else:
        words += ["--dataset-name", "timed_trace", "--timed-trace-sec-multiplier", "0.001"]
        words += ["--timed-trace-chunk-hash-size", str(asked.block_size)]
    words += ["--dataset-path", str(path), "--num-prompts", str(len(asked))]
    return f"{shlex.join(words)} --model MODEL"
