# SPDX-License-Identifier: Apache-2.0
"""What differs between sessions, in their configuration and in each measure?

The first session is the baseline. A change is better or worse only where two sessions can be
compared: they ran the same model on requests of the same size, and both are complete and long
enough.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal

from analysis.errors import RuleError
from analysis.judgement import measures
from analysis.judgement.measures import Better, Measure
from analysis.judgement.summarizing import summarize
from analysis.summary import About, Summary
from analysis.tables.session import Session

ASKED = 0.01
"""Requests and prompt tokens of two sessions may differ by this share: a window cuts some off."""
ANSWERED = 0.05
"""Generated tokens may differ by this share: sampled answers differ in length."""
SHORTEST_SEC = 10.0
FEWEST_REQUESTS = 20
"""Of fewer values, the 95th percentile is hardly more than the largest one."""
SAME = 0.01
"""Changes up to this share get the verdict ``same``: two sessions of the same differ by as much."""

NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""The names of the sessions, in their order."""

_CONFIGURATION = (
    *("host", "versions", "device", "model", "cache", "groups", "parallel", "scheduler"),
    "cuda_graphs",
)

Verdict = Literal["better", "worse", "same"]


@dataclass(frozen=True)
class Setting:
    """A setting that differs between the sessions: its name in metadata.json, and its value in each
    session, None where that has none."""

    name: str
    values: tuple[str | None, ...]


@dataclass(frozen=True)
class Change:
    """The change of a measure from the baseline to another session.

    ``absolute``: in the measure's unit, None where either session has no value. ``relative``: as a
    share of the baseline's value, None where that is 0. ``verdict``: None for a measure without a
    direction, and for sessions that cannot be compared.
    """

    absolute: float | None
    relative: float | None
    verdict: Verdict | None


@dataclass(frozen=True)
class Row:
    """A measure, its value in each session, and its change from the baseline to each other one."""

    name: str
    unit: str
    better: Better | None
    values: tuple[float | None, ...]
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Comparison:
    """``sessions``: the baseline, then the others. ``doubts``: for each of the others, sentences
    that say why it cannot be compared with the baseline; none where it can."""

    sessions: tuple[About, ...]
    doubts: tuple[tuple[str, ...], ...]
    configuration: tuple[Setting, ...]
    measures: tuple[Row, ...]


def compare(*sessions: Session) -> Comparison:
    """Compare sessions with the first one, the baseline.

    Raises:
        RuleError: there are fewer than two sessions or more than 26, or one is given twice.
        SessionError: a table cannot be read.

    """
    if not 2 <= len(sessions) <= len(NAMES):
        raise RuleError(f"{len(sessions)} to compare; name 2 to {len(NAMES)} sessions")
    _all_different(sessions)
    found = [summarize(session) for session in sessions]
    baseline, *others = found
    doubted = tuple(
        tuple(doubts(baseline, other, NAMES[0], name))
        for name, other in zip(NAMES[1:], others, strict=False)
    )
    return Comparison(
        sessions=tuple(summary.session for summary in found),
        doubts=doubted,
        configuration=tuple(_differences([session.metadata for session in sessions])),
        measures=tuple(
            _row(measure, found, doubted)
            for measure in (*measures.CATALOGUE, *measures.of_keys(found))
        ),
    )


def doubts(baseline: Summary, other: Summary, first: str, second: str) -> Iterator[str]:
    """Why two sessions cannot be compared, in sentences that name them ``first`` and ``second``."""
    models = baseline.facts.model, other.facts.model
    if None in models:
        unknown = " and ".join(
            name for name, model in zip((first, second), models, strict=True) if model is None
        )
        yield f"The model of {unknown} is not known."
    elif models[0] != models[1]:
        yield f"The models differ: {models[0]} in {first}, {models[1]} in {second}."
    yield from _own_doubts(baseline, first)
    yield from _own_doubts(other, second)
    ours, theirs = other.requests, baseline.requests
    for what, value, base, allowed in (
        ("requests that ended", ours.ended, theirs.ended, ASKED),
        ("prompt tokens", ours.input_tokens, theirs.input_tokens, ASKED),
        ("generated tokens", ours.output_tokens, theirs.output_tokens, ANSWERED),
    ):
        if abs(value - base) > allowed * base:
            more = "more" if value > base else "fewer"
            yield (
                f"The requests differ: {second} has {abs(value - base):,} {more} {what} than "
                f"{first} ({value:,}, not {base:,})."
            )


def change(measure: Measure, before: float | None, after: float | None) -> Change:
    """The change of a measure between two sessions that can be compared."""
    if before is None or after is None:
        return Change(None, None, None)
    absolute = after - before
    relative = absolute / abs(before) if before else None
    verdict: Verdict | None = None
    if measure.better is not None:
        small = absolute == 0 if relative is None else abs(relative) <= SAME
        better = (absolute > 0) == (measure.better == "higher")
        verdict = "same" if small else "better" if better else "worse"
    return Change(absolute, relative, verdict)


def _own_doubts(found: Summary, name: str) -> Iterator[str]:
    if found.session.state != "complete":
        state = "still running" if found.session.state == "running" else "cut off"
        yield f"{name} is {state}: {found.session.note}."
    seconds = found.session.duration_sec - found.session.begin_sec
    if seconds < SHORTEST_SEC:
        yield f"{name} is too short: {seconds:.3g} s, and {SHORTEST_SEC:g} s are needed."
    if found.requests.ended < FEWEST_REQUESTS:
        yield (
            f"{name} is too short: {found.requests.ended:,} requests have ended, and "
            f"{FEWEST_REQUESTS} are needed."
        )


def _row(measure: Measure, found: Sequence[Summary], doubted: Sequence[Sequence[str]]) -> Row:
    values = tuple(map(measure.of, found))
    changes = []
    for value, why in zip(values[1:], doubted, strict=True):
        changed = change(measure, values[0], value)
        changes.append(replace(changed, verdict=None) if why else changed)
    return Row(measure.name, measure.unit, measure.better, values, tuple(changes))


def _differences(configurations: Sequence[Mapping[str, Any]]) -> Iterator[Setting]:
    flat = [
        dict(chain.from_iterable(_flat(part, metadata.get(part)) for part in _CONFIGURATION))
        for metadata in configurations
    ]
    for name in dict.fromkeys(chain.from_iterable(flat)):
        values = tuple(settings.get(name) for settings in flat)
        if len(set(values)) > 1:
            yield Setting(name, values)


def _flat(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """The settings in a part of metadata.json, by their dotted names; without null ones."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{name}.{key}", item)
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _flat(f"{name}[{number}]", item)
    elif value is not None:
        yield name, value if isinstance(value, str) else json.dumps(value)


def _all_different(sessions: Sequence[Session]) -> None:
    seen: dict[Any, str] = {}
    for name, session in zip(NAMES, sessions, strict=False):
        place = session.url or session.directory.resolve()
        if place in seen:
            shown = session.url or session.directory
            raise RuleError(f"{seen[place]} and {name} are the same session: {shown}")
        seen[place] = name
