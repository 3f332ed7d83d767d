# SPDX-License-Identifier: Apache-2.0
"""Make the picture of ``profilemate live`` in the docs, of the demo's server under its load.

    python -m scripts.live_picture [--session FOLDER] [--seconds S]

It runs the demo, waits until requests run, watches them for some seconds and has Textual export
what it shows. With --session it watches that session instead.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path

from analysis.errors import SessionError
from profilemate.live.app import LiveApp
from profilemate.live.reading import Engine, look

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "live.svg"
SESSIONS = ROOT / ".demo" / "sessions"
SIZE = (92, 32)
START_SECONDS = 400


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--session", type=Path)
    parser.add_argument("--seconds", type=float, default=7, help="how long it watches")
    options = parser.parse_args()
    if options.session:
        asyncio.run(take(options.session, options.seconds))
        return 0
    before = set(SESSIONS.glob("session_*"))
    demo = subprocess.Popen([sys.executable, str(ROOT / "demo" / "run.py")], cwd=ROOT)
    try:
        asyncio.run(take(busy_session(before, demo), options.seconds))
        return demo.wait()
    finally:
        demo.terminate()
        demo.wait()


def busy_session(before: set[Path], demo: subprocess.Popen[bytes]) -> Path:
    """The demo's session, as soon as requests run in it."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and demo.poll() is None:
        for session in set(SESSIONS.glob("session_*")) - before:
            if any(engine.running for engine in _engines(session)):
                return session
        time.sleep(0.2)
    raise SystemExit("the demo ended, or no request ran")


async def take(session: Path, seconds: float) -> None:
    """Watch the session for so long, then write the picture."""
    app = LiveApp([session], 1.0)
    async with app.run_test(size=SIZE) as pilot:
        await pilot.pause(seconds)
        picture = app.export_screenshot(title="profilemate live")
    # A picture fetches no fonts; each piece of text has its length, whatever font it is in.
    PICTURE.write_text(re.sub(r"@font-face \{.*?\n    \}\s*", "", picture, flags=re.DOTALL))


def _engines(session: Path) -> tuple[Engine, ...]:
    try:
        return look(session).engines
    except SessionError:
        return ()


if __name__ == "__main__":
    sys.exit(main())
