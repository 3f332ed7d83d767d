# SPDX-License-Identifier: Apache-2.0
"""Make the runs of a sweep, one after the other, each with a result."""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from analysis.sweep import RANKED, figure
from analysis.tables.metadata import number
from profilemate import config, door
from profilemate.sweep import baseline, benchmarks, folder, logs, measuring, running, settings
from profilemate.sweep.folder import LOG_FILE, SESSIONS, Plan, Planned
from profilemate.sweep.progress_line import Progress
from profilemate.sweep.running import Ended, Interrupts

_ELSEWHERE = (config.SWITCH, config.ENABLE_SWITCH, config.SESSION, config.FAILED)
"""Variables of the caller's shell that would send a run's session elsewhere, or keep it from being
recorded."""


_OF_RAY = ("RAY_", "OMP_NUM_THREADS")


def sweep(
    plan: Plan,
    directory: Path,
    *,
    lock: int,
    interrupts: Interrupts,
    time_limit: float | None,
    retry_failed: bool,
) -> None:
    """Make every run that has no result yet.

    A KeyboardInterrupt stops the current run, with all its processes. The next sweep in the folder
    makes it anew.
    """
    runs = list(plan.runs(directory))
    done = {run.folder: folder.result_of(run) for run in runs}
    pending = to_make(runs, retry_failed=retry_failed)
    known = [number(each.get("seconds")) for each in done.values() if each]
    progress = Progress(len(runs), list(filter(None, known)))
    for before, run in enumerate(pending):
        progress.begin(runs.index(run) + 1, run.name, len(pending) - before)
        try:
            result = made(
                plan,
                run,
                lock=lock,
                interrupts=interrupts,
                time_limit=time_limit,
                tick=progress.tick,
            )
        finally:
            progress.stop()
        folder.write_result(run, result)
        progress.end(result["seconds"], outcome_of(result))


def commands(plan: Plan, directory: Path) -> Iterator[str]:
    """Every run's command, in a form that a shell takes."""
    for run in plan.runs(directory):
        own = [f"{name}={shlex.quote(value)}" for name, value in _variables(run).items()]
        yield " ".join([*own, shlex.join(_command(plan, run))])


def to_make(runs: Sequence[Planned], *, retry_failed: bool) -> list[Planned]:
    """The runs that have no result yet, or none that counts."""
    return [run for run in runs if _is_pending(folder.result_of(run), retry_failed)]


def _is_pending(result: Mapping[str, Any] | None, retry_failed: bool) -> bool:
    return result is None or (retry_failed and result.get("state") != "done")


def made(
    plan: Plan,
    run: Planned,
    *,
    lock: int,
    interrupts: Interrupts,
    time_limit: float | None,
    tick: Callable[[float], None],
    recorder: str | None = None,
) -> dict[str, Any]:
    """Make one run in its folder; returns its result, which is not written yet.

    Args:
        plan: the sweep.
        run: the run.
        lock: a file that its command holds open.
        interrupts: one of these stops it.
        time_limit: it is stopped after so many seconds.
        tick: called, again and again, with the seconds that it has run.
        recorder: the folder for its PYTHONPATH; profilemate's own by default.

    Raises:
        KeyboardInterrupt: an interrupt came.

    """
    folder.make_anew(run)
    (run.folder / SESSIONS).mkdir(mode=0o700)
    log, command, began = run.folder / LOG_FILE, _command(plan, run), time.time()
    ended = running.run(
        command,
        _environment(run, recorder),
        log,
        time_limit=time_limit,
        lock=lock,
        interrupts=interrupts,
        began=lambda pid: folder.held_by(lock, pid),
        tick=tick,
    )
    folder.held_by(lock, os.getpid())
    text = logs.tail(log)
    outcome = {
        "exit_code": ended.exit_code,
        "seconds": round(ended.seconds, 3),
        "log": LOG_FILE,
        "cores": len(os.sched_getaffinity(0)),
        "others_cores": ended.others_cores,
    }
    why = _why(ended, text, time_limit)
    if why is not None:
        return {"state": "timed out" if ended.timed_out else "failed", "why": why, **outcome}
    if run.settings is None:
        return {**outcome, **_of_baseline(run, ended)}
    said = benchmarks.said(text, command, began)
    found = measuring.measured(run.folder / SESSIONS, said, command)
    figures = {**found.figures, **_host_memory(ended)}
    notes = list(found.notes)
    if ended.left_behind:
        notes.append("The command left processes running, which were ended.")
    return {
        "state": "done",
        "why": None,
        **outcome,
        "session": found.session,
        "source": found.source,
        "figures": figures,
        "requests": found.requests,
        "input_lengths": found.input_lengths,
        "versions": found.versions,
        "device": found.device,
        "notes": notes,
    }


