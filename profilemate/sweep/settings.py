# SPDX-License-Identifier: Apache-2.0
"""Which settings are tried, and what does the command look like with each?"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from analysis.errors import RuleError

Settings = Mapping[str, str]
"""One combination: a value for each flag, which is named without its dashes."""

MOST = 10_000
"""Combinations; more are a slip of the keyboard."""

RUN_FOLDER = "run"
"""The placeholder that stands for the folder of the run."""

_NAME = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)


def combinations(sets: Sequence[str], listed: Path | None) -> tuple[Settings, ...]:
    """The combinations that ``--set`` and ``--list`` ask for; one without settings for neither.

    Raises:
        RuleError: what was given makes no sense, or the list cannot be read.

    """
    if listed is not None and sets:
        raise RuleError("give either --set or --list, not both")
    found = _listed(listed) if listed is not None else _crossed(sets)
    seen: dict[tuple[tuple[str, str], ...], Settings] = {}
    for combination in found:
        if seen.setdefault(tuple(sorted(combination.items())), combination) is not combination:
            raise RuleError(f"{words(combination)} is there twice; take one of them out")
        if len(seen) > MOST:
            raise RuleError(f"more than {MOST:,} combinations; give fewer values to --set")
    return tuple(seen.values())


def command(template: Sequence[str], combination: Settings, folder: Path) -> list[str]:
    """The command with the settings of a combination.

    ``{name}`` anywhere in the command becomes the value of that setting, and ``{run}`` the run's
    folder. A setting that is not named in the command is appended to it: ``--name value``;
    ``--name`` for the value ``true``, ``--no-name`` for ``false``, nothing for an empty one.
    """
    values = {**combination, RUN_FOLDER: str(folder)}
    filled = [_filled(word, values) for word in template]
    for name in unnamed(template, combination):
        value = combination[name]
        if value in ("true", "false"):
            filled.append(f"--{name}" if value == "true" else f"--no-{name}")
        elif value:
            filled += [f"--{name}", value]
    return filled


def unnamed(template: Sequence[str], names: Settings) -> list[str]:
    """The settings without a ``{name}`` in the command, which are appended to it."""
    return [name for name in names if not any(f"{{{name}}}" in word for word in template)]


def check_command(template: Sequence[str], combination: Settings) -> None:
    """Check that the command does not already have a setting that would be appended.

    Raises:
        RuleError: it does.

    """
    for name in unnamed(template, combination):
        for word in template:
            if _flag(word) == _flag(f"--{name}"):
                raise RuleError(
                    f"the command has {word.partition('=')[0]} already; take it out, or write "
                    f"{{{name}}} where the value goes"
                )


def words(combination: Settings) -> str:
    """A combination as people read it.

    >>> words({"max-num-seqs": "4", "dtype": ""})
    'max-num-seqs=4 dtype='
    """
    return " ".join(f"{name}={value}" for name, value in combination.items()) or "no settings"


def values_of(text: str) -> tuple[str, tuple[str, ...]]:
    """The name and the values of a ``--set``. A comma within brackets or quotes separates none.

    >>> values_of("block-size=16,32")
    ('block-size', ('16', '32'))
    >>> values_of('compilation-config={"mode":3,"level":1},')
    ('compilation-config', ('{"mode":3,"level":1}', ''))
    """
    name, equals, rest = text.partition("=")
    if not equals:
        raise RuleError(f"--set {text!r} has no '='; write --set max-num-seqs=1,4,16")
    values = tuple(_parted(rest))
    if len(set(values)) < len(values):
        raise RuleError(f"--set {text!r} has a value twice")
    return _name(name), values


def _crossed(sets: Sequence[str]) -> Iterator[Settings]:
    """Every value of each setting with every value of the others; the last one varies fastest."""
    parts = [values_of(text) for text in sets]
    names = [name for name, _ in parts]
    for name in names:
        if names.count(name) > 1:
            raise RuleError(f"{name} is set twice; give all its values to one --set")
    for values in itertools.product(*(values for _, values in parts)):
        yield dict(zip(names, values, strict=True))


def _listed(path: Path) -> Iterator[Settings]:
    """A combination a line, as a shell would split it: ``max-num-seqs=4 block-size=16``."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise RuleError(f"cannot read {path}: {why}") from None
    first: tuple[str, ...] | None = None
    for number, line in enumerate(lines, start=1):
        try:
            combination = _line(line)
        except (RuleError, ValueError) as error:
            raise RuleError(f"{path}, line {number}: {error}") from None
        if combination is None:
            continue
        names = tuple(sorted(combination))
        if names != (first := first or names):
            raise RuleError(
                f"{path}, line {number}: it sets {', '.join(names)}, and the first combination "
                f"{', '.join(first)}; set the same in each (an empty value leaves a flag out)"
            )
        yield combination
    if first is None:
        raise RuleError(f"{path} has no combination; write one a line, such as max-num-seqs=4")


def _line(line: str) -> Settings | None:
    combination: dict[str, str] = {}
    for word in shlex.split(line, comments=True):
        name, equals, value = word.partition("=")
        if not equals:
            raise RuleError(f"{word!r} has no '='; write max-num-seqs=4 block-size=16")
        if _name(name) in combination:
            raise RuleError(f"{name} is set twice")
        combination[_name(name)] = value
    return combination or None


def _name(text: str) -> str:
    name = text.strip().lstrip("-")
    if _NAME.fullmatch(name) is None or name == RUN_FOLDER:
        raise RuleError(f"{text!r} is not the name of a flag")
    return name


def _parted(text: str) -> Iterator[str]:
    depth, quote, begin = 0, "", 0
    for at, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth <= 0:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


def _filled(word: str, values: Settings) -> str:
    def value(match: re.Match[str]) -> str:
        return values.get(match[1], match[0])

    # In one pass: a value that looks like a placeholder is none.
    return re.sub(r"\{([\w.-]+)\}", value, word)


def _flag(word: str) -> str:
    """A flag in one spelling, without its value; vLLM takes dashes and underscores alike."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else ""
