# SPDX-License-Identifier: Apache-2.0
"""What is made of results: medians, what is called best and when nothing is, and the renderers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from analysis import SessionError
from analysis.renderers import json as as_json
from analysis.renderers import sweep_csv
from analysis.renderers.html import sweep as page
from analysis.renderers.text import sweep as text
from analysis.sweep import Sweep, read
from tests.analysis.test_json import keys

DOCUMENTATION = Path(__file__).parent.parent.parent / "docs" / "sweep.md"


class Folder:
    """A sweep's folder, written by hand."""

    def __init__(self, folder: Path, settings: Sequence[Mapping[str, str]], repeats: int) -> None:
        self.folder, self.settings, self.repeats = folder, settings, repeats
        self.baseline: Mapping[str, Any] | None = None

    def add(self, number: int | None, repeat: int, speed: float | None, **more: Any) -> None:
        """The result of a run; without a number, of the baseline."""
        name = f"baseline-{repeat}" if number is None else f"{number:03}-{repeat}"
        folder = self.folder / name
        folder.mkdir()
        result = {
            "result_version": 1,
            "settings": None if number is None else self.settings[number],
            "repeat": repeat,
            "state": "done",
            "log": "log.txt",
            "source": "output",
            "figures": {} if speed is None else {"output_tokens_per_sec": speed},
            "requests": {"ended": 100, "input_tokens": 1000, "output_tokens": 1000},
            **more,
        }
        (folder / "result.json").write_text(json.dumps(result))

    def read(self) -> Sweep:
        plan = {
            "sweep_version": 1,
            "command": ["vllm", "bench", "<script>"],
            "combinations": self.settings,
            "repeats": self.repeats,
            "baseline": self.baseline,
        }
        (self.folder / "sweep.json").write_text(json.dumps(plan))
        return read(self.folder)


def swept(folder: Path, *speeds: Sequence[float]) -> Sweep:
    """A setting for each of these, which are its repeats."""
    settings = [{"max-num-seqs": str(4**number)} for number in range(len(speeds))]
    found = Folder(folder, settings, max(map(len, speeds)))
    for number, repeats in enumerate(speeds):
        for repeat, speed in enumerate(repeats, start=1):
            found.add(number, repeat, speed)
    return found.read()


def best(found: Sweep) -> list[int]:
    return [number for number, each in enumerate(found.combinations) if each.best]


def close(found: Sweep) -> list[int]:
    return [number for number, each in enumerate(found.combinations) if each.close]


def test_the_median_and_the_spread_of_repeats(tmp_path: Path) -> None:
    found = swept(tmp_path, [10, 40, 20], [5, 6])
    figure = found.combinations[0].figures["output_tokens_per_sec"]
    assert (figure.median, figure.least, figure.most, figure.count) == (20, 10, 40, 3)
    figure = found.combinations[1].figures["output_tokens_per_sec"]
    assert (figure.median, figure.least, figure.most, figure.count) == (5.5, 5, 6, 2)
    assert found.unfinished == 1


def test_the_best_is_better_at_its_worst(tmp_path: Path) -> None:
    found = swept(tmp_path, [10, 12], [21, 30], [20, 20.5])
    assert (best(found), close(found), found.no_best) == ([1], [], None)


def test_a_median_that_is_higher_is_not_enough(tmp_path: Path) -> None:
    # 25 is more than 22, but a run of 19 is no better than one of 20.
    found = swept(tmp_path, [10, 12], [25, 19, 26], [24, 20, 22])
    assert best(found) == []
    assert close(found) == [1, 2]
    assert found.no_best == "no setting's worst repeat is better than every other's best"


def test_a_tie_is_none(tmp_path: Path) -> None:
    assert best(swept(tmp_path, [10, 20], [20, 30])) == []


@pytest.mark.parametrize("speeds", [([10], [1000]), ([10, 11], [1000])])
def test_one_repeat_is_never_best(speeds: Sequence[Sequence[float]], tmp_path: Path) -> None:
    found = swept(tmp_path, *speeds)
    assert (best(found), close(found)) == ([], [])
    assert found.no_best is not None
    assert "with one run of a setting, a difference may be chance" in found.no_best


