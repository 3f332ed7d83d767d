# SPDX-License-Identifier: Apache-2.0
"""What is said is one line, and saying it never fails."""

from __future__ import annotations

import io
import os
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


def test_what_others_wrote_drives_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    messages.say("a\x1b[31m\x07\u202e\u2066\u200b\x9b\x85b " + "x" * 1_000_000)
    shown = capsys.readouterr().err
    assert shown.startswith("profilemate: a\\x1b[31m\\x07\\u202e\\u2066\\u200b\\x9b b xxx")
    assert len(shown) < 1_100
    assert all(char.isprintable() for char in shown[:-1])


def test_a_cause_quotes_no_value() -> None:
    """What errors of conversions and look-ups say holds what they were given."""

    def of(run: Callable[[], object]) -> str:
        with pytest.raises(Exception) as caught:  # noqa: PT011 (which one is not the question)
            run()
        return messages.cause(caught.value)

    for run in (
        lambda: int("s3cret"),
        lambda: {}["s3cret"],
        lambda: "s3cret\u20ac".encode("latin-1"),
        lambda: os.stat("/s3cret"),
    ):
        assert "s3cret" not in of(run)
    assert of(lambda: int("s3cret")).startswith("ValueError at test_messages.py:")
    assert of(lambda: object().gone) == (  # type: ignore[attr-defined]
        "AttributeError: 'object' object has no attribute 'gone'"
    )
    assert messages.cause(RuntimeError("two\nlines " + "x" * 1000))[:29] == (
        "RuntimeError: two lines xxxxx"
    )
    assert messages.cause(ValueError("s3cret")) == "ValueError"


def test_once(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("first", "second"):
        messages.say_once("test_once", line)
    assert capsys.readouterr().err == "profilemate: first\n"


def test_verbose(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("0", "1"):
        monkeypatch.setenv("VLLM_PROFILING_VERBOSE", value)
        messages.say_if_verbose(f"verbose {value}")
    assert capsys.readouterr().err == "profilemate: verbose 1\n"
