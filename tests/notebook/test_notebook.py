# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows, in a real IPython and a real kernel."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Any

import nbformat
import polars as pl
import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

import analysis
from analysis import charts, notebook, series
from analysis.renderers.html.chart import Bars
from analysis.renderers.html.page import sections_of
from analysis.renderers.html.report import Report
from scripts import notebook_example
from tests.analysis import stories
from tests.analysis.builder import SessionBuilder
from tests.analysis.conftest import session as session

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InteractiveShell]:
    """An IPython of its own, which keeps no history."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    InteractiveShell.clear_instance()
    found = InteractiveShell.instance(config=Config({"HistoryManager": {"enabled": False}}))
    yield found
    InteractiveShell.clear_instance()


def ran(shell: InteractiveShell, code: str) -> Any:
    done = shell.run_cell(code, store_history=False)
    done.raise_error()
    return done.result


def shown(shell: InteractiveShell, found: Any) -> dict[str, str]:
    """What a notebook gets of an object, by its type."""
    formats, _ = shell.display_formatter.format(found)
    return formats


def test_sessions_and_summaries_show_themselves(
    shell: InteractiveShell, session: SessionBuilder
) -> None:
    """``import analysis`` is enough."""
    stories.swept(session)
    notebook.show_where_it_runs()
    opened = analysis.open_session(session.folder)
    said = shown(shell, opened)
    assert said["text/plain"] == f"{session.folder}: complete, 10 s"
    assert "kv_cache_evictions, prefix_cache_lookups, requests" in said["text/html"]
    assert "cuda_graph" not in said["text/html"]
    found = analysis.summarize(opened)
    said = shown(shell, found)
    assert "What was found" in said["text/plain"]
    assert len(said["text/plain"].splitlines()) < 60
    html = said["text/html"]
    assert "of prompt tokens found in the cache</th><td>37.33&nbsp;%</td>" in html
    assert "<li>32 prompt tokens (10.67&nbsp;%) were computed again" in html
    assert "<li>Give the KV cache 10 blocks more than its 100.</li>" in html


def test_a_comparison_and_a_check_are_their_text(
    shell: InteractiveShell, session: SessionBuilder
) -> None:
    stories.swept(session)
    other = SessionBuilder(session.folder.parent / "other")
    stories.swept(other)
    notebook.load(shell)
    compared = ran(shell, f"%profilemate compare {session.folder} {other.folder}")
    assert "hit_rate" in shown(shell, compared)["text/plain"]
    found = analysis.summarize(analysis.open_session(session.folder))
    assert "hit_rate" in shown(shell, analysis.check(found, ["hit_rate<0.9"]))["text/plain"]


def test_text_of_a_session_is_escaped(shell: InteractiveShell, session: SessionBuilder) -> None:
    stories.swept(session)
    evil = "<script>alert(1)</script>"
    session.metadata(model={"name": evil}, session_id=evil)
    notebook.load(shell)
    opened = analysis.open_session(session.folder)
    for found in (opened, analysis.summarize(opened)):
        assert "<script>" not in shown(shell, found)["text/html"]


def test_the_extension_gives_objects(shell: InteractiveShell, session: SessionBuilder) -> None:
    stories.swept(session)
    ran(shell, "%load_ext profilemate")
    found = ran(shell, f"found = %profilemate summary '{session.folder}'\nfound")
    known = analysis.summarize(analysis.open_session(session.folder))
    assert (found.session, found.prefix_cache) == (known.session, known.prefix_cache)
    assert ran(shell, f"%profilemate session {session.folder}").directory == session.folder
    assert ran(shell, f"where = '{session.folder}'\n%profilemate session $where").end_sec == 10
    figure = ran(shell, f"%profilemate chart hit-rate {session.folder}")
    assert figure.layout.title.text == charts.QUESTIONS["hit_rate"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("summary /nonexistent", "/nonexistent"),
        ("sumary", "%profilemate has no 'sumary'; it has session, summary, compare, chart"),
        ("compare one", "%profilemate compare BEFORE AFTER"),
        ("chart hitrate", "there is no chart 'hitrate'; there are blocks, load, "),
        ("summary 'half", "No closing quotation"),
    ],
)
def test_a_slip_is_one_line(line: str, says: str) -> None:
    with pytest.raises(UsageError) as raised:
        notebook.magic(line)
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert notebook.magic("") is None
    assert capsys.readouterr().out == notebook.USAGE


def test_charts_are_the_reports(session: SessionBuilder) -> None:
    stories.swept(session)
    opened = analysis.open_session(session.folder)
    summary = analysis.summarize(opened)
    report = Report(summary, series.measure(opened, summary))
    drawn = {one.key: one for each in sections_of(report) for one in each.charts}
    for name, question in charts.QUESTIONS.items():
        figure = getattr(charts, name)(opened)
        assert unescape(figure.layout.title.text) == question
        known = drawn.pop(name.replace("_", "-"), None)
        if known is None:
            assert figure.layout.annotations[0].text == "The session has nothing to draw here."
        elif known.figure is None:
            assert unescape(figure.layout.annotations[0].text) == known.words
        elif isinstance(known.figure, Bars):
            of_segments = [list(segment.values) for segment in known.figure.segments]
            assert [list(bar.x) for bar in figure.data] == of_segments
            assert [unescape(label) for label in figure.data[-1].text] == list(known.figure.texts)
        else:
            assert [trace.name for trace in figure.data] == [
                trace.get("name") for trace in known.figure["data"]
            ]
            assert "var(--" not in figure.to_json()
    assert drawn == {}


def test_every_chart_of_the_report_has_a_name() -> None:
    table = (ROOT / "docs" / "report.md").read_text().split("| chart | what it shows |")[1]
    asked = re.findall(r"^\| ([^|]+\?) \|", table.split("\n\n")[0], re.MULTILINE)
    assert len(asked) > 30
    # The same chart for each kind of key.
    assert set(asked) - set(charts.QUESTIONS.values()) == set()


def test_colours_are_those_of_the_theme(session: SessionBuilder) -> None:
    stories.swept(session)
    opened = analysis.open_session(session.folder)
    light, dark = charts.blocks(opened), charts.blocks(opened, dark=True)
    assert (light.layout.paper_bgcolor, dark.layout.paper_bgcolor) == (
        "rgba(255,255,255,1)",
        "rgba(25,31,37,1)",
    )
    assert [line.y for line in light.data] == [line.y for line in dark.data]


def test_a_session_is_read_once_for_all_its_charts(
    session: SessionBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    stories.swept(session)
    opened = analysis.open_session(session.folder)
    first = charts.hit_rate(opened)
    monkeypatch.setattr(series, "measure", None)
    assert charts.hit_rate(opened) == first
    assert charts.misses(opened).data
    # Another look at the folder may see more rows.
    with pytest.raises(TypeError):
        charts.misses(analysis.open_session(session.folder))


def test_no_such_chart(session: SessionBuilder) -> None:
    with pytest.raises(AttributeError, match=r"no chart 'hitrate'; charts\.QUESTIONS has all"):
        charts.hitrate  # noqa: B018
    assert "hit_rate" in dir(charts)


def test_frames(session: SessionBuilder) -> None:
    """The lines of docs/notebooks.md."""
    stories.swept(session)
    opened = analysis.open_session(session.folder)
    code = (ROOT / "docs" / "notebooks.md").read_text().split("## Frames")[1].split("```")[1]
    known: dict[str, Any] = {"session": opened}
    given = []
    for statement in ast.parse(code.removeprefix("python\n")).body:
        line = ast.unparse(statement)
        if isinstance(statement, ast.Expr):
            given.append(eval(line, known))
        else:
            exec(line, known)
    evictions = known["evictions"]
    assert isinstance(evictions, pl.DataFrame)
    pandas, arrow, one, sums = given
    assert list(pandas["owner_request"]) == list(evictions["owner_request"])
    assert type(pandas).__module__.startswith("pandas")
    assert arrow["idle_sec"].to_pylist() == list(evictions["idle_sec"])
    assert type(arrow).__module__.startswith("pyarrow")
    assert one.fetchall() == [("S", 3), ("B", 1), ("C", 1)]
    assert sums.item() == 1 + 1 + 5


def test_importing_the_analyzer_imports_no_notebook() -> None:
    code = (
        "import sys, profilemate.commands.app as app; app.application('summary'); import analysis;"
        "print(sorted({'IPython', 'plotly', 'polars', 'opentelemetry'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_example_runs(session: SessionBuilder, tmp_path: Path) -> None:
    """In a kernel of its own, with another session than the one whose outputs it shows."""
    stories.swept(session)
    known = nbformat.read(notebook_example.NOTEBOOK, as_version=4)
    done = notebook_example.executed(notebook_example.NOTEBOOK, session.folder)
    for cell, before in zip(done.cells, known.cells, strict=True):
        assert cell.source == before.source
        if cell.cell_type == "code":
            kinds = [set(output.get("data", ())) for output in cell.outputs]
            assert kinds == [set(output.get("data", ())) for output in before.outputs], cell.source
            assert not [output for output in cell.outputs if output.output_type == "error"]
    assert "True" in done.cells[-1].outputs[0].data["text/plain"]
    # What the repository shows was made the same way, and names no folder of anybody's.
    assert str(session.folder.parent) not in nbformat.writes(
        notebook_example.shown(done, session.folder)
    )
