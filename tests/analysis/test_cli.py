# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analysis import RuleError, SessionError
from profilemate import __version__
from profilemate.commands.check import CheckOptions, check
from profilemate.commands.plan import PlanOptions, plan
from profilemate.commands.summary import SummaryOptions, summary
from profilemate.commands.sweep import SweepOptions, sweep
from profilemate.commands.whatif import WhatifOptions, whatif
from tests.analysis.builder import SessionBuilder
from tests.analysis.invoke import invoke
from tests.analysis.journals import ended_session, running_session

ROOT = Path(__file__).parent.parent.parent
ANALYSIS = ["-m", "analysis"]
PROFILEMATE = ["-c", "from profilemate.cli import main; main()"]
NAMES = [
    *("run", "inject"),
    *("summary", "report", "compare", "check", "finalize", "join", "snapshot"),
    *("pack", "unpack", "pause", "resume", "mark"),
    *(
        "doctor",
        "plan",
        "sweep",
        "reconcile",
        "whatif",
        "route",
        "live",
        "metrics",
        "fleet",
        "export",
    ),
]


def run(program: list[str], *arguments: object, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        check=False,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "80", **env},
        capture_output=True,
        text=True,
    )


def assert_fails(result: subprocess.CompletedProcess[str], says: str) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("profilemate: ")
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


@pytest.fixture
def used(session: SessionBuilder) -> SessionBuilder:
    session.usage((0, 50), (5, 0))
    return session


def test_both_programs_are_the_same(used: SessionBuilder) -> None:
    first, second = run(ANALYSIS, used.folder), run(PROFILEMATE, "summary", used.folder)
    assert first.returncode == 0
    assert (first.stdout, first.stderr) == (second.stdout, "")
    assert used.folder.name in first.stdout
    assert json.loads(run(ANALYSIS, used.folder, "--json").stdout) == json.loads(
        run(PROFILEMATE, "summary", "--json", used.folder).stdout
    )


def test_the_newest_session_is_found(used: SessionBuilder) -> None:
    directory = str(used.folder.parent)
    for result in (run(ANALYSIS, VLLM_PROFILING_DIR=directory), run(ANALYSIS, directory)):
        assert used.folder.name in result.stdout


def test_errors_are_one_line(used: SessionBuilder, tmp_path: Path) -> None:
    assert_fails(run(ANALYSIS, tmp_path / "nowhere"), "there is no folder")
    assert_fails(run(PROFILEMATE, "summary", tmp_path / "nowhere"), "there is no folder")
    assert_fails(run(PROFILEMATE, "finalize", tmp_path / "nowhere"), "there is no folder")
    assert_fails(run(ANALYSIS, VLLM_PROFILING_DIR=str(tmp_path / "x")), "no session yet")
    used.append("kv_cache_usage.csv", "x\n")
    assert_fails(run(ANALYSIS, used.folder, "--json"), "kv_cache_usage.csv, line 4: 1 fields")


def test_without_a_command_the_help_is_shown() -> None:
    result = run(PROFILEMATE)
    assert result.returncode == 0
    assert "summary" in result.stdout
    assert "finalize" in result.stdout
    assert "vllm serve MODEL" in result.stdout


@pytest.mark.parametrize(
    "command",
    [[*ANALYSIS], [*PROFILEMATE, "summary"], [*PROFILEMATE]],
)
def test_help_teaches_in_80_columns(command: list[str]) -> None:
    result = run(command, "--help")
    assert result.returncode == 0
    assert "profilemate summary" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert result.stdout.isascii()