def test_one_setting_is_not_best(tmp_path: Path) -> None:
    found = swept(tmp_path, [10, 11])
    assert (best(found), found.no_best) == ([], "there are not two settings to compare")


def test_settings_that_failed_do_not_stand_in_the_way(tmp_path: Path) -> None:
    found = Folder(tmp_path, [{"a": "1"}, {"a": "2"}, {"a": "3"}], 2)
    for repeat in (1, 2):
        found.add(0, repeat, 10)
        found.add(1, repeat, 20)
        found.add(2, repeat, None, state="failed", why="exit code 1: out of memory")
    assert best(found.read()) == [1]
    failed = found.read().combinations[2]
    assert (failed.done, failed.failed, failed.figures) == (0, 2, {})
    assert failed.why == "exit code 1: out of memory"


@pytest.mark.parametrize(
    ("more", "doubt"),
    [
        ({"source": "session"}, "Tokens a second are from output and session"),
        ({"versions": {"vllm": "0.31.0"}}, "several vLLM releases: 0.31.0, 0.32.0"),
        (
            {"requests": {"ended": 98, "input_tokens": 1000, "output_tokens": 1000}},
            "from 98 to 100 requests that ended",
        ),
        (
            {"requests": {"ended": 100, "input_tokens": 1000, "output_tokens": 1051}},
            "from 1,000 to 1,051 generated tokens",
        ),
    ],
)
def test_runs_that_cannot_be_compared_have_no_best(
    more: Mapping[str, Any], doubt: str, tmp_path: Path
) -> None:
    found = Folder(tmp_path, [{"a": "1"}, {"a": "2"}], 2)
    for repeat in (1, 2):
        found.add(0, repeat, 10, versions={"vllm": "0.32.0"})
        found.add(1, repeat, 20, **{"versions": {"vllm": "0.32.0"}, **more})
    results = found.read()
    assert best(results) == []
    assert len(results.doubts) == 1
    assert doubt in results.doubts[0]
    assert doubt in " ".join(text.render(results).split())


def test_the_speed_up_is_over_the_baselines_median(tmp_path: Path) -> None:
    found = Folder(tmp_path, [{"a": "1"}, {"a": "2"}], 3)
    found.baseline = {"kind": "hf", "batch_size": 8}
    for repeat, (speed, other) in enumerate([(10, 50), (20, 100), (15, 60)], start=1):
        found.add(None, repeat, speed, input_lengths={"96": 2, "97": 1})
        found.add(0, repeat, other, input_lengths={"96": 2, "97": 5, "1": 1})
        found.add(1, repeat, None, state="failed", why="it was ended by SIGKILL")
    results = found.read()
    # 60 by 15.
    assert [each.speed_up for each in results.combinations] == [4, None]
    assert results.baseline is not None
    assert results.baseline.same_prompts is True
    assert "4.00x" in text.render(results)


def test_other_prompts_are_named(tmp_path: Path) -> None:
    found = Folder(tmp_path, [{"a": "1"}], 1)
    found.baseline = {"kind": "hf", "batch_size": 8}
    found.add(None, 1, 10, input_lengths={"96": 3})
    found.add(0, 1, 50, input_lengths={"96": 2, "97": 1})
    results = found.read()
    assert results.baseline is not None
    assert results.baseline.same_prompts is False
    assert "Not every run's session has prompts of these lengths" in " ".join(
        text.render(results).split()
    )


def test_other_work_on_the_machine_is_named(tmp_path: Path) -> None:
    found = Folder(tmp_path, [{"a": "1"}, {"a": "2"}], 1)
    found.add(0, 1, 10, cores=8, others_cores=2.0)
    found.add(1, 1, 20, cores=8, others_cores=5.5)
    (note,) = found.read().notes
    assert note.startswith("The machine was shared: in 1 of 2 runs")
    assert "in one of them 5.5 of 8" in note


