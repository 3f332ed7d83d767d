# SPDX-License-Identifier: Apache-2.0
"""Which name does the user give to a request, by its id?

A rule file has a rule a line: ``name = regular expression``. The first rule whose expression is
found anywhere in the id gives the name. Empty lines, and lines that begin with ``#``, say nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from analysis.errors import SessionError, unreadable

_MAX_BYTES = 1 << 20
_NAME = re.compile(r"[^={},\s][^={},]*")


@dataclass(frozen=True)
class Label:
    """A rule: requests whose id has this pattern have this name."""

    name: str
    pattern: re.Pattern[str]


def read(path: Path) -> tuple[Label, ...]:
    """The rules of a file, in its order.

    Raises:
        SessionError: the file cannot be read, has no rule, or a line that is none.

    """
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise unreadable(path, error) from None
    if len(content) > _MAX_BYTES:
        raise SessionError(f"{path} has more than 1 MiB; a file of rules has a few lines")
    try:
        lines = content.decode().splitlines()
    except UnicodeDecodeError:
        raise SessionError(f"{path} is no text in UTF-8; write lines of 'name = regex'") from None
    rules = tuple(
        _rule(path, number, line.strip())
        for number, line in enumerate(lines, 1)
        if line.strip() and not line.lstrip().startswith("#")
    )
    if not rules:
        raise SessionError(f"{path} has no rule; write lines of 'name = regex'")
    return rules


def _rule(path: Path, number: int, line: str) -> Label:
    name, is_rule, pattern = (part.strip() for part in line.partition("="))
    if not is_rule or not pattern or _NAME.fullmatch(name) is None:
        raise SessionError(
            f"{path}, line {number}: {line[:80]!r} is no rule; write 'name = regex', the name "
            "without a comma or a brace"
        )
    try:
        return Label(name, re.compile(pattern))
    except (re.error, OverflowError, RecursionError) as error:
        raise SessionError(
            f"{path}, line {number}: {pattern[:80]!r} is no regular expression: {error}"
        ) from None


def names(rules: Iterable[Label], request_ids: Iterable[str]) -> Mapping[str, str]:
    """The name of each request id that a rule matches.

    >>> rules = [Label("chat", re.compile("^chatcmpl")), Label("rest", re.compile("-"))]
    >>> names(rules, ["chatcmpl-1", "cmpl-2", "3"])
    {'chatcmpl-1': 'chat', 'cmpl-2': 'rest'}
    """
    rules = tuple(rules)
    found = {}
    for request_id in request_ids:
        for rule in rules:
            if rule.pattern.search(request_id):
                found[request_id] = rule.name
                break
    return found
