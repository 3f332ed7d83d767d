# SPDX-License-Identifier: Apache-2.0
"""The terminal view, driven by Textual's own pilot."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Static

from profilemate.live import snapshots
from profilemate.live.app import Frame, LiveApp
from profilemate.record import recorder
from tests.analysis.invoke import invoke
from tests.live.figures import totals, write
from tests.live.running import Running
from tests.support import segments
from tests.support.scheduler import tokens

Act = Callable[[LiveApp, Pilot[None]], Awaitable[None]]
ROOT = Path(__file__).parents[2]


def drive(sessions: list[Path], act: Act, size: tuple[int, int] = (80, 24)) -> None:
    """Show the sessions, and act. No look is taken but the first, and those that ``act`` takes."""

    async def run() -> None:
        app = LiveApp(sessions, 3600.0)
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await act(app, pilot)

    asyncio.run(run())


def shown(app: LiveApp) -> str:
    """The words of the frame."""
    return "\n".join(line.plain for line in app.query_one(Frame).lines)


def screen(app: LiveApp) -> str:
    """What is on the screen: lines that were not drawn anew are as they were."""
    strips = app.screen._compositor.render_strips()
    return "\n".join(strip.text.rstrip() for strip in strips)


def status(app: LiveApp) -> str:
    return str(app.query_one("#status", Static).content)


def engine_of(rank: int, held: int, waiting: int) -> dict[str, Any]:
    (known,) = totals()["engines"]
    pool = {**known["pools"][0], "held_blocks": held, "free_blocks": 75 - held}
    requests = {**known["requests"], "waiting": waiting}
    return known | {"engine": rank, "pools": [pool], "requests": requests, "lost": []}


def session(folder: Path, **changes: Any) -> Path:
    write(folder, totals(**changes))
    (folder / "metadata.json").write_text('{"format_version": 1}')
    return folder


def test_it_shows_what_the_scheduler_does(live: Running) -> None:
    live.add("first", tokens(1, 64), 100)
    live.step(5)
    live.write()

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        assert "1 request running, 0 waiting" in screen(app)
        for number in range(5):
            live.add(f"more-{number}", tokens(2, 10), 50)
        live.step(5)
        live.write()
        await app.look()
        await pilot.pause()
        assert "4 requests running, 2 waiting (as many run as may)" in screen(app)
        assert "more-0" in shown(app)

    drive([live.folder], act)


def test_what_is_drawn_is_what_is_on_the_screen(live: Running) -> None:
    """Only lines that changed are drawn anew, while there come to be more and fewer of them."""
    live.add("first", tokens(1, 64), 100)
    live.step(5)
    live.write()

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        frame = app.query_one(Frame)
        for number in range(6):
            if number == 3:
                live.abort("first")
            else:
                live.add(f"again-{number}", tokens(3, 20), 9)
            live.step(3)
            live.write()
            await app.look()
            await pilot.pause()
            expected = [line.plain.rstrip() for line in frame.lines]
            *rows, _, _ = screen(app).split("\n")
            assert [row for row in rows if row] == [row for row in expected if row]
            assert frame.virtual_size.height == len(frame.lines)

    drive([live.folder], act, (100, 50))


def test_pause_keeps_what_is_shown(live: Running) -> None:
    live.add("first", tokens(1, 64), 100)
    live.step(5)
    live.write()

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        await pilot.press("p")
        assert status(app).startswith("PAUSED")
        live.abort("first")
        live.step(2)
        live.write()
        await app.look()
        assert "1 request running" in shown(app)
        await pilot.press("p")
        await app.look()
        assert "0 requests running" in shown(app)
        assert "PAUSED" not in status(app)

    drive([live.folder], act)


def test_the_next_session(tmp_path: Path) -> None:
    first = session(tmp_path / "session_1", session_id="session_1")
    other = session(tmp_path / "session_2", session_id="session_2", ended=True)

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        assert "session_1  running" in shown(app)
        assert "session 1 of 2" in status(app)
        await pilot.press("n")
        assert "session_2  ended" in shown(app)
        await pilot.press("n")
        assert "session_1" in shown(app)

    drive([first, other], act)


def test_engines_are_sorted(tmp_path: Path) -> None:
    engines = [engine_of(0, 10, 5), engine_of(1, 50, 1), engine_of(2, 30, 9)]
    folder = session(tmp_path / "session_1", engines=engines)

    def order(app: LiveApp) -> list[str]:
        lines = shown(app).splitlines()
        return [line.split()[1] for line in lines if line.startswith("Engine") and "%" in line]

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        assert order(app) == ["0", "1", "2"]
        await pilot.press("o")
        assert "by usage" in status(app)
        assert order(app) == ["1", "2", "0"]
        await pilot.press("o")
        assert "by waiting" in status(app)
        assert order(app) == ["2", "0", "1"]

    drive([folder], act)


def test_holders_are_sorted(live: Running) -> None:
    live.add("old", tokens(1, 16), 100)
    live.step(2)
    live.add("large", tokens(2, 200), 100)
    live.step(2)
    live.write()

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        words = shown(app)
        assert words.index("old ") < words.index("large ")
        await pilot.press("h")
        words = shown(app)
        assert words.index("large ") < words.index("old ")

    drive([live.folder], act)


def test_prefixes_are_sorted(live: Running) -> None:
    for name, prompt in (("a", tokens(1, 320)), ("b", [*tokens(1, 320), 7])):
        live.add(name, prompt, 1)
        live.step(2)
    for number in range(5):
        live.add(f"short-{number}", [*tokens(7, 32), *tokens(20 + number, 20)], 1)
        live.step(2)
    live.write()

    def order(app: LiveApp) -> list[str]:
        lines = shown(app).splitlines()
        return [line.split("  ")[0] for line in lines if re.match(r"\d+ to \d+ ", line)]

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        assert "prefixes by tokens saved" in status(app)
        assert order(app) == ["0 to 320", "0 to 32"]
        await pilot.press("f")
        assert "prefixes by requests" in status(app)
        assert order(app) == ["0 to 32", "0 to 320"]

    drive([live.folder], act, (100, 60))


def test_a_session_that_goes_is_a_note(tmp_path: Path) -> None:
    folder = session(tmp_path / "session_1")

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        (folder / "totals.json").write_text("{")
        await app.look()
        assert "totals.json is damaged" in shown(app).replace("\n", " ")
        shutil.rmtree(folder)
        await app.look()
        assert "Note: the session's folder is gone" in shown(app)
        assert "Engine 4" in shown(app)

    drive([folder], act)


def test_one_that_has_no_figures_yet(tmp_path: Path) -> None:
    folder = tmp_path / "session_1"
    (folder / "journal").mkdir(parents=True)

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        assert "Note: no totals.json yet" in shown(app)
        session(folder)
        await app.look()
        assert "Engine 4" in shown(app)
        await pilot.press("o", "h", "p")

    drive([folder], act)


@pytest.mark.parametrize("size", [(5, 3), (20, 5), (80, 24), (200, 60)])
def test_any_size(live: Running, size: tuple[int, int]) -> None:
    live.add("first", tokens(1, 64), 100)
    live.step(5)
    live.write()

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert "40 blocks" in screen(app)
        await pilot.resize_terminal(*size)
        await pilot.pause()
        assert len(app.query_one(Frame).lines) > 10
        await pilot.press("end")
        if size[0] >= 80:
            await pilot.pause()
            assert "On disk" in screen(app)

    drive([live.folder], act, size)


def snapshot_says(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *command: str, program: str = sys.executable
) -> str:
    monkeypatch.setattr(snapshots, "command", lambda session: [program, *command])
    said = ""

    async def act(app: LiveApp, pilot: Pilot[None]) -> None:
        nonlocal said
        await pilot.press("s")
        for _ in range(200):
            await pilot.pause(0.1)
            if "taking" not in status(app):
                break
        said = status(app).partition(";")[0]

    drive([folder], act)
    return said


def test_a_snapshot_shows_the_command_s_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = session(tmp_path / "session_1")
    good = "import sys; print('one\\n/kept/snap\\x1b[31mshot')"
    said = snapshot_says(monkeypatch, folder, "-c", good)
    assert said == r"snapshot: /kept/snap\x1b[31mshot"
    bad = "import sys; sys.exit('profilemate: the disk is full')"
    said = snapshot_says(monkeypatch, folder, "-c", bad)
    assert said == "no snapshot: profilemate: the disk is full"
    said = snapshot_says(monkeypatch, folder, program=str(tmp_path / "nowhere"))
    assert said == "no snapshot: No such file or directory"


def test_a_snapshot_of_a_session_that_was_cut(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real command, on the real scheduler's session."""
    for number in range(12):
        live.add(f"request {number}", tokens(number % 3, 100), 10)
        live.step(20)
    live.write()
    live.end()
    segments.cut_at(live.folder, 0.5, 1.0)
    program, *command = snapshots.command(live.folder)
    said = snapshot_says(monkeypatch, live.folder, *command, program=program)
    path = Path(said.partition("snapshot: ")[2])
    assert path.name.startswith(f"{live.folder.name}_snapshot_")
    kept, whole = (
        json.loads(invoke("summary", each, "--json").stdout) for each in (path, live.folder)
    )
    for key in ("usage", "allocations", "requests", "lifetimes"):
        assert kept[key] == whole[key]


