# SPDX-License-Identifier: Apache-2.0
"""The command from end to end, with a stand-in for vLLM whose figures are known."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.analysis.invoke import invoke
from tests.sweep.conftest import FAKE, ROOT, Shell


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that have this folder in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if os.fsencode(folder) in (entry / "environ").read_bytes() and state not in "ZX":
                found.append(os.fsdecode((entry / "cmdline").read_bytes()))
    return found


def test_each_combination_is_a_run_of_its_own(shell: Shell) -> None:
    done = shell.sweep("--set", "max-num-seqs=1,4", "--set", "block-size=16,32", "--repeat", "2")
    assert done.returncode == 0, done.stderr
    results = shell.results()
    assert sorted(results) == [
        f"00{number}-{repeat}_max-num-seqs={seqs}_block-size={size}"
        for number, (seqs, size) in enumerate([(1, 16), (1, 32), (4, 16), (4, 32)], start=1)
        for repeat in (1, 2)
    ]
    result = results["004-2_max-num-seqs=4_block-size=32"]
    # 4 requests of 39 computed tokens in 2 blocks of 32; 6 of 30 prompt tokens were found.
    assert result["figures"]["waste"] == pytest.approx(1 - 4 * 39 / (4 * 64))
    assert result["figures"]["hit_rate"] == pytest.approx(0.2)
    assert result["figures"]["preemptions"] == 2
    assert result["figures"]["blocks"] == 101
    assert result["figures"]["kv_tokens"] == 3200
    assert result["figures"]["output_tokens_per_sec"] == 410
    assert result["figures"]["total_tokens_per_sec"] == 1640
    assert result["source"] == "output"
    log = (shell.lab / "004-2_max-num-seqs=4_block-size=32" / "log.txt").read_text()
    assert log.startswith("run with --ends well --max-num-seqs 4 --block-size 32\n")


def test_the_table_as_text_and_csv(shell: Shell) -> None:
    done = shell.sweep("--set", "max-num-seqs=1,4", "--repeat", "3")
    # Without the memory that the stand-in took.
    lines = [
        re.sub(r" host mem\.| [\d.]+ [MG]iB", "", " ".join(line.split()))
        for line in done.stdout.splitlines()
    ]
    assert "max-num-seqs output tok/s min to max" in lines
    assert "1 110.0 100.0 to 120.0" in lines
    assert "4 410.0 400.0 to 420.0 best" in lines
    # The most that a line may have, but for paths.
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if "/" not in line)
    first, second = rows(shell.lab / "table.csv")
    assert (first["max-num-seqs"], second["max-num-seqs"]) == ("1", "4")
    assert (first["best"], second["best"]) == ("0", "1")
    assert first["output_tokens_per_sec"] == "110.0"
    assert first["output_tokens_per_sec_min"] == "100.0"
    assert first["output_tokens_per_sec_max"] == "120.0"
    assert float(first["waste"]) == pytest.approx(1 - 156 / 192)
    runs = rows(shell.lab / "runs.csv")
    assert [(run["max-num-seqs"], run["repeat"]) for run in runs] == [
        *(("1", "1"), ("1", "2"), ("1", "3"), ("4", "1"), ("4", "2"), ("4", "3")),
    ]
    assert runs[4]["output_tokens_per_sec"] == "410.0"
    assert "Plotly" in (shell.lab / "chart.html").read_text()


def test_without_a_benchmarks_words_the_speed_is_from_the_session(shell: Shell) -> None:
    done = shell.sweep("--set", "block-size=16,32", ends="silent")
    assert done.returncode == 0, done.stderr
    result = shell.results()["001-1_block-size=16"]
    assert result["source"] == "session"
    # 4 x 10 tokens from second 0, the first arrival, to second 5, the last end.
    assert result["figures"]["output_tokens_per_sec"] == 8
    assert result["figures"]["total_tokens_per_sec"] == 32
    assert "Tokens a second come from the sessions" in done.stdout


def test_a_failing_run_is_named_and_ends_nothing(shell: Shell) -> None:
    done = shell.sweep("--set", "ends=badly,well,killed", ends="{ends}")
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert (
        "ends=badly, repeat 1: exit code 3: ValueError: --max-num-seqs is more than there is room "
        f"for {shell.lab}/001-1_ends=badly/log.txt"
    ) in said
    assert "ends=killed, repeat 1: it was ended by SIGKILL: run with" in said
    assert {name: result["state"] for name, result in shell.results().items()} == {
        "001-1_ends=badly": "failed",
        "002-1_ends=well": "done",
        "003-1_ends=killed": "failed",
    }


def test_a_command_that_is_not_there_is_named(shell: Shell) -> None:
    done = shell.run("--set", "a=1,2", "--", "no-such-program")
    assert done.returncode == 1
    said = " ".join(done.stdout.split())
    assert "cannot start no-such-program: No such file or directory" in said


def test_a_run_that_takes_too_long_is_stopped_with_all_it_started(shell: Shell) -> None:
    done = shell.sweep("--set", "ends=late,later", "--timeout", "1s", ends="{ends}")
    assert done.returncode == 1
    results = shell.results()
    assert list(results) == ["001-1_ends=late", "002-1_ends=later"]
    assert {result["state"] for result in results.values()} == {"timed out"}
    assert {result["why"] for result in results.values()} == {"it took over 1 s and was stopped"}
    assert processes_of(shell.lab) == []


def test_what_a_run_leaves_behind_is_ended(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from profilemate.sweep import running

    monkeypatch.setattr(running, "LEFT_SEC", 0.2)
    log, lock = shell.folder / "log", os.open(shell.folder / "lock", os.O_CREAT | os.O_RDWR)
    ended = running.run(
        [sys.executable, str(FAKE), "--ends", "leaving"],
        {**os.environ, "VLLM_PROFILING_DIR": str(shell.folder / "001-1_x" / "sessions")},
        log,
        time_limit=None,
        lock=lock,
        interrupts=running.Interrupts(),
        began=lambda _: None,
        tick=lambda _: None,
    )
    os.close(lock)
    assert (ended.exit_code, ended.left_behind) == (0, 1)
    wait_for(lambda: processes_of(shell.folder) == [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_stopped_goes_on(shell: Shell, number: int) -> None:
    # The second run does not end by itself, as long as the switch is there.
    switch = shell.folder / "switch"
    switch.touch()
    script = shell.folder / "run.sh"
    script.write_text(
        f'echo "$2" >> {shell.folder}/made\n'
        f'if [ "$2" = 2 ] && [ -e {switch} ]; then sleep 600 & sleep 600; fi\n'
        f'exec {sys.executable} {FAKE} "$@"\n'
    )
    command = ["-o", "lab", "--set", "max-num-seqs=1,2,3", "--", "sh", str(script)]
    process = shell.start(*command)
    made = shell.folder / "made"
    wait_for(lambda: made.exists() and made.read_text().split() == ["1", "2"])
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert f"profilemate: stopped; to go on, repeat the command with --output {shell.lab}" in err
    assert processes_of(shell.lab) == []
    assert list(shell.results()) == ["001-1_max-num-seqs=1"]
    switch.unlink()
    assert shell.run(*command[2:]).returncode == 0
    assert made.read_text().split() == ["1", "2", "2", "3"], "done runs are kept"
    assert len(shell.results()) == 3


def test_a_result_that_is_none_is_made_anew(shell: Shell) -> None:
    assert shell.sweep("--set", "max-num-seqs=1,2,3,4").returncode == 0
    whole = shell.results()
    cut, listed, others, odd = (shell.lab / name / "result.json" for name in whole)
    cut.write_text('{"result_version": 1')
    listed.write_text("[]")
    others.write_text(odd.read_text())
    odd.write_text(json.dumps({**json.loads(odd.read_text()), "seconds": "a"}))
    done = shell.sweep("--set", "max-num-seqs=1,2,3,4")
    assert done.returncode == 0, done.stderr
    made = re.findall(r"^\[\d/4\] max-num-seqs=(\d): ", done.stderr, re.MULTILINE)
    assert made == ["1", "2", "3"]
    assert [each["settings"] for each in shell.results().values()] == [
        each["settings"] for each in whole.values()
    ]


def test_failed_runs_are_made_again_only_if_asked_for(shell: Shell) -> None:
    switch = shell.folder / "switch"
    script = shell.folder / "run.sh"
    script.write_text(
        f'[ -e {switch} ] || {{ echo "error: no switch"; exit 1; }}\nexec {sys.executable} {FAKE}\n'
    )
    command = ["--set", "a=1", "--repeat", "2", "--", "sh", str(script)]
    codes = []
    for more in ([], [], ["--retry-failed"]):
        codes.append(shell.run(*more, *command).returncode)
        switch.touch()
    assert codes == [1, 1, 0]
    assert {result["state"] for result in shell.results().values()} == {"done"}


def test_settings_and_repeats_may_come_to_a_sweep(shell: Shell) -> None:
    shell.sweep("--set", "max-num-seqs=1,4", "--set", "block-size=16")
    before = shell.results()
    done = shell.sweep("--set", "max-num-seqs=1,2,4", "--set", "block-size=16", "--repeat", "2")
    assert done.returncode == 0, done.stderr
    after = shell.results()
    assert before.items() <= after.items(), "what was done stays as it is"
    assert [name[:5] for name in after] == ["001-1", "001-2", "002-1", "002-2", "003-1", "003-2"]
    assert after["003-1_max-num-seqs=2_block-size=16"]["state"] == "done"


def test_another_sweep_is_refused(shell: Shell) -> None:
    shell.sweep("--set", "max-num-seqs=1,4")
    before = shell.results()
    for arguments, ends, said in (
        (["--set", "max-num-seqs=1,4"], "silent", "holds a sweep of another command: "),
        (["--set", "max-num-seqs=1"], "well", "holds a sweep that has max-num-seqs=4, too"),
        (["--set", "block-size=16"], "well", "has max-num-seqs=1; max-num-seqs=4, too"),
    ):
        done = shell.sweep(*arguments, ends=ends)
        assert (done.returncode, done.stdout) == (2, "")
        assert len(done.stderr.splitlines()) == 1
        assert said in done.stderr
        assert "give --output another folder" in done.stderr
    shell.sweep("--set", "max-num-seqs=1,4", "--repeat", "2")
    done = shell.sweep("--set", "max-num-seqs=1,4")
    assert "holds a sweep with --repeat 2" in done.stderr
    assert before.items() <= shell.results().items()


def test_a_folder_of_something_else_is_refused(shell: Shell) -> None:
    shell.lab.mkdir()
    (shell.lab / "thesis.txt").write_text("years of work")
    done = shell.sweep("--set", "max-num-seqs=1,4")
    assert done.returncode == 2
    assert "holds no sweep, and has thesis.txt" in done.stderr
    assert [path.name for path in shell.lab.iterdir()] == ["thesis.txt"]


def test_a_file_is_no_folder_of_a_sweep(shell: Shell) -> None:
    shell.lab.write_text("years of work")
    done = shell.sweep("--set", "max-num-seqs=1,4")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert f"{shell.lab} is a file, and runs go to a folder; name one with --output" in done.stderr


def test_runs_do_not_go_to_stdout() -> None:
    result = invoke("sweep", "-o", "-", "--repeat", "2", "--", "true")
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert "--output -: runs go to a folder, not to stdout; name a folder" in result.stderr
    assert "{COMMAND}...\n" in (shown := invoke("sweep", "--help").stdout)
    assert "[default:" not in shown


def test_a_second_sweep_in_the_folder_is_refused(shell: Shell) -> None:
    process = shell.start(
        *("-o", "lab", "--set", "a=1,2", "--", sys.executable, str(FAKE), "--ends", "late")
    )
    log = shell.lab / "001-1_a=1" / "log.txt"
    wait_for(lambda: log.exists() and "run with" in log.read_text())
    # Killed as the kernel would: its run lives on, and holds the folder.
    process.kill()
    process.communicate()
    done = shell.sweep("--set", "a=1,2", "--timeout", "1s", ends="late")
    assert done.returncode == 2
    assert "is in use by another sweep, or by the last run of one that was killed" in done.stderr
    holder = int(done.stderr.partition("process ")[2].partition(";")[0])
    os.killpg(holder, signal.SIGKILL)
    wait_for(lambda: processes_of(shell.lab) == [])


def test_a_dry_run_prints_commands_and_makes_nothing(shell: Shell) -> None:
    done = shell.sweep("--set", "max-num-seqs=1,2", "--dry-run", ends="a b")
    assert done.returncode == 0
    first, second = done.stdout.splitlines()
    run = shell.lab / "001-1_max-num-seqs=1"
    assert first.endswith("fake_vllm.py --ends 'a b' --max-num-seqs 1")
    assert second.endswith("fake_vllm.py --ends 'a b' --max-num-seqs 2")
    assert f"VLLM_PROFILING_DIR={run}/sessions " in first
    assert not shell.lab.exists()


def test_the_childs_variables_are_its_own(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VLLM_PROFILING": "0",
        "VLLM_ENABLE_PROFILING": "0",
        "VLLM_PROFILING_DIR": "/elsewhere",
        "VLLM_PROFILING_SESSION": "session_of_another",
        "VLLM_PROFILING_GPU_TIMING": "1",
        "PYTHONPATH": "/of/mine",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PROFILEMATE_BROWSER", raising=False)  # the tests' own
    program = (
        "import os; print({name: value for name, value in os.environ.items() "
        "if 'PROFIL' in name or name == 'PYTHONPATH'})"
    )
    shell.run("--set", "-c=1", "--repeat", "2", "--", sys.executable, "-c", program)
    log = (shell.lab / "001-1_c=1" / "log.txt").read_text()
    assert eval(log) == {
        "VLLM_PROFILING_DIR": str(shell.lab / "001-1_c=1" / "sessions"),
        "VLLM_PROFILING_GPU_TIMING": "1",
        "PYTHONPATH": f"{ROOT}:/of/mine",
    }


def test_nobody_else_may_look(shell: Shell) -> None:
    shell.sweep("--set", "max-num-seqs=1,4", ends="well --api-key secret")
    for path in (shell.lab, *shell.lab.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_secrets_are_not_noted(shell: Shell) -> None:
    done = shell.run("--set", "a=1,2", "--", sys.executable, str(FAKE), "--api-key", "s3cret")
    assert done.returncode == 0
    for path in ("sweep.json", "table.csv", "runs.csv", "chart.html"):
        assert "s3cret" not in (shell.lab / path).read_text(), path
    assert "s3cret" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to sweep"),
        (["--set", "a=1", "--list", "x"], "not both"),
        (["--repeat", "0"], "--repeat is 0"),
        (["--set", "a=1", "--baseline", "jax"], "--baseline jax is not known; give hf"),
        (["--set", "a=1", "--baseline", "hf"], "works for 'vllm bench throughput' alone"),
        (["--set", "ends=1,2"], "the command has --ends already"),
    ],
)
def test_what_makes_no_sense_is_one_line(shell: Shell, arguments: list[str], said: str) -> None:
    done = shell.sweep(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert said in done.stderr
    assert not shell.lab.exists()
