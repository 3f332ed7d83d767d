# SPDX-License-Identifier: Apache-2.0
"""``profilemate doctor``: can profilemate record here, and what would be missing?"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from profilemate.commands.doctor_findings import Finding, examine
from profilemate.commands.shared.options import AsJson

if TYPE_CHECKING:
    from profilemate.commands.doctor_ray import Node


@dataclass(frozen=True)
class DoctorOptions:
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Check each node of the Ray cluster at this address (auto: the one that this "
            "machine belongs to).",
            show_default=False,
        ),
    ] = None
    as_json: AsJson = False


def doctor(options: DoctorOptions) -> int:
    """Check whether profilemate can record vLLM here.

    Shows what would be missing, and what to do. Use the Python and the environment variables that
    you start vLLM with. The check imports vLLM in a process of its own, which takes some seconds,
    and starts nothing else.

    \b
    Examples:
      PYTHONPATH=/path/to/profilemate python -m profilemate doctor
      python -m profilemate doctor --json
      PYTHONPATH=/path/to/profilemate profilemate doctor --ray auto

    \b
    Exit codes:
      0   everything can be recorded
      1   something would be missing
      2   nothing can be recorded, here or on a node
    """
    if options.ray is not None:
        return _of_cluster(options.ray, as_json=options.as_json)
    findings = list(examine())
    if options.as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    return _code(finding.state for finding in findings)


def _code(states: Iterable[str]) -> int:
    found = set(states)
    return 2 if "bad" in found else 1 if "degraded" in found else 0


def _of_cluster(address: str, *, as_json: bool) -> int:
    from profilemate.commands import doctor_ray

    nodes = doctor_ray.examine(address)
    if as_json:
        found = {"nodes_version": doctor_ray.VERSION, "nodes": [asdict(node) for node in nodes]}
        print(json.dumps(found, indent=2))
    else:
        _print_nodes(nodes)
    return _code(node.state for node in nodes)


def _print_nodes(nodes: Sequence[Node]) -> None:
    """A row for each, and below them what is wrong."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from analysis.wording.printable import printable

    # A terminal that is narrower wraps the lines: nothing is cut off.
    console = Console(width=_WIDEST, soft_wrap=True)
    table = Table(box=None, pad_edge=False)
    for head in ("node", "", "Python", "vLLM", "profilemate", "folder", "clock"):
        table.add_column(head, no_wrap=True)
    for node in nodes:
        table.add_row(
            node.address,
            Text(node.state, _STYLES[node.state]),
            node.python or "-",
            node.vllm or "-",
            _FOUND[node.has_profilemate],
            _FOUND[node.can_write],
            _clock(node),
        )
    console.print(table)
    for node in nodes:
        host = f" ({node.host})" if node.host else ""
        for problem in node.problems:
            console.print(Text(printable(f"{node.address}{host}: {problem}")))


def _clock(node: Node) -> str:
    if node.clock_offset_sec is None or node.clock_error_sec is None:
        return "-"
    if abs(node.clock_offset_sec) >= 1:
        return f"{node.clock_offset_sec:+.2f} ± {node.clock_error_sec:.2f} s"
    return f"{1000 * node.clock_offset_sec:+.1f} ± {1000 * node.clock_error_sec:.1f} ms"


_WIDEST = 1000


_FOUND = {True: "yes", False: "no", None: "-"}
_STYLES = {"good": "green", "degraded": "yellow", "bad": "red"}


def _print(findings: Sequence[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from analysis.wording.printable import printable

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        found = printable(finding.found)
        if finding.advice:
            found += f"\n-> {printable(finding.advice)}"
        state = Text(finding.state, _STYLES[finding.state])
        table.add_row(_short(finding.about), state, Text(found))
    Console(soft_wrap=False).print(table)


def _short(owner: str) -> str:
    """A class by its last module and name."""
    return ".".join(owner.split(".")[-2:]) if owner.count(".") > 1 else owner
