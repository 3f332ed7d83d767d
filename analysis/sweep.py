# SPDX-License-Identifier: Apache-2.0
"""What were the results of each setting of a sweep, and is one of them the best?

They come from the folder that ``profilemate sweep`` writes. A setting is the best only if its worst
run is better than every run of every other setting. With one run of each no setting is: it is not
known by how much two runs of the same setting differ.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from analysis.errors import SessionError
from analysis.judgement.comparison import ANSWERED, ASKED
from analysis.tables.metadata import listed, number, part, text, whole

PLAN_FILE = "sweep.json"
RESULT_FILE = "result.json"
VERSION = 1

State = Literal["done", "failed", "timed out"]

RANKED = ("output_tokens_per_sec", "total_tokens_per_sec", "requests_per_sec")
"""Settings are ranked by the first of these figures that every run has."""

BUSY = 0.25
"""Notes mention other processes that kept more than this share of the machine's cores busy."""


@dataclass(frozen=True)
class Figure:
    """A figure by which runs are compared. ``unit``: as in ``analysis.judgement.measures``.
    ``heading``: a word or two, for tables. ``says``: what it is, in a sentence."""

    name: str
    unit: str
    heading: str
    says: str


FIGURES = (
    Figure("output_tokens_per_sec", "tokens/s", "output tok/s", "Generated tokens a second."),
    Figure(
        "total_tokens_per_sec",
        "tokens/s",
        "total tok/s",
        "Prompt tokens and generated tokens a second.",
    ),
    Figure("requests_per_sec", "requests/s", "requests/s", "Requests that ended a second."),
    Figure("latency_sec", "s", "latency", "How long a batch of `vllm bench latency` took, mean."),
    Figure("blocks", "blocks", "blocks", "Blocks of the KV cache, as vLLM counts them."),
    Figure("kv_tokens", "tokens", "KV tokens", "Tokens that the KV cache has room for."),
    Figure("waste", "share", "waste", "Slots of held blocks without a token, as requests end."),
    Figure("hit_rate", "share", "hits", "Prompt tokens found in the prefix cache."),
    Figure("preemptions", "times", "preempt.", "How often a running request was preempted."),
    Figure("evictions", "blocks", "evicted", "Cached blocks that lost their content."),
    Figure("usage_peak_pct", "%", "peak use", "The highest usage of the KV cache."),
    Figure("gpu_memory_bytes", "bytes", "GPU mem.", "The most memory in use on a GPU."),
    Figure(
        "host_memory_bytes",
        "bytes",
        "host mem.",
        "The most memory of the largest process of the command.",
    ),
)
_BY_NAME = {figure.name: figure for figure in FIGURES}


@dataclass(frozen=True)
class Repeated:
    """A figure over ``count`` runs of a setting: its median, its least and its most."""

    median: float
    least: float
    most: float
    count: int


@dataclass(frozen=True)
class Run:
    """One run. ``settings``: None for a run of the baseline. ``why``: why it failed, else None.
    ``log``: the file with its output. ``session``: its session's folder. ``source``: where its
    rates are from: the benchmark's ``output``, its ``json``, or the ``session``. ``others_cores``:
    how many of the machine's ``cores`` other processes kept busy meanwhile."""

    settings: Mapping[str, str] | None
    repeat: int
    state: State
    why: str | None
    exit_code: int | None
    seconds: float | None
    log: str
    session: str | None
    source: str | None
    figures: Mapping[str, float]
    requests: Mapping[str, int]
    versions: Mapping[str, str]
    device: str | None
    cores: int | None
    others_cores: float | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Combination:
    """One combination of settings over its runs. ``done`` and ``failed``: how many. ``why`` and
    ``log``: of the last one that failed. ``speed_up``: the median of the ranked figure by that of
    the baseline. ``best``: whether it is the best; ``close``: whether it may be, as far as the
    spread of the runs shows."""

    settings: Mapping[str, str]
    done: int
    failed: int
    why: str | None
    log: str | None
    figures: Mapping[str, Repeated]
    speed_up: float | None
    best: bool
    close: bool


@dataclass(frozen=True)
class Baseline:
    """The Hugging Face baseline. ``batch_size``: prompts in a batch. ``why``: why its last run
    failed. ``same_prompts``: whether the runs have a request as long as each of its prompts; None
    where that is not known."""

    kind: str
    batch_size: int | None
    done: int
    failed: int
    why: str | None
    log: str | None
    figures: Mapping[str, Repeated]
    same_prompts: bool | None


