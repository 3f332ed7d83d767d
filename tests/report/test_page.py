# SPDX-License-Identifier: Apache-2.0
"""The page in a real browser. Each test also fails on any error, warning, dialog or request."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from analysis.wording.printable import abridged
from tests.analysis.builder import SessionBuilder
from tests.report.conftest import made, run
from tests.report.opened import Opened

MEGABYTE = 1_000_000

OVER_TIME = [
    "blocks",
    "load",
    "slots",
    "block-map",
    "hit-rate",
    "eviction-rate",
    "regret",
    "timeline",
    "step-phases",
    "steps",
]
CHARTS = {
    *OVER_TIME,
    "head-room",
    "sharing",
    "working-set-curve",
    "age-at-hit",
    "ages",
    "miss-ratio-curve",
}
BARS = {
    "fragmentation",
    "misses",
    "pieces",
    "working-set",
    "evictors",
    "families",
    "holders",
    "waiting",
    "pressure",
    "preemptions",
    "rent",
}
NOT_DRAWN = {"executions"}
"""The session is none on a GPU: one line says so."""


def at(content: Any, key: str) -> Any:
    for name in key.split("."):
        content = content[name]
    return content


def drawn(page: Page, chart: str) -> dict[str, Any]:
    """The data that a chart really shows, by the names of its lines."""
    traces = page.evaluate(
        """key => {
            const plain = (values) => values === undefined ? null : Array.from(values);
            const plot = document.querySelector(`[data-chart="${key}"]`);
            return plot.data.map(({name, x, y}) => ({name, x: plain(x), y: plain(y)}));
        }""",
        chart,
    )
    return {trace["name"]: trace for trace in traces}


@pytest.fixture(scope="module")
def page(browser: Browser, page_of_busy: Path) -> Iterator[Page]:
    """The busy session's page, for tests that leave it as it is."""
    with Opened(browser) as opened:
        yield opened(page_of_busy)
        assert opened.trouble == []


@pytest.fixture(scope="module")
def summary(busy: SessionBuilder) -> dict[str, Any]:
    """The same session's summary, as programs see it."""
    content: dict[str, Any] = json.loads(run("summary", str(busy.folder), "--json").stdout)
    return content


def test_every_chart_is_drawn(page: Page) -> None:
    shown = page.eval_on_selector_all("[data-chart]", "all => all.map(e => e.dataset.chart)")
    assert len(shown) == len(set(shown))
    assert set(shown) == CHARTS
    empty = page.eval_on_selector_all(
        "[data-chart]",
        """all => all.filter(e => !e.querySelector('.trace path, .cartesianlayer image'))
            .map(e => e.dataset.chart)""",
    )
    assert empty == []
    figures = page.query_selector_all("figure")
    assert {figure.get_attribute("id") for figure in figures} == CHARTS | BARS | NOT_DRAWN
    for figure in figures:
        assert figure.query_selector("h3").inner_text().strip()
        said = figure.query_selector("figcaption, .nothing").inner_text().strip()
        assert said.endswith(".")


def test_the_axes_have_titles(page: Page) -> None:
    untitled = page.evaluate(
        """() => [...document.querySelectorAll('[data-chart]')].flatMap(plot =>
            Object.entries(plot._fullLayout)
                .filter(([name]) => /^[xy]axis\\d*$/.test(name))
                .filter(([_, axis]) => !axis.title.text || /Click/.test(axis.title.text))
                .map(([name]) => plot.dataset.chart + ' ' + name))"""
    )
    assert untitled == []


def test_figures_are_those_of_the_summary(page: Page, summary: dict[str, Any]) -> None:
    found = page.eval_on_selector_all(
        "[data-key]", "all => all.map(e => [e.dataset.key, e.dataset.value, e.innerText])"
    )
    assert len(found) >= 8
    for key, value, text in found:
        expected = at(summary, key)
        assert json.loads(value) == expected
        shown = float(text.replace(",", "").split()[0])
        factor = 100 if text.endswith("%") and not key.endswith("_pct") else 1
        assert shown == pytest.approx(factor * expected, abs=0.00501)


def test_charts_agree_with_the_summary(page: Page, summary: dict[str, Any]) -> None:
    rates = drawn(page, "eviction-rate")
    x = next(iter(rates.values()))["x"]
    width = (x[-1] - x[0]) / (len(x) - 1)
    reasons = [trace["y"] for name, trace in rates.items() if not name.startswith("busiest")]
    evicted = sum(map(sum, reasons))
    # Charts have five digits of each value.
    assert evicted * width == pytest.approx(summary["evictions"]["total"]["blocks"], rel=1e-4)
    so_far = drawn(page, "hit-rate")["so far"]["y"][-1]
    rate = summary["prefix_cache"]["true"]["token_rate"]
    assert so_far == pytest.approx(100 * rate, rel=1e-4)
    usage = drawn(page, "load")["usage"]["y"]
    mean = summary["usage"]["combined"]["mean_pct"]
    assert sum(usage) / len(usage) == pytest.approx(mean, rel=1e-4)
    assert max(drawn(page, "load")["highest"]["y"]) == pytest.approx(
        summary["usage"]["combined"]["peak_pct"], rel=1e-3
    )


