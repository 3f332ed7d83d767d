# SPDX-License-Identifier: Apache-2.0
"""Try to break profilemate: python -m attacks

Runs the attacks one after the other and prints what each counted, beside the most that
docs/reliability.md promises. They take long, and belong to no test run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from attacks.catalogue import CATALOGUE
from attacks.figure import Figure


def main(arguments: Sequence[str]) -> int:
    """Exit status: 0, or 1 where a promise is broken."""
    options = parse(arguments)
    console = Console()
    broken = False
    for attack in options.attacks:
        count = options.count or attack.count
        console.print(f"{attack.name}: {attack.about} ({count:,} times, seed {options.seed})")
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"attack-{attack.name}-") as folder:
            module = importlib.import_module(f"attacks.{attack.name}")
            figures = module.run(count, options.seed, Path(folder))
        console.print(table(figures, time.monotonic() - began))
        broken |= any(figure.is_broken for figure in figures)
    return int(broken)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    names = "\n".join(
        f"  {attack.name:12}{attack.about} (about {attack.minutes:g} min)" for attack in CATALOGUE
    )
    parser = argparse.ArgumentParser(
        prog="python -m attacks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=f"attacks:\n{names}\n",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="attacks to run (default: all)")
    parser.add_argument("--count", type=int, help="attempts of each, in place of its own number")
    parser.add_argument("--seed", type=int, default=0, help="of the random choices (default: 0)")
    options = parser.parse_args(arguments)
    known = {attack.name: attack for attack in CATALOGUE}
    for name in options.names:
        if name not in known:
            parser.error(f"there is no attack {name}: {', '.join(known)}")
    options.attacks = [known[name] for name in options.names or known]
    return options


def table(figures: Sequence[Figure], seconds: float) -> Table:
    """What an attack counted, a row a figure."""
    rows = Table("figure", "counted", "promised", caption=f"{seconds:,.0f} s")
    for figure in figures:
        promised = "" if figure.most is None else f"at most {figure.most:g} {figure.unit}"
        style = "red" if figure.is_broken else None
        rows.add_row(figure.name, f"{figure.value:,.6g} {figure.unit}", promised, style=style)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