def test_long_settings_get_numbers(tmp_path: Path) -> None:
    settings = [
        {
            "compilation-config": '{"mode": 3, "cudagraph_mode": "FULL", "level": 3}',
            "attention-backend": "FLASH_ATTN",
        },
        {"compilation-config": "", "attention-backend": ""},
    ]
    found = Folder(tmp_path, settings, 1)
    found.add(0, 1, 10)
    found.add(1, 1, 20)
    lines = text.render(found.read()).splitlines()
    assert '    1  compilation-config={"mode": 3, "cudagraph_mode": "FULL", "level": 3}' in lines
    assert "       attention-backend=FLASH_ATTN" in lines
    assert "    2  compilation-config= attention-backend=" in lines
    assert all(len(line) <= 80 for line in lines[2:])


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.charts: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if given.get("data-chart"):
            self.charts.append(str(given["data-chart"]))
        self.loads += [value for name in ("src", "href") if (value := given.get(name))]


def test_the_page_has_a_chart_for_each_figure(tmp_path: Path) -> None:
    found = Folder(
        tmp_path, [{"a": "1", "b": "x"}, {"a": "2", "b": "x"}, {"a": "4", "b": "<b>"}], 2
    )
    found.baseline = {"kind": "hf", "batch_size": 8}
    for repeat in (1, 2):
        found.add(None, repeat, 5)
        for number in range(3):
            figures = {"output_tokens_per_sec": 10.0 * number + repeat, "waste": 0.25}
            found.add(number, repeat, None, figures=figures)
    html = page.render(found.read())
    elements = Elements()
    elements.feed(html)
    assert elements.charts == ["output-tokens-per-sec", "waste"]
    # Links within it alone.
    assert all(link.startswith("#") for link in elements.loads)
    (data,) = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', html)
    charts = json.loads(data)
    first, second, baseline = charts["output-tokens-per-sec"]["data"]
    assert (first["x"], first["y"]) == (["1", "2"], [1.5, 11.5])
    assert first["error_y"]["array"] == [0.5, 0.5]
    assert (second["name"], second["x"]) == ("b=&lt;b&gt;", ["4"])
    assert baseline["y"] == [5, 5]
    assert charts["waste"]["data"][0]["y"] == [25, 25]
    assert "<script>" not in re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)


def test_a_value_that_looks_like_a_formula_stays_text(tmp_path: Path) -> None:
    found = Folder(tmp_path, [{"a": "=1+1"}, {"a": "2"}], 1)
    found.add(0, 1, 10)
    assert sweep_csv.table(found.read()).splitlines()[1].startswith("sweep,'=1+1,")
    (tmp_path / "other").mkdir()
    found = Folder(tmp_path / "other", [{"\uff1da": " \uff1d1\x1b[31m\n"}, {"\uff1da": "2"}], 1)
    found.add(0, 1, 10)
    for written in (sweep_csv.table(found.read()), sweep_csv.runs(found.read())):
        head, row = written.splitlines()[:2]
        assert head.startswith("kind,'\uff1da,")
        assert row.startswith("sweep,' \uff1d1\\x1b[31m\\x0a,")


def test_every_key_is_documented(tmp_path: Path) -> None:
    found = Folder(tmp_path, [{"a": "1"}, {"a": "2"}], 1)
    found.baseline = {"kind": "hf", "batch_size": 8}
    found.add(None, 1, 5, input_lengths={"5": 1})
    found.add(0, 1, 10, versions={"vllm": "0.32.0"}, notes=["n"])
    documented = set()
    for line in DOCUMENTATION.read_text().splitlines():
        if line.startswith("| `"):
            documented |= set(line.split("|")[1].replace("`", "").replace(" ", "").split(","))
    written = json.loads(as_json.render(found.read()))
    for each in (*written["combinations"], written["baseline"], *written["runs"]):
        # Their keys are names of settings, of figures, of packages.
        for name in {"settings", "figures", "versions", "requests"} & each.keys():
            each[name] = 0
    # A list that is empty has no entries to name.
    undocumented = {key for key in keys(written) if {key, f"{key}[]"}.isdisjoint(documented)}
    assert undocumented == set()


@pytest.mark.parametrize("content", [None, "", "[]", '{"sweep_version": 99}'])
def test_what_is_no_sweep_is_one_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "sweep.json").write_text(content)
    with pytest.raises(SessionError, match=r"sweep\.json|no sweep"):
        read(tmp_path)