def test_bars_have_their_figures_beside_them(page: Page, summary: dict[str, Any]) -> None:
    missed = summary["misses"]
    parts = page.eval_on_selector_all(
        "#misses .bars li", "all => all.map(e => e.querySelectorAll('span')[1].innerText)"
    )
    tokens = [int(part.split()[0].replace(",", "")) for part in parts]
    reasons = [reason["tokens"] for reason in missed["by_reason"].values()]
    assert tokens == [missed["hit_tokens"], *reasons, missed["partial_tokens"]]
    widths = page.eval_on_selector_all(
        "#misses .bars i", "all => all.map(e => e.getBoundingClientRect().width)"
    )
    longest = max(tokens)
    for width, count in zip(widths, tokens, strict=True):
        assert width == pytest.approx(max(widths) * count / longest, abs=1)


def test_it_stays_small(page_of_busy: Path) -> None:
    assert page_of_busy.stat().st_size < 6 * MEGABYTE


def test_a_phone_needs_no_sideways_scrolling(opened: Opened, page_of_busy: Path) -> None:
    page = opened(page_of_busy, width=360, has_touch=True, is_mobile=True)
    for details in page.query_selector_all("summary"):
        details.click()
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    widths = page.eval_on_selector_all("[data-chart]", "all => all.map(e => e.scrollWidth)")
    assert max(widths) <= 360


TEXT = ["--text", "--soft", "--link"]
DRAWN = ["--held", "--cached", "--free", "--green", "--regret", "--purple"]


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2.2 defines it, of rgb(r, g, b)."""
    parts = [int(part) / 255 for part in colour.removeprefix("rgb(").rstrip(")").split(",")]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def colour(page: Page, name: str) -> str:
    """What the style sheet's name comes to."""
    found: str = page.evaluate(
        """name => {
            const probe = document.body.appendChild(document.createElement('i'));
            probe.style.color = `var(${name})`;
            const found = getComputedStyle(probe).color;
            probe.remove();
            return found;
        }""",
        name,
    )
    return found


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(opened: Opened, page_of_small: Path, scheme: str) -> None:
    """AA: 4.5 for text, 3 for what a chart draws."""
    page = opened(page_of_small, color_scheme=scheme)
    grounds = [colour(page, name) for name in ("--page", "--card", "--note")]
    for name, ground in product(TEXT, grounds):
        assert contrast(colour(page, name), ground) >= 4.5, (name, ground)
    for name, ground in product(DRAWN, grounds[:2]):
        assert contrast(colour(page, name), ground) >= 3, (name, ground)


def ground(page: Page) -> tuple[str, str]:
    """The page's background, and what the first chart is drawn with."""
    return page.evaluate(
        """() => {
            const plot = document.querySelector('[data-chart]');
            return [getComputedStyle(document.body).backgroundColor, plot.data[0].line.color];
        }"""
    )


def test_the_theme_follows_the_system_and_can_be_chosen(
    opened: Opened, page_of_small: Path
) -> None:
    page = opened(page_of_small, color_scheme="dark")
    dark = ground(page)
    assert luminance(dark[0]) < 0.1
    page.select_option("#theme", "light")
    light = ground(page)
    assert luminance(light[0]) > 0.8
    assert light[1] == colour(page, "--held") != dark[1]
    page.select_option("#theme", "light dark")
    assert ground(page) == dark
    page.emulate_media(color_scheme="light")
    page.wait_for_function(
        "dark => document.querySelector('[data-chart]').data[0].line.color !== dark", arg=dark[1]
    )
    assert ground(page) == light


def test_print_is_light_and_without_controls(opened: Opened, page_of_small: Path) -> None:
    page = opened(page_of_small, color_scheme="dark")
    page.select_option("#theme", "dark")
    page.emulate_media(media="print")
    page.wait_for_function("document.querySelector('.zoom').offsetParent === null")
    page.wait_for_function(
        "held => document.querySelector('[data-chart]').data[0].line.color === held",
        arg=colour(page, "--held"),
    )
    assert luminance(ground(page)[0]) > 0.8
    assert not page.is_visible("#theme")


def span(page: Page, chart: str) -> list[float]:
    """The part of its x axis that a chart shows."""
    found: list[float] = page.evaluate(
        'key => [...document.querySelector(`[data-chart="${key}"]`)._fullLayout.xaxis.range]', chart
    )
    return found


