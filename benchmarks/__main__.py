# SPDX-License-Identifier: Apache-2.0
"""Measure what profiling costs, against the targets: make bench, or python -m benchmarks

Runs the benchmarks one after the other, each in a process of its own, and prints one table:

  target          what is aimed for
  last committed  the result that benchmarks/results.json has
  now             the median of repeated measurements, and from where to where they went
  verdict         met or missed; better or worse where now and the committed result differ by
                  more than both spreads and 1 %, if both are from a machine like this one

Results depend on the machine and on what else it does: leave it alone meanwhile. Every benchmark
can be run by itself, with options that make it shorter or longer: python -m benchmarks.NAME --help
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import environment, history, machine
from benchmarks.catalogue import CATALOGUE, Entry
from benchmarks.history import Kept
from benchmarks.result import BenchmarkError, Result, moved, unmeasured
from benchmarks.table import comparable, render

WIDTH = 120
"""Characters in a line of the table, where it goes into a file."""


def main() -> int:
    """Exit status: 0, or 1 where a benchmark failed or became worse than the committed one."""
    options = parse(sys.argv[1:])
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    try:
        kept = history.read()
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    here = machine.describe()
    entries = chosen(options)
    found: list[tuple[Entry, Result]] = []
    failed = False
    for number, entry in enumerate(entries, 1):
        console.print(
            f"[{number}/{len(entries)}] {entry.key}: {entry.about} "
            f"(about {entry.minutes:g} min): python {' '.join(entry.command)}",
            markup=False,
            highlight=False,
        )
        try:
            found += [(entry, result) for result in measure(entry)]
        except BenchmarkError as error:
            failed = True
            found.append((entry, unmeasured(entry.about, f"failed: {error}")))
        except KeyboardInterrupt:
            failed = True
            found.append((entry, unmeasured(entry.about, "interrupted")))
            break
    results = [result for _, result in found]
    console.print(render([*results, *left_out(options, entries, kept)], kept, here))
    for result in results:
        if result.figure is not None and result.note:
            console.print(f"{result.name}: {result.note}", markup=False, highlight=False)
    if options.save:
        date = time.strftime("%Y-%m-%d", time.gmtime())
        history.write(kept, [Kept(entry.key, date, here, result) for entry, result in found])
        console.print(f"kept in benchmarks/{history.FILE.name}: commit it")
    worse = any(
        moved(result, comparable(kept.get(result.name), here)) == "worse" for result in results
    )
    return int(failed or worse)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = "\n".join(
        f"  {entry.key:12}{entry.about}{' (only if named, or --all)' if entry.extra else ''}"
        for entry in CATALOGUE
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"benchmarks:\n{names}\n\nexamples:\n"
        "  make bench                            all targets but the slow ones\n"
        "  make bench ARGS='loop journal'        these two\n"
        "  make bench ARGS='--all --save'        everything, and keep the results\n",
    )
    keys = [entry.key for entry in CATALOGUE]
    parser.add_argument("names", nargs="*", metavar="NAME", help="benchmarks to run (see below)")
    parser.add_argument(
        "--all", action="store_true", help="run the slow and the comparing ones too"
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/results.json")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in keys]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]}: {', '.join(keys)}")
    return options


def chosen(options: argparse.Namespace) -> list[Entry]:
    """What to run, in the catalogue's order."""
    if options.names:
        return [entry for entry in CATALOGUE if entry.key in options.names]
    return [entry for entry in CATALOGUE if options.all or not entry.extra]


def measure(entry: Entry) -> list[Result]:
    """Run one benchmark.

    Raises:
        BenchmarkError: it failed.

    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch, "results.json")
        status = subprocess.run(
            [sys.executable, *entry.command, f"--json={file}"],
            cwd=environment.ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=False,
        ).returncode
        said = json.loads(file.read_text()) if file.exists() else {}
    if "results" not in said:
        raise BenchmarkError(said.get("error", f"it ended with status {status}"))
    return [Result.from_json(result) for result in said["results"]]


def left_out(
    options: argparse.Namespace, entries: Sequence[Entry], kept: dict[str, Kept]
) -> list[Result]:
    """Rows for what a run of all targets leaves out."""
    if options.names:
        return []
    rows = []
    for entry in CATALOGUE:
        if entry not in entries:
            why = f"not run: ARGS={entry.key} (about {entry.minutes:g} min)"
            known = [row.result for row in kept.values() if row.benchmark == entry.key]
            rows += [unmeasured(row.name, why, row.target, row.unit) for row in known]
            if not known:
                rows.append(unmeasured(entry.about, why))
    return rows


if __name__ == "__main__":
    sys.exit(main())