def test_a_paused_session_says_so(live: Running) -> None:
    (recording,) = recorder._living()
    live.add("request", tokens(1, 100), 200)
    live.step(5)
    live.write()
    assert "is paused" not in once(live)
    recording.wants_pause = True
    live.step(5)
    live.write()
    found = once(live)
    assert "the recording of engine 0 is paused since" in found
    assert "'profilemate resume' goes on" in found
    recording.wants_pause = False
    live.step(5)
    live.write()
    found = once(live)
    assert "is paused" not in found
    assert "as the recording was paused" in found


def once(live: Running) -> str:
    """What one look shows, in one line."""
    return " ".join(invoke("live", live.folder, "--once").stdout.split())


def test_without_textual_a_line_says_what_to_install(tmp_path: Path) -> None:
    folder = session(tmp_path / "session_1")
    code = """
import sys
sys.modules["textual"] = None
for stream in (sys.stdin, sys.stdout, sys.stderr):
    stream.isatty = lambda: True
sys.argv = ["profilemate", "live", *sys.argv[1:]]
from profilemate.cli import main
main()
"""

    def said(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code, *arguments, str(folder)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    without = said()
    assert without.returncode == 2
    assert f"pip install '{ROOT}[analysis]'; --once prints one frame" in without.stderr
    assert without.stderr.count("\n") == 1
    assert "Engine 4" in said("--once", "--interval", "0.2").stdout
    assert invoke("live", "--help").returncode == 0