def test_the_keyboard_reaches_everything(page: Page) -> None:
    controls = "a[href], select, button, summary"
    wanted = page.eval_on_selector_all(controls, "all => all.length")
    reached = 0
    for _ in range(3 * wanted):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        reached += page.evaluate("sel => document.activeElement.matches(sel)", controls)
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none"
    assert reached == wanted


def test_zooming_by_keyboard_moves_all_charts_over_time(opened: Opened, page_of_busy: Path) -> None:
    page = opened(page_of_busy)
    begin, end = span(page, "blocks")
    ages = span(page, "ages")
    page.focus("#blocks [data-zoom=in]")
    page.keyboard.press("Enter")
    middle = [begin + (end - begin) / 4, end - (end - begin) / 4]
    for chart in OVER_TIME:
        assert span(page, chart) == pytest.approx(middle)
    assert span(page, "ages") == ages
    page.focus("#steps [data-zoom=right]")
    page.keyboard.press("Enter")
    later = [edge + (end - begin) / 8 for edge in middle]
    assert span(page, "blocks") == pytest.approx(later)
    page.focus("#load [data-zoom=reset]")
    page.keyboard.press("Enter")
    assert span(page, "steps") == pytest.approx([begin, end])


def test_dragging_in_a_chart_zooms_and_pointing_at_it_shows_its_values(
    opened: Opened, page_of_small: Path
) -> None:
    page = opened(page_of_small)
    begin, end = span(page, "blocks")
    page.locator("#blocks .plot").scroll_into_view_if_needed()
    box = page.locator("#blocks .nsewdrag").bounding_box()
    assert box is not None
    height = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + box["width"] / 4, height)
    page.wait_for_selector("#blocks .hoverlayer text")
    assert "in use" in page.text_content("#blocks .hoverlayer")
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, height, steps=5)
    page.mouse.up()
    page.wait_for_function(
        "end => document.querySelector('[data-chart=load]')._fullLayout.xaxis.range[1] < end",
        arg=end - 1,
    )
    zoomed = span(page, "load")
    width = end - begin
    assert zoomed == pytest.approx([begin + width / 4, begin + width / 2], abs=width / 100)


HOSTILE = (
    "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
    '" onmouseover="window.hacked = 3" <a href="https://example.org">x</a> ${1} $title &amp;'
    "\u2028\u202e<!--"
)


def test_text_of_the_session_stays_text(opened: Opened, session: SessionBuilder) -> None:
    session.usage((0, 50), (5, 0))
    session.metadata(
        model={"name": HOSTILE}, session_id=HOSTILE, host=HOSTILE, versions={HOSTILE: HOSTILE}
    )
    session.requests(
        {
            "request_id": HOSTILE,
            "finish_reason": HOSTILE,
            "input_length": 20,
            "output_length": 3,
            "hit_tokens": 0,
            "queue_sec": 0.5,
            "first_token_sec": 1,
            "finish_sec": 2,
        }
    )
    page = opened(made(session.folder))
    page.locator("#timeline .plot").scroll_into_view_if_needed()
    box = page.locator("#timeline .nsewdrag").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.15, box["y"] + box["height"] / 2)
    page.wait_for_selector("#timeline .hoverlayer text")
    assert "</script>" in page.text_content("#timeline .hoverlayer")
    page.click("#timeline summary")
    assert page.evaluate("window.hacked") is None
    assert page.query_selector_all("img, a[href^=http], .hoverlayer a") == []
    shown = HOSTILE.replace("\u2028", "\\u2028").replace("\u202e", "\\u202e")
    assert page.inner_text("#timeline tbody th") == abridged(shown)
    assert page.inner_text("h1") == shown


def test_without_script_the_words_and_figures_are_there(opened: Opened, page_of_busy: Path) -> None:
    page = opened(page_of_busy, script=False)
    assert "of its blocks in use on average" in page.inner_text("#story")
    assert "Charts need JavaScript" in page.inner_text("#story")
    assert "blocks were evicted" in page.inner_text("#eviction-rate figcaption")


def test_a_session_without_a_row_says_so(opened: Opened, session: SessionBuilder) -> None:
    page = opened(made(session.folder))
    assert page.query_selector_all("[data-chart]") == []
    said = page.inner_text("main")
    for words in (
        "no block of the KV cache was ever held",
        "No cached block was evicted.",
        "No request was looked up and admitted.",
        "No request ended in the session.",
        "No step scheduled a token.",
    ):
        assert words in said


def test_what_is_missing_is_said_and_the_rest_is_drawn(
    opened: Opened, session: SessionBuilder
) -> None:
    session.usage((0, 50), (5, 0))
    session.metadata(complete=False, ended_at=None, dropped_events=7)
    page = opened(made(session.folder))
    assert page.eval_on_selector_all("[data-chart]", "all => all.length") == 2
    notes = page.inner_text("#story")
    assert "Cut off: journal/ is missing" in notes
    assert "7 events were dropped" in notes
    assert "No cached block was evicted." in page.inner_text("#evictions")