@dataclass(frozen=True)
class Sweep:
    """``ranked``: the figure by which settings are ranked, None where no run has one. ``no_best``:
    why no setting is the best, None where one is. ``unfinished``: runs that are still to do.
    ``doubts``: why the runs cannot be compared. ``notes``: what else there is to know. Both are
    sentences."""

    directory: str
    command: tuple[str, ...]
    repeats: int
    combinations: tuple[Combination, ...]
    baseline: Baseline | None
    runs: tuple[Run, ...]
    unfinished: int
    ranked: str | None
    no_best: str | None
    doubts: tuple[str, ...]
    notes: tuple[str, ...]


def figure(name: str) -> Figure:
    """The figure with this name."""
    return _BY_NAME[name]


def read(directory: Path) -> Sweep:
    """The results of the sweep in this folder, as far as it went.

    Raises:
        SessionError: there is no sweep, or it cannot be read.

    """
    plan = _json(directory / PLAN_FILE)
    if plan.get("sweep_version") != VERSION:
        raise SessionError(
            f"{directory / PLAN_FILE} is of format {plan.get('sweep_version')!r}, and this reads "
            f"{VERSION}; use the profilemate that wrote it, or a newer one"
        )
    combinations = [dict(each) for each in listed(plan.get("combinations"))]
    repeats = whole(plan.get("repeats")) or 1
    planned = part(plan, "baseline")
    results = [(path, _json(path)) for path in sorted(directory.glob(f"*/{RESULT_FILE}"))]
    runs = tuple(_run(path.parent, result) for path, result in results)
    tried = [run for run in runs if run.settings is not None]
    compared = [run for run in runs if run.state == "done"]
    ranked = _ranked(compared)
    same = _same_prompts([result for _, result in results])
    base = (
        _baseline(planned, [run for run in runs if run.settings is None], same) if planned else None
    )
    against = base.figures.get(ranked) if base and ranked else None
    found = [_combination(each, tried, ranked, against) for each in combinations]
    doubts = tuple(_doubts([run for run in compared if run.settings is not None]))
    best, no_best = _best(found, ranked, doubts)
    wanted = repeats * (len(combinations) + bool(planned))
    return Sweep(
        directory=str(directory.absolute()),
        command=tuple(str(word) for word in listed(plan.get("command"))),
        repeats=repeats,
        combinations=tuple(_marked(found, best, ranked)),
        baseline=base,
        runs=runs,
        unfinished=wanted - len(runs),
        ranked=ranked,
        no_best=no_best,
        doubts=doubts,
        notes=tuple(_notes(runs)),
    )


def _run(folder: Path, result: Mapping[str, Any]) -> Run:
    settings = result.get("settings")
    session = text(result.get("session"))
    counts = _numbers(part(result, "requests"))
    return Run(
        settings=settings if isinstance(settings, Mapping) else None,
        repeat=whole(result.get("repeat")) or 1,
        state=_state(result.get("state")),
        why=text(result.get("why")),
        exit_code=result.get("exit_code") if isinstance(result.get("exit_code"), int) else None,
        seconds=number(result.get("seconds")),
        log=str((folder / str(result.get("log"))).absolute()),
        session=session and str((folder / "sessions" / session).absolute()),
        source=text(result.get("source")),
        figures=_numbers(part(result, "figures")),
        requests={name: int(value) for name, value in counts.items()},
        versions={name: str(value) for name, value in part(result, "versions").items()},
        device=text(result.get("device")),
        cores=whole(result.get("cores")),
        others_cores=number(result.get("others_cores")),
        notes=tuple(str(note) for note in listed(result.get("notes"))),
    )


