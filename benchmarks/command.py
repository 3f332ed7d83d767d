# SPDX-License-Identifier: Apache-2.0
"""The command line that every benchmark has: ``python -m benchmarks.NAME``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.result import BenchmarkError, Result, verdict

Options = argparse.Namespace


def run(
    about: str | None,
    add_options: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[Options], Sequence[Result]],
) -> None:
    """Parse the options, measure, and print a line for each result.

    ``python -m benchmarks`` asks with ``--json FILE`` for the results, or for why there are none.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{Path(sys.argv[0]).stem}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        results = measure(options)
    except BenchmarkError as error:
        if options.json is not None:
            options.json.write_text(json.dumps({"error": str(error)}))
        sys.exit(f"{parser.prog}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    for result in results:
        print(line(result))
    if options.json is not None:
        content = {"results": [result.as_json() for result in results]}
        options.json.write_text(json.dumps(content))


def line(result: Result) -> str:
    """One result as a line."""
    if result.figure is None:
        return f"{result.name}: not measured: {result.note}"
    words = [f"{result.name}: {number(result.figure)} {result.unit} {spread(result)}"]
    if result.target is not None:
        words.append(f"target {target(result)}: {verdict(result, None)}")
    if result.note:
        words.append(result.note)
    return "; ".join(words)


def number(value: float) -> str:
    """A number with three or more significant digits, thousands apart."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"


def spread(result: Result) -> str:
    """From where to where repeated measurements went; empty where all were the same."""
    if result.low == result.high:
        return ""
    return f"({number(result.low)} … {number(result.high)})"


def target(result: Result) -> str:
    """What is aimed for."""
    if result.target is None:
        return ""
    sign = "≤" if result.target.better == "lower" else "≥"
    return result.target.words or f"{sign} {number(result.target.bound)} {result.unit}"


def progress(text: str) -> None:
    """Say how far a measurement is."""
    print(f"    {text}", file=sys.stderr, flush=True)


def count(text: str) -> int:
    """An option's whole number above 0, which may be written as 50e6."""
    value = float(text)
    if value < 1 or value != int(value):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(value)
