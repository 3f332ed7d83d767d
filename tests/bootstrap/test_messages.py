# SPDX-License-Identifier: Apache-2.0
"""What is said is one line, and saying it never fails."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from profilemate import messages


class Raising:
    def write(self, text: str) -> int:
        raise RuntimeError("no")


class Full(io.StringIO):
    def flush(self) -> None:
        raise BrokenPipeError


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [lambda: None, closed, Raising, Full, object])
def test_broken_stderr(monkeypatch: pytest.MonkeyPatch, stream: Callable[[], object]) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    messages.say("nobody hears this")


def test_characters_that_stderr_cannot_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open(tmp_path / "stderr", "w", encoding="ascii") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        messages.say("caf\u00e9 \ud800")
    assert (tmp_path / "stderr").read_text() == "profilemate: caf\\xe9 \\ud800\n"


def test_lines_are_single(capsys: pytest.CaptureFixture[str]) -> None:
    messages.say("first\n  second\r\nthird")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "profilemate: first   second third\n")


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("first", "second"):
        messages.say_once("test_once", line)
    assert capsys.readouterr().err == "profilemate: first\n"


def test_verbose(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "1"):
        monkeypatch.setenv("VLLM_PROFILING_VERBOSE", value)
        messages.say_if_verbose(f"verbose {value}")
    assert capsys.readouterr().err == "profilemate: verbose 1\n"
