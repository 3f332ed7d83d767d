# SPDX-License-Identifier: Apache-2.0
"""Run the example notebook anew, and make its picture in the docs.

    python -m scripts.notebook_example SESSION

The outputs say that SESSION lies where sessions lie by default, and name no folder of yours. The
picture needs a browser (``make browser``).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
from nbconvert import HTMLExporter
from nbconvert.preprocessors import ExecutePreprocessor
from playwright.sync_api import sync_playwright

from scripts.browser import HOW, start_first

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "notebook" / "session.ipynb"
PICTURE = ROOT / "docs" / "images" / "notebook.png"
DEFAULT = "/tmp/vllm_profiling"
WIDTH, MARGIN = 900, 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("session", type=Path)
    session: Path = parser.parse_args().session
    nbformat.write(shown(executed(NOTEBOOK, session), session), NOTEBOOK)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "notebook.html")
        # As a page it needs plotly.js beside the figures.
        notebook = shown(executed(NOTEBOOK, session, renderer="notebook"), session)
        page.write_text(HTMLExporter().from_notebook_node(notebook)[0])
        photograph(page)
    return 0


def executed(path: Path, session: Path, *, renderer: str = "plotly_mimetype") -> Any:
    """The notebook with the outputs of a kernel of this Python, whose newest session is this."""
    notebook = nbformat.read(path, as_version=4)
    variables = {
        "PYTHONPATH": str(ROOT),
        "PLOTLY_RENDERER": renderer,
        "VLLM_PROFILING_DIR": str(session),
    }
    with mock.patch.dict(os.environ, variables):
        ExecutePreprocessor(timeout=300, kernel_name="python3").preprocess(
            notebook, {"metadata": {"path": str(path.parent)}}
        )
    return notebook


def shown(notebook: Any, session: Path) -> Any:
    """The notebook with its session where sessions lie by default, and without what each run has
    anew."""
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
    notebook.metadata.pop("language_info", None)
    text = nbformat.writes(notebook)
    return nbformat.reads(text.replace(str(session.parent), DEFAULT), as_version=4)


def photograph(page: Path) -> None:
    """The page up to its first chart, as a picture in the docs."""
    with sync_playwright() as playwright:
        found = start_first(playwright, print)
        if found is None:
            raise SystemExit(f"no browser: {HOW}")
        opened = found.browser.new_page(viewport={"width": WIDTH, "height": WIDTH})
        opened.goto(page.as_uri())
        chart = opened.wait_for_selector(".plotly-graph-div .main-svg")
        box = chart and chart.bounding_box()
        if not box:
            raise SystemExit(f"{page} has no chart")
        height = box["y"] + box["height"] + MARGIN
        opened.set_viewport_size({"width": WIDTH, "height": int(height)})
        opened.screenshot(path=PICTURE)
        found.browser.close()


if __name__ == "__main__":
    sys.exit(main())