@pytest.mark.parametrize("command", NAMES)
def test_each_command_teaches_in_80_columns(command: str) -> None:
    """What it does, examples, and exit codes."""
    shown = invoke(command, "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.isascii()
    examples, _, codes = shown.partition("Examples:")[2].partition("Exit codes:")
    assert f"profilemate {command}" in examples
    assert "  2  " in codes


@pytest.mark.parametrize("kind", ["perfetto", "load", "otlp"])
def test_each_export_teaches_in_80_columns(kind: str) -> None:
    shown = invoke("export", kind, "--help").stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert f"profilemate export {kind}" in shown.partition("Examples:")[2]


def test_the_help_lists_the_commands() -> None:
    listed = invoke("--help").stdout.partition("Commands:\n")[2]
    assert re.findall(r"^  (\w+) ", listed, re.MULTILINE) == NAMES
    # Nothing of what a command does is cut off.
    assert "..." not in listed
    assert "..." not in invoke("export", "--help").stdout.partition("Commands:\n")[2]


def test_a_command_imports_no_other_one() -> None:
    program = """
import sys
from profilemate.commands.app import application
application(None, sys.argv[1])(sys.argv[1:] + ["--help"], standalone_mode=False)
print(*(name for name in sys.modules if name.startswith("profilemate.commands.")))
"""
    said = run(["-c", program], "summary").stdout.splitlines()
    assert "Summarize a session." in " ".join(said)
    loaded = {name for name in said[-1].split() if "shared" not in name}
    assert loaded == {"profilemate.commands.app", "profilemate.commands.summary"}


def test_text_needs_nothing_of_json(tmp_path: Path) -> None:
    """What it would import takes as long as a small trace."""
    program = """
import sys
from profilemate.commands.app import application
application(None, "whatif")(["whatif", sys.argv[1], "--fast"], standalone_mode=False)
print("analysis.renderers.json" in sys.modules)
"""
    trace = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": [1, 2]}
    trace.write_text(f"{json.dumps(row)}\n" * 2)
    *text, imported = run(["-c", program], trace).stdout.splitlines()
    assert "hit rate" in " ".join(text).lower()
    assert imported == "False"


def test_the_version() -> None:
    assert run(PROFILEMATE, "--version").stdout == f"profilemate {__version__}\n"


def test_a_wrong_option_is_an_error() -> None:
    result = run(PROFILEMATE, "summary", "--yaml")
    assert result.returncode == 2
    assert "No such option: --yaml" in result.stderr


def test_finalize_completes_a_session_that_was_cut_off(tmp_path: Path) -> None:
    folder = ended_session(tmp_path)
    for _ in range(2):
        result = run(PROFILEMATE, "finalize", folder)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == f"{folder} is complete\n"
        assert not (folder / "journal").exists()
        assert (folder / "kv_cache_allocations.csv").read_text().count("allocate") == 2


def test_finalize_says_what_it_cannot_complete(used: SessionBuilder, tmp_path: Path) -> None:
    used.metadata(complete=False, dropped_events=12)
    assert_fails(run(PROFILEMATE, "finalize", used.folder), "but the record has gaps")
    folder = ended_session(tmp_path / "runs")
    shutil.rmtree(folder / "journal")
    SessionBuilder(folder).metadata(complete=False, ended_at=None)
    result = run(PROFILEMATE, "finalize", folder)
    assert_fails(result, f"{folder} cannot be completed: journal/ is missing")


def test_finalize_says_what_is_wrong_with_the_metadata(used: SessionBuilder) -> None:
    (used.folder / "metadata.json").write_text('{"a": ')
    said = run(PROFILEMATE, "summary", used.folder)
    assert_fails(said, "metadata.json, line 1: not JSON")
    assert run(PROFILEMATE, "finalize", used.folder).stderr == said.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["summary", ""],
        ["finalize", ""],
        ["compare", "", ""],
        ["whatif", "", "--fast"],
        ["plan", "--session", ""],
        ["check", "--baseline", ""],
    ],
)
def test_an_empty_path_is_not_the_working_folder(arguments: list[str]) -> None:
    assert_fails(run(PROFILEMATE, *arguments), "the path of a session is empty; name a folder")


def test_pages_go_to_files(used: SessionBuilder) -> None:
    for arguments in (["report", "-o"], ["compare", used.folder, "--html"]):
        result = run(PROFILEMATE, arguments[0], used.folder, *arguments[1:], "-")
        assert_fails(result, f"not to stdout; name another file with {arguments[-1]}")


def test_finalize_leaves_a_running_session_alone(tmp_path: Path) -> None:
    folder = running_session(tmp_path)
    assert_fails(run(PROFILEMATE, "finalize", folder), "is still being written")
    assert (folder / "journal").is_dir()
    assert not (folder / "kv_cache_allocations.csv").exists()


@pytest.mark.parametrize("module", ["polars", "typer"])
def test_what_is_not_installed_is_named(tmp_path: Path, module: str) -> None:
    program = (
        f"import runpy, sys; sys.modules[{module!r}] = None; sys.argv = ['analysis']; "
        "runpy.run_module('analysis', run_name='__main__', alter_sys=True)"
    )
    result = run(["-c", program], VLLM_PROFILING_DIR=str(SessionBuilder(tmp_path / "s").folder))
    assert_fails(result, f"{module} is not installed: pip install '{ROOT}[analysis]'")


