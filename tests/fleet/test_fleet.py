# SPDX-License-Identifier: Apache-2.0
"""Many sessions come to what one long session would have come to."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import open_session, summarize
from analysis.fleet.counts import Counts, merged
from analysis.fleet.figures import of_counts
from analysis.fleet.merging import KEYS, Failed, Fleet, Merging
from analysis.fleet.partial import Origin, Partial, of_session
from analysis.fleet.routing import Routing
from analysis.renderers import json as renderer
from analysis.stats.binned import BINS, Binned
from profilemate.fleet import local
from tests.analysis.builder import METADATA
from tests.analysis.invoke import invoke
from tests.fleet.made import TIMES_NS, engine, histogram, made
from tests.fleet.readers import killed
from tests.fleet.replicas import Deployment
from tests.fleet.test_routing import four_replicas
from tests.support.scheduler import RequestMaker, tokens

ROOT = Path(__file__).parent.parent.parent
NOTHING_JOINED = Routing(0, 0, (), 0, 0, 0, 0, None, None, None, ())


def fleet(*arguments: object, code: int = 0) -> Any:
    done = invoke("fleet", *arguments, "--json", "--jobs", 1)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_one_session_alone_has_the_figures_of_its_summary(deployment: Deployment) -> None:
    """A small pool, and requests that evict and preempt each other."""
    make = RequestMaker(16)
    with deployment.replica("a", 12) as (replica, _):
        for turn in range(3):
            for user in range(3):
                replica.run(make(f"{turn}-{user}", tokens(user, 70) + tokens(9 + turn, 6), 2))
        replica.run(*(make(f"at once {user}", tokens(20 + user, 70), 60) for user in range(2)))
    (session,) = deployment.folder.glob("session_*")
    summary = summarize(open_session(session))
    (known,) = fleet(session)["sessions"]
    whole = fleet(session)["whole"]
    figures, counts = known["figures"], whole["counts"]

    assert counts["recomputed_tokens"] == summary.misses.recomputed_tokens > 0
    assert counts["preemption_tokens"] == summary.preemptions.recomputed_tokens > 0
    assert counts["scheduled_tokens"] == summary.preemptions.scheduled_tokens
    assert figures["preemption_tax"] == pytest.approx(summary.preemptions.tax)
    assert figures["hit_rate"] == summary.prefix_cache.true.token_rate
    assert figures["request_hit_rate"] == summary.prefix_cache.true.request_rate
    assert counts["evicted_blocks"] == summary.evictions.total.blocks > 0
    assert summary.usage.combined is not None
    assert 100 * figures["usage"] == pytest.approx(summary.usage.combined.mean_pct, abs=0.01)
    assert summary.usage.combined.bands is not None
    assert figures["over_90"] == pytest.approx(summary.usage.combined.bands.over_90, abs=1e-5)
    exact = {
        "queue": summary.scheduling.queued,
        "first_token": summary.scheduling.first_token,
        "duration": summary.scheduling.finish,
    }
    for name, spread in exact.items():
        found = figures[f"{name}_p50"]
        assert found["low_sec"] <= spread.p50_sec <= found["high_sec"]


values = st.lists(st.integers(0, 10**15), min_size=1, max_size=40)


@given(values, st.sampled_from([1, 50, 90, 95, 99, 100]))
def test_a_quantile_lies_within_its_bounds(found: list[int], percent: int) -> None:
    exact = sorted(found)[math.ceil(percent * len(found) / 100) - 1] / 1e9
    quantile = binned(found).quantile(percent)
    assert quantile is not None
    assert quantile.low_sec <= exact
    assert quantile.high_sec is None or exact < quantile.high_sec
    assert quantile.low_sec <= quantile.sec <= (quantile.high_sec or math.inf)


def binned(found: list[int]) -> Binned:
    made_up = histogram(found, TIMES_NS)
    return Binned(tuple(made_up["counts"]), made_up["sum"])


def test_no_duration_has_no_quantile() -> None:
    assert Binned().quantile(50) is None
    assert Binned().mean_sec is None


@given(values, values)
def test_histograms_merge_without_a_loss(one: list[int], other: list[int]) -> None:
    assert binned(one) + binned(other) == binned(one + other)


names = st.sampled_from(["a", "b", "c", "d"])
large = st.integers(0, 2**70)
histograms = st.builds(Binned, st.tuples(*[st.integers(0, 2**40)] * BINS), large)
all_counts = st.builds(
    Counts,
    sessions=st.just(1),
    **{
        name: histograms
        if name in ("queue", "first_token", "duration", "lifetime", "idle")
        else large
        for name in Counts.__dataclass_fields__
        if name not in ("sessions", "band_ns")
    },
    band_ns=st.tuples(*[large] * 5),
)


@st.composite
def partials(draw: st.DrawFn) -> list[Partial]:
    count = draw(st.integers(1, 6))
    return [
        Partial(
            Origin(
                path=f"/fleet/{number}",
                session_id=f"session_{number}",
                state="complete",
                started_at=f"2026-01-31T1{draw(st.integers(0, 3))}:00:00Z",
                deployment=draw(st.none() | names),
                model=draw(names),
                replica=draw(names),
                host=draw(names),
                release=draw(names),
                gpus=1,
                contents_key=None,
                apart_because=None,
            ),
            draw(all_counts),
            (),
        )
        for number in range(count)
    ]


def result(found: list[Partial], by: str) -> Fleet:
    merging = Merging(by, 2.5)
    for one in found:
        assert merging.add(one)
    return merging.result(NOTHING_JOINED)


@settings(max_examples=40, deadline=None)
@given(partials(), st.sampled_from(sorted(KEYS)), st.randoms())
def test_any_order_of_merging_gives_the_same(found: list[Partial], by: str, random: Any) -> None:
    shuffled = [*found]
    random.shuffle(shuffled)
    assert result(found, by) == result(shuffled, by)


@settings(max_examples=40, deadline=None)
@given(partials(), st.sampled_from(sorted(KEYS)))
def test_any_grouping_comes_to_the_same_whole(found: list[Partial], by: str) -> None:
    fleet_by = result(found, by)
    assert merged([group.counts for group in fleet_by.groups]) == fleet_by.whole.counts
    assert merged([group.counts for group in fleet_by.replicas]) == fleet_by.whole.counts
    assert fleet_by.whole == result(found, "model").whole


def test_groups_and_their_names(tmp_path: Path) -> None:
    asked = {"requests": {"finished": {"stop": 2}}}
    served = {"argv": ["vllm", "serve", "m", "--port", "8001"], "deployment": "blue"}
    made(tmp_path, "a", engine(**asked), **served)
    made(tmp_path, "b", engine(**asked), engine(**asked), argv=["vllm", "--port=8002"])
    made(tmp_path, "c", gpus=[{"gpu": 1}, {"gpu": 0}], versions={"vllm": "0.33.0"})
    made(tmp_path, "d_2", host=None, started_at=None, ended_at=None)

    def by(key: str) -> dict[str, int]:
        return {
            one["name"]: one["counts"]["ended"] for one in fleet(tmp_path, "--by", key)["groups"]
        }

    assert by("replica") == {"a:8001": 2, "b:8002": 4, "c/gpu0,1": 0, "session_d_2": 0}
    assert by("host") == {"a": 2, "b": 4, "c": 0, "unknown": 0}
    assert by("deployment") == {"blue": 2, "unknown": 4}
    assert by("model") == {"tiny": 6}
    assert by("release") == {"0.32.0": 6, "0.33.0": 0}
    assert by("hour") == {"2026-01-31 12:00Z": 6, "unknown": 0}


def test_the_replica_that_stands_out_is_named_with_the_session_that_shows_it(
    tmp_path: Path,
) -> None:
    """Five replicas find half of their prompts; the sixth has one session that finds little."""
    hits = {"a": [50], "b": [51], "c": [49], "d": [52], "e": [50], "odd": [50, 5]}
    for name, rates in hits.items():
        for number, hit in enumerate(rates):
            found = {"requests": 100, "query_tokens": 1000, "hit_tokens": 10 * hit}
            made(tmp_path, f"{name}{number}", engine(prefix_cache=found), host=name)
    (one,) = fleet(tmp_path)["outliers"]
    assert (one["replica"], one["measure"], one["peers"]) == ("odd", "hit_rate", 6)
    assert (one["value"], one["median"]) == (0.275, 0.5)
    # Distances from the median: 0, 0.01, 0.01, 0.02, 0 and 0.225.
    assert one["mad"] == pytest.approx(0.01)
    assert one["distance"] == pytest.approx(0.225 / 0.014826)
    assert Path(one["session"]).name == "session_odd1"
    assert one["session_value"] == 0.05


def test_replicas_of_another_model_are_no_peers(tmp_path: Path) -> None:
    for number in range(6):
        found = {"requests": 1, "query_tokens": 1000, "hit_tokens": 900 if number == 5 else 100}
        model = {"name": "other" if number == 5 else "tiny"}
        made(tmp_path, f"r{number}", engine(prefix_cache=found), model=model)
    assert fleet(tmp_path)["outliers"] == []


def test_a_difference_too_small_to_matter_is_not_named(tmp_path: Path) -> None:
    """All but one are exactly alike, so any difference is infinitely many MADs away."""
    for number in range(6):
        found = {"requests": 1, "query_tokens": 1000, "hit_tokens": 515 if number == 5 else 500}
        made(tmp_path, f"r{number}", engine(prefix_cache=found))
    assert fleet(tmp_path)["outliers"] == []


def test_a_quantile_in_the_bin_of_the_median_is_not_named(tmp_path: Path) -> None:
    """The bins cannot tell 5 s and 9 s apart; they do tell 5 s and 11 s."""
    for number in range(6):
        seconds = [9, 11][number == 5]
        waited = {"queue": histogram([4 * 10**9] * 2 + [seconds * 10**9] * 98)}
        made(tmp_path, f"r{number}", engine(requests=waited))
    assert {one["measure"] for one in fleet(tmp_path)["outliers"]} == {"queue_p95"}
    made(tmp_path, "r5", engine(requests={"queue": histogram([5 * 10**9] * 100)}))
    assert fleet(tmp_path)["outliers"] == []


def test_the_bill_shows_its_arithmetic(tmp_path: Path) -> None:
    """10 s on two GPUs; the pool of 100 is held by half for 10 s."""
    processes = [{"role": "worker", "rank": rank} for rank in (0, 1)]
    session = made(tmp_path, "a", processes=[*METADATA["processes"], *processes])
    session.usage((0, 50))
    bill = fleet(tmp_path, "--gpu-hour", 3.6)["whole"]["bill"]
    assert bill["gpu_hours"] == pytest.approx(20 / 3600)
    assert bill["cost"] == pytest.approx(0.02)
    recomputed, preempted, idle = bill["items"]
    assert (recomputed["cost"], preempted["cost"]) == (0, 0)
    assert (idle["part"], idle["whole"]) == pytest.approx((500 / 3600, 1000 / 3600))
    assert idle["cost"] == pytest.approx(0.01)
    said = invoke("fleet", tmp_path, "--gpu-hour", 3600, "--jobs", 1).stdout
    assert (
        "derived: 0.139 / 0.278 block-hours x 0.00556 GPU-hours = 0.00278 GPU-hours; x 3600 = 10.00"
        in (" ".join(said.split()))
    )


def test_a_long_name_does_not_widen_a_table(tmp_path: Path) -> None:
    made(tmp_path, "a", host="h" * 5000)
    made(tmp_path, "b")
    lines = invoke("fleet", tmp_path, "--by", "replica", "--jobs", 1).stdout.splitlines()
    assert max(map(len, lines)) < 160


def test_sessions_that_cannot_be_read_are_listed(tmp_path: Path) -> None:
    made(tmp_path, "good")
    old = made(tmp_path, "old").folder
    (old / "totals.json").unlink()
    torn = made(tmp_path, "torn")
    torn.usage((0, 50))
    torn.append("kv_cache_usage.csv", "1,nonsense\n")
    found = fleet(tmp_path, code=1)
    assert found["whole"]["counts"]["sessions"] == 1
    failed = {Path(one["path"]).name: one["reason"] for one in found["failed"]}
    assert set(failed) == {"session_old", "session_torn"}
    assert "has no totals.json" in failed["session_old"]
    assert "kv_cache_usage.csv, line 3" in failed["session_torn"]


def test_nothing_that_can_be_read_is_an_error(tmp_path: Path) -> None:
    (made(tmp_path, "old").folder / "totals.json").unlink()
    done = invoke("fleet", tmp_path, "--jobs", 1)
    assert done.returncode == 2
    assert done.stderr.startswith("profilemate: no session could be read")


def test_a_session_that_is_there_twice_counts_once(tmp_path: Path) -> None:
    made(tmp_path / "one", "a")
    made(tmp_path / "two", "a")
    found = fleet(tmp_path)
    assert found["whole"]["counts"]["sessions"] == 1
    one, two = (str(tmp_path / folder / "session_a") for folder in ("one", "two"))
    assert found["doubles"] == [{"path": two, "same_as": one}]
    assert found["failed"] == []
    page = tmp_path / "fleet.html"
    assert invoke("fleet", tmp_path, "--jobs", 1, "-o", page).returncode == 0
    for said in (invoke("fleet", tmp_path, "--jobs", 1).stdout, page.read_text()):
        assert "Sessions that are there twice, and count once" in said
        assert "could not be read" not in said


@pytest.mark.parametrize("name", ["m", "meta-llama/Llama-3.3-70B-Instruct"])
def test_the_text_has_80_columns(tmp_path: Path, name: str) -> None:
    waited = {"first_token": histogram([35 * 10**6]), "finished": {"stop": 123_456}}
    found = {"requests": 1, "query_tokens": 1000, "hit_tokens": 1000}
    session = made(tmp_path, "a", engine(requests=waited, prefix_cache=found), deployment=name)
    session.usage((0, 100))
    said = invoke("fleet", tmp_path, "--jobs", 1, "--by", "deployment").stdout
    groups = said.split("By deployment\n")[1].split("\n\n")[0].splitlines()
    assert max(map(len, said.replace(str(tmp_path), "").splitlines())) <= 80
    assert groups[1].split()[0] == name
    assert " 1   123,456  100.00 % " in groups[-1]


def test_a_quantile_in_the_first_bin_is_a_bound(tmp_path: Path) -> None:
    """That bin is from 0 to 1 ms: 20 us would be shown as 500 us."""
    waited = {"queue": histogram([20_000] * 9), "first_token": histogram([20_000] * 9)}
    made(tmp_path, "a", engine(requests=waited))
    said = " ".join(invoke("fleet", tmp_path, "--jobs", 1).stdout.split())
    assert "Time in the queue < 1 ms half of the requests; 95 %: < 1 ms" in said
    assert "n/a < 1 ms < 1 ms evict." in said


def test_folders_patterns_and_snapshots(tmp_path: Path) -> None:
    made(tmp_path / "blue" / "host", "a")
    made(tmp_path / "green", "b")
    kept = made(tmp_path / "green", "b_snapshot_20260131_120000Z").folder

    def counted(*paths: object) -> int:
        count: int = fleet(*paths)["whole"]["counts"]["sessions"]
        return count

    assert counted(tmp_path) == 2
    assert counted(f"{tmp_path}/*/session_b") == 1
    assert counted(tmp_path / "blue", tmp_path / "blue" / "host" / "session_a") == 1
    assert counted(tmp_path, kept) == 3
    for nothing in (tmp_path / "red", f"{tmp_path}/red*"):
        done = invoke("fleet", nothing, "--jobs", 1)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--by", "colour"], "--by colour is not known"),
        (["--gpu-hour", "-1"], "--gpu-hour is -1"),
        (["--gpu-hour", "nan"], "--gpu-hour is nan"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, options: list[str], said: str) -> None:
    made(tmp_path, "a")
    done = invoke("fleet", tmp_path, *options)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_windows_are_said(tmp_path: Path) -> None:
    session = made(tmp_path, "a", window={"begin_sec": 4, "removed_segments": 1})
    session.usage((2, 50))
    found = fleet(tmp_path)["whole"]["counts"]
    assert (found["windows"], found["table_us"]) == (1, 6_000_000)
    # From the beginning of the window, at 4 s, to the end of the session, at 10 s.
    assert found["held_us"] == 50 * 6_000_000
    assert "1 session the tables are a window" in invoke("fleet", tmp_path, "--jobs", 1).stdout


def test_processes_give_what_one_gives(deployment: Deployment) -> None:
    four_replicas(deployment)
    paths = sorted(map(str, deployment.folder.glob("session_*")))
    alone = [of_session(open_session(path), path) for path in paths]
    assert [*local.read_all(paths, 2)] == alone


def test_a_process_that_dies_costs_its_session_alone(tmp_path: Path) -> None:
    for name in "abcd":
        made(tmp_path, name)
    paths = sorted(map(str, tmp_path.glob("session_*")))
    one, dead, *others = local.read_all(paths, 2, killed)
    assert isinstance(dead, Failed)
    assert (dead.path, "SIGKILL" in dead.reason) == (paths[1], True)
    assert [each.origin.path for each in (one, *others) if isinstance(each, Partial)] == [
        paths[0],
        *paths[2:],
    ]


def has_polars(process: str) -> bool:
    """Whether it has begun to import what reads sessions."""
    try:
        return "polars" in Path(f"/proc/{process}/maps").read_text()
    except OSError:
        return False


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    for number in range(100):
        made(tmp_path, f"s{number}")
    # A shell's background ignores Ctrl-C, and so would what starts there.
    program = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from profilemate.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "fleet", str(tmp_path), "--jobs", "2"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not any(has_polars(child) for child in children.read_text().split()):
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "profilemate: stopped; nothing was written\n"


def test_the_figures_of_nothing_are_none() -> None:
    figures = of_counts(Counts())
    assert (figures.hit_rate, figures.usage, figures.queue_p50) == (None, None, None)


def test_the_json_has_no_path_of_contents(tmp_path: Path) -> None:
    """What the sessions' contents are is in no result."""
    made(tmp_path, "a")
    assert "shared" not in fleet(tmp_path)["sessions"][0]
    assert renderer.KINDS[Fleet] == "fleet"
