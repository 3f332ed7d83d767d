# SPDX-License-Identifier: Apache-2.0
"""What the environment variables mean."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from profilemate import config

ADDRESSES = [
    ("127.0.0.1:9400", ("127.0.0.1", 9400)),
    (" 0.0.0.0:1 ", ("0.0.0.0", 1)),
    ("localhost:65535", ("localhost", 65535)),
    ("[::1]:9400", ("::1", 9400)),
]
NO_ADDRESSES = [
    *("9400", ":9400", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536", "host:9400"),
    *("::1:9400", "[::1]", "127.0.0.1:９４００", "127.0.0.1:9400/metrics", "http://127.0.0.1:9400"),
    *("tcp://10.0.0.1:80", "1", "127.0.0.1[::1]:9400", "x" * 5_000),
]

KUBERNETES = {
    "VLLM_PROFILING_PORT": "tcp://10.0.0.1:80",
    "VLLM_PROFILING_SERVICE_HOST": "10.0.0.1",
    "VLLM_PROFILING_SERVICE_PORT": "80",
    "VLLM_PROFILING_PORT_80_TCP_PROTO": "tcp",
    "VLLM_PROFILING_SESSION_PORT": "tcp://10.0.0.2:80",
}


def test_defaults() -> None:
    read = config.read({})
    assert (read.enabled, read.verbose, read.session, read.failed) == (True, False, "", ())
    assert (read.gpu_timing, read.gpu_interval_sec, read.metrics) == (False, 1.0, None)
    assert read.problems == ()
    assert read.directory == Path(tempfile.gettempdir(), "vllm_profiling")


@pytest.mark.parametrize("name", ["VLLM_PROFILING", "VLLM_ENABLE_PROFILING"])
@pytest.mark.parametrize(
    ("value", "enabled"),
    [
        *[(value, False) for value in ("0", "false", "off", "no", "OFF", "False", " 0 ")],
        *[(value, True) for value in ("1", "true", "on", "yes", "YES", "", " ")],
    ],
)
def test_either_switch_turns_it_off(name: str, value: str, enabled: bool) -> None:
    read = config.read({name: value})
    assert (read.enabled, read.problems) == (enabled, ())


def test_one_switch_that_is_on_does_not_outweigh_one_that_is_off() -> None:
    assert not config.read({"VLLM_PROFILING": "1", "VLLM_ENABLE_PROFILING": "0"}).enabled
    assert not config.read({"VLLM_PROFILING": "0", "VLLM_ENABLE_PROFILING": "1"}).enabled


def test_values_that_are_not_understood_count_as_not_set() -> None:
    read = config.read({"VLLM_PROFILING": "2", "VLLM_PROFILING_VERBOSE": "loud"})
    assert (read.enabled, read.verbose) == (True, False)
    first, second = read.problems
    assert all(part in first for part in ("VLLM_PROFILING=2 ", "1, true", "0, false", "used: 1"))
    assert all(part in second for part in ("VLLM_PROFILING_VERBOSE=loud ", "used: 0"))


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("0", 0.0), ("0.25", 0.25), (" 5 ", 5.0), ("1e2", 100.0), ("", 1.0), (" ", 1.0)],
)
def test_seconds(value: str, seconds: float) -> None:
    read = config.read({"VLLM_PROFILING_GPU_INTERVAL": value})
    assert (read.gpu_interval_sec, read.problems) == (seconds, ())


@pytest.mark.parametrize(
    "value", ["-1", "1s", "off", "nan", "inf", "1e999", "1e300", "\u0661", "\uff11", "-0.1"]
)
def test_what_is_no_number_of_seconds(value: str) -> None:
    read = config.read({"VLLM_PROFILING_GPU_INTERVAL": value})
    assert read.gpu_interval_sec == 1.0
    (problem,) = read.problems
    assert problem == (
        f"VLLM_PROFILING_GPU_INTERVAL={value} is not understood (a number of seconds, 0 for off); "
        "the default is used: 1"
    )


ABSURD = (
    "\x1b[31m",
    "\u0661",
    "\udcff",
    "-1",
    "nan",
    "1e400",
    "=1+1",
    "../../etc",
    "~nobody-of-that-name",
    "/dev/null/x",
    "  ",
    "\n",
    "a/b",
    "0" * 1_000_000,
    "x" * 1_000_000,
    "," * 1_000_000,
)


@pytest.mark.parametrize("value", ABSURD, ids=lambda value: ascii(value)[:12])
@pytest.mark.parametrize("name", config.NAMES)
def test_an_absurd_value_is_one_line_at_most(name: str, value: str) -> None:
    read = config.read({name: value})
    assert read.enabled
    assert not read.gpu_timing
    assert 0 <= read.gpu_interval_sec <= 86_400
    assert read.directory.is_absolute()
    assert len(read.problems) <= 1
    assert all(len(line) < 300 for line in read.problems)


def test_a_home_that_nobody_has_is_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    read = config.read({"VLLM_PROFILING_DIR": "~nobody-of-that-name/profiles"})
    assert read.directory == config.read({}).directory
    (problem,) = read.problems
    assert "there is no such user's home folder" in problem


def test_a_working_folder_that_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert config.read({"VLLM_PROFILING_DIR": "profiles"}).directory == Path("profiles")


def test_gpu_timing_is_a_switch() -> None:
    assert config.read({"VLLM_PROFILING_GPU_TIMING": "on"}).gpu_timing
    read = config.read({"VLLM_PROFILING_GPU_TIMING": "2"})
    assert not read.gpu_timing
    assert "VLLM_PROFILING_GPU_TIMING=2 is not understood" in read.problems[0]


def test_experts() -> None:
    assert not config.read({}).experts
    assert config.read({"VLLM_PROFILING_EXPERTS": "1"}).experts
    assert not config.read({}).phases
    assert config.read({"VLLM_PROFILING_PHASES": "1"}).phases
    assert config.read({}).expert_pairs == 512
    assert config.read({"VLLM_PROFILING_EXPERT_PAIRS": "0"}).expert_pairs == 0
    for value in ("513", "-1", "many", "1.5", "\u0663"):
        read = config.read({"VLLM_PROFILING_EXPERT_PAIRS": value})
        assert read.expert_pairs == 512
        assert f"VLLM_PROFILING_EXPERT_PAIRS={value} is not understood" in read.problems[0]


def test_names_that_kubernetes_invents_are_not_read() -> None:
    asked: list[str] = []

    class Watched(dict[str, str]):
        def get(self, name: str, default: str = "") -> str:  # type: ignore[override]
            asked.append(name)
            return super().get(name, default)

    assert config.read(Watched(KUBERNETES)) == config.read({})
    assert set(asked) == set(config.NAMES)
    assert not set(config.NAMES) & set(KUBERNETES)


def test_directory_is_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")

    def directory(value: str) -> Path:
        return config.read({"VLLM_PROFILING_DIR": value}).directory

    assert directory("profiles") == tmp_path / "profiles"
    assert directory("~/profiles") == Path("/home/somebody/profiles")
    assert directory("/data/a b") == Path("/data/a b")
    assert directory("") == config.read({}).directory


def test_what_failed_is_left_for_children() -> None:
    environ: dict[str, str] = {}
    config.leave_for_children(environ, "scheduler")
    config.leave_for_children(environ, "engine")
    config.leave_for_children(environ, "scheduler")
    assert environ == {"VLLM_PROFILING_FAILED": "scheduler,engine"}
    assert config.read(environ).enabled
    config.leave_for_children(environ, config.EVERYTHING)
    assert not config.read(environ).enabled
    assert config.read(environ).failed == ("scheduler", "engine", "all")


def test_pythonpath_entries_that_mean_the_repository(tmp_path: Path) -> None:
    root, start = tmp_path / "repository", tmp_path / "start"
    root.mkdir()
    start.mkdir()
    (start / "link").symlink_to(root)

    def repaired(*entries: str, start_folder: Path = start) -> list[str]:
        value = os.pathsep.join(entries)
        return config.absolute_pythonpath(value, str(root), str(start_folder)).split(os.pathsep)

    kept = ["/elsewhere/", "gone", "", str(root) + "/", "."]
    assert repaired(*kept) == kept
    assert repaired("a", "../repository", "b") == ["a", str(root), "b"]
    assert repaired("link/", "../repository/.") == [str(root), str(root)]
    assert repaired("", "x", "", start_folder=root) == [str(root), "x", str(root)]


@pytest.mark.parametrize(("value", "address"), ADDRESSES)
def test_metrics_are_offered_at_an_address(value: str, address: tuple[str, int]) -> None:
    read = config.read({"VLLM_PROFILING_METRICS": value})
    assert (read.metrics, read.problems) == (address, ())
    assert config.shown_address(address) == value.strip()


@pytest.mark.parametrize("value", NO_ADDRESSES)
def test_what_is_no_address_is_one_line_and_offers_nothing(value: str) -> None:
    read = config.read({"VLLM_PROFILING_METRICS": value})
    (line,) = read.problems
    assert read.metrics is None
    assert line.startswith(f"VLLM_PROFILING_METRICS={value[:20]}")
    assert line.endswith("such as 127.0.0.1:9400); no metrics are offered")
    assert len(line) < 250