def test_a_reader_that_goes_away_is_no_error(used: SessionBuilder) -> None:
    command = f"'{sys.executable}' -m analysis '{used.folder}' --json | head -c 1"
    result = subprocess.run(
        command, shell=True, check=False, cwd=ROOT, capture_output=True, text=True
    )
    assert (result.stdout, result.stderr) == ("{", "")
    process = subprocess.Popen(
        [sys.executable, "-m", "analysis", used.folder, "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    # As it is of any program in a pipe; a shell shows it as 141.
    assert process.wait() == -signal.SIGPIPE


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("command", ["summary", "check", "--version", "--help"])
def test_a_full_disk_is_one_line(used: SessionBuilder, command: str, unbuffered: str) -> None:
    arguments: dict[str, list[object]] = {
        "summary": [used.folder],
        # A rule that fails, and a verdict that nobody can read.
        "check": [used.folder, "--fail-if", "usage_peak>40"],
    }
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, *PROFILEMATE, command, *map(str, arguments.get(command, []))],
            check=False,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    said = "profilemate: cannot write the output: No space left on device\n"
    assert (result.returncode, result.stderr) == (2, said)


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_closed_stream_changes_no_exit_code(used: SessionBuilder, closed: str) -> None:
    for limit, code in ((40, 1), (60, 0)):
        command = f"'{sys.executable}' -m profilemate check '{used.folder}' --fail-if"
        result = subprocess.run(
            f"{command} 'usage_peak>{limit}' {closed}",
            shell=True,
            check=False,
            cwd=ROOT,
            capture_output=True,
        )
        assert (result.returncode, result.stderr) == (code, b"")


def test_what_nobody_expected_is_one_line(used: SessionBuilder) -> None:
    program = (
        "import analysis.tables.session; analysis.tables.session.find_session = None; "
        "from profilemate.cli import main; main()"
    )
    arguments = ["check", used.folder, "--fail-if", "usage_peak>40"]
    result = run(["-c", program], *arguments)
    assert_fails(result, "unexpected TypeError: 'NoneType' object is not callable; please report")
    assert "with PROFILEMATE_TRACEBACK=1 for the traceback" in result.stderr
    result = run(["-c", program], *arguments, PROFILEMATE_TRACEBACK="1")
    assert result.returncode == 2
    assert result.stderr.startswith("Traceback")
    assert "in open_session" in result.stderr


def test_names_that_the_terminal_cannot_show_do_no_harm(used: SessionBuilder) -> None:
    used.metadata(model={"name": "modèle-模型"})
    result = run(ANALYSIS, "--full", used.folder, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (result.returncode, result.stderr) == (0, "")
    assert "mod\\xe8le" in result.stdout


def test_a_summary_is_one_screen_and_full_has_the_rest(used: SessionBuilder) -> None:
    short, full = (run(PROFILEMATE, "summary", used.folder, *more) for more in ((), ("--full",)))
    assert (short.returncode, full.returncode) == (0, 0)
    assert len(short.stdout.splitlines()) <= 39
    assert "the same command with --full" in short.stdout
    for section in ("\nSession\n", "\nEvictions\n", "\nProfiling\n"):
        assert section not in short.stdout
        assert section in full.stdout


def test_commands_can_be_called_from_python(
    used: SessionBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command is a function of its options, which returns the exit code and raises its errors."""
    assert summary(SummaryOptions(sessions=[used.folder])) == 0
    assert used.folder.name in capsys.readouterr().out
    codes = [check(CheckOptions(used.folder, fail_if=[f"usage_peak>{n}"])) for n in (40, 60)]
    assert codes == [1, 0]
    with pytest.raises(RuleError, match="nothing to check"):
        check(CheckOptions(used.folder))
    with pytest.raises(SessionError, match="there is no folder"):
        whatif(WhatifOptions(used.folder / "nowhere", fast=True))
    with pytest.raises(RuleError, match="name a model"):
        plan(PlanOptions(without_vllm=True))
    with pytest.raises(RuleError, match="nothing to sweep"):
        sweep(SweepOptions(["true"]))