def _of_baseline(run: Planned, ended: Ended) -> dict[str, Any]:
    result = baseline.result(run.folder)
    if result is None or not result["seconds"]:
        return {"state": "failed", "why": f"it wrote no {baseline.RESULT}"}
    seconds, output = result["seconds"], result["output_tokens"]
    figures = {
        "output_tokens_per_sec": output / seconds,
        "total_tokens_per_sec": (result["input_tokens"] + output) / seconds,
        "requests_per_sec": result["requests"] / seconds,
        **_host_memory(ended),
    }
    if result["gpu_memory_bytes"] is not None:
        figures["gpu_memory_bytes"] = result["gpu_memory_bytes"]
    return {
        "state": "done",
        "why": None,
        "source": "output",
        "figures": figures,
        "requests": {
            "ended": result["requests"],
            "input_tokens": result["input_tokens"],
            "output_tokens": output,
        },
        "input_lengths": Counter(result["input_lengths"]),
        "prompts_digest": result["prompts_digest"],
        "device": result["device"],
        "notes": [_RANDOM] if result["weights"] == "random" else [],
    }


_RANDOM = "The baseline's weights are random, as --load-format dummy has it."


def _host_memory(ended: Ended) -> dict[str, float]:
    peak = ended.peak_memory_bytes
    return {"host_memory_bytes": peak} if peak else {}


def _why(ended: Ended, log: str, time_limit: float | None) -> str | None:
    """Why the run failed; None where it did not."""
    if ended.problem is not None:
        return ended.problem
    if ended.timed_out:
        return f"it took over {time_limit:g} s and was stopped"
    last = logs.telling_line(log)
    said = f": {last}" if last else ", and wrote nothing"
    code = ended.exit_code
    if code is not None and code < 0:
        return f"it was ended by {_signal_name(-code)}{said}"
    return f"exit code {code}{said}" if code else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def outcome_of(result: Mapping[str, Any]) -> str:
    """A run's outcome in a line."""
    if result["state"] != "done":
        return f"failed, {result['why']}"
    for name in RANKED:
        if name in result["figures"]:
            known = figure(name)
            return f"{result['figures'][name]:,.1f} {known.heading}"
    return "done, without tokens per second"


def _command(plan: Plan, run: Planned) -> list[str]:
    if run.settings is not None:
        return settings.command(plan.command, run.settings, run.folder)
    size = int((plan.baseline or {})["batch_size"])
    return baseline.command(plan.command, plan.combinations[0], run.folder, size)


def _variables(run: Planned, recorder: str | None = None) -> dict[str, str]:
    """A run's own environment variables. The baseline is not vLLM, and is not recorded."""
    if run.settings is None:
        return {config.SWITCH: "0"}
    path = door.pythonpath(os.environ.get("PYTHONPATH"))
    if recorder is not None:
        path = os.pathsep.join([recorder, path])
    return {"PYTHONPATH": path, config.DIRECTORY: str(run.folder / SESSIONS)}


def _environment(run: Planned, recorder: str | None) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}
    if recorder is not None:
        # Ray tells its own process by these how many threads to use, and which job it is of.
        kept = {name: kept[name] for name in kept if not name.startswith(_OF_RAY)}
    return kept | _variables(run, recorder)