def _same_prompts(results: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether every run has a request as long as each prompt of the baseline."""
    done = [result for result in results if result.get("state") == "done"]
    lengths = [
        (result.get("settings") is None, Counter(_numbers(part(result, "input_lengths"))))
        for result in done
    ]
    drawn = [counts for is_baseline, counts in lengths if is_baseline and counts]
    asked = [counts for is_baseline, counts in lengths if not is_baseline and counts]
    if not drawn or not asked:
        return None
    return all(ours <= theirs for ours in drawn for theirs in asked)


def _state(value: Any) -> State:
    if value == "done":
        return "done"
    return "timed out" if value == "timed out" else "failed"


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    read = {name: number(value) for name, value in values.items()}
    return {name: value for name, value in read.items() if value is not None}


def _json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SessionError(f"no sweep in {path.parent}: {path.name} is not there") from None
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or "it is not JSON"
        raise SessionError(f"cannot read {path}: {why}") from None
    if not isinstance(content, Mapping):
        raise SessionError(f"cannot read {path}: it is not a JSON object")
    return content


def _ranked(runs: Sequence[Run]) -> str | None:
    for name in RANKED:
        if runs and all(name in run.figures for run in runs):
            return name
    return None


def _figures(runs: Sequence[Run]) -> dict[str, Repeated]:
    found = {}
    for known in FIGURES:
        values = [run.figures[known.name] for run in runs if known.name in run.figures]
        if values:
            found[known.name] = Repeated(
                statistics.median(values), min(values), max(values), len(values)
            )
    return found


def _combination(
    settings: Mapping[str, str],
    runs: Sequence[Run],
    ranked: str | None,
    against: Repeated | None,
) -> Combination:
    mine = [run for run in runs if run.settings == settings]
    done = [run for run in mine if run.state == "done"]
    failed = [run for run in mine if run.state != "done"]
    figures = _figures(done)
    speed_up = None
    if ranked in figures and against is not None and against.median:
        speed_up = figures[ranked].median / against.median
    return Combination(
        settings=settings,
        done=len(done),
        failed=len(failed),
        why=failed[-1].why if failed else None,
        log=failed[-1].log if failed else None,
        figures=figures,
        speed_up=speed_up,
        best=False,
        close=False,
    )


def _baseline(planned: Mapping[str, Any], runs: Sequence[Run], same: bool | None) -> Baseline:
    done = [run for run in runs if run.state == "done"]
    failed = [run for run in runs if run.state != "done"]
    return Baseline(
        kind=str(planned.get("kind")),
        batch_size=whole(planned.get("batch_size")),
        done=len(done),
        failed=len(failed),
        why=failed[-1].why if failed else None,
        log=failed[-1].log if failed else None,
        figures=_figures(done),
        same_prompts=same,
    )


def _best(
    found: Sequence[Combination], ranked: str | None, doubts: Sequence[str]
) -> tuple[int | None, str | None]:
    """The place of the best combination, or why none is the best."""
    if ranked is None:
        return None, "no figure is known of every run"
    rivals = [place for place, each in enumerate(found) if ranked in each.figures]
    if len(rivals) < 2:
        return None, "there are not two settings to compare"
    if doubts:
        return None, "the runs cannot be compared"
    if any(found[place].figures[ranked].count < 2 for place in rivals):
        return None, (
            "with one run of a setting, a difference may be chance: --repeat 3 makes three of each"
        )
    first = max(rivals, key=lambda place: found[place].figures[ranked].least)
    worst = found[first].figures[ranked].least
    if all(found[place].figures[ranked].most < worst for place in rivals if place != first):
        return first, None
    return None, "no setting's worst repeat is better than every other's best"


def _marked(
    found: Sequence[Combination], best: int | None, ranked: str | None
) -> Iterator[Combination]:
    """The combinations; the best one is marked, or those that it may be."""
    known = [each.figures[ranked] for each in found if ranked in each.figures] if ranked else []
    least = max((figure.least for figure in known), default=0.0)
    repeated = all(figure.count > 1 for figure in known)
    for place, each in enumerate(found):
        figure = each.figures.get(ranked) if ranked else None
        if place == best:
            yield replace(each, best=True)
        elif best is None and repeated and figure is not None:
            yield replace(each, close=figure.most >= least)
        else:
            yield each


def _doubts(runs: Sequence[Run]) -> Iterator[str]:
    """Why finished runs cannot be compared."""
    sources = sorted({run.source or "nowhere" for run in runs})
    if len(sources) > 1:
        yield f"Tokens a second are from {' and '.join(sources)}, which are not the same figure."
    for name, what in (("vllm", "vLLM releases"), ("torch", "PyTorch releases")):
        versions = sorted({run.versions[name] for run in runs if name in run.versions})
        if len(versions) > 1:
            yield f"The runs had several {what}: {', '.join(versions)}."
    for name, what, allowed in (
        ("ended", "requests that ended", ASKED),
        ("input_tokens", "prompt tokens", ASKED),
        ("output_tokens", "generated tokens", ANSWERED),
    ):
        counts = [run.requests[name] for run in runs if name in run.requests]
        if counts and max(counts) - min(counts) > allowed * min(counts):
            yield f"The requests differ: from {min(counts):,} to {max(counts):,} {what} in a run."


def _notes(runs: Sequence[Run]) -> Iterator[str]:
    busy = [run for run in runs if run.cores and (run.others_cores or 0) > BUSY * run.cores]
    if busy:
        most = max(busy, key=lambda run: run.others_cores or 0)
        yield (
            f"The machine was shared: in {len(busy)} of {len(runs)} runs other processes kept over "
            f"{100 * BUSY:g} % of its cores busy, in one of them {most.others_cores:.1f} of "
            f"{most.cores}. Speeds are lower and differ more than on an idle one."
        )
    for note in dict.fromkeys(note for run in runs for note in run.notes):
        count = sum(note in run.notes for run in runs)
        yield f"{note} ({count} of {len(runs)} runs)"
