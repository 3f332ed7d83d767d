# SPDX-License-Identifier: Apache-2.0
"""Links between the pages lead somewhere, on a code host and on the site; and so do the paths that
the pages name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ON_TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
FENCE = re.compile(r"^( *)```.*?^\1```", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)
PATH = re.compile(
    r"`((?:analysis|benchmarks|demo|docs|profilemate|requirements|scripts|tests)/\S*)`"
)


def pages(root: Path) -> list[Path]:
    """What ``make docs`` makes the site from."""
    return [root / name for name in ON_TOP] + sorted((root / "docs").glob("*.md"))


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Where a link to the page can lead, by the rules of code hosts."""
    taken: Counter[str] = Counter()
    found = set()
    for heading in HEADING.findall(prose(page)):
        text = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading).lower()
        anchor = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{anchor}-{taken[anchor]}" if taken[anchor] else anchor)
        taken[anchor] += 1
    return found


def broken(page: Path, root: Path) -> Iterator[str]:
    """The page's links that lead nowhere. Addresses on other hosts are not looked at."""
    on_site = {path.resolve() for path in [*pages(root), *(root / "docs" / "images").glob("*")]}
    for link in LINK.findall(CODE.sub("", prose(page))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page.resolve()
        if target not in on_site:
            yield f"{link}: no such page" if not target.exists() else f"{link}: not on the site"
        elif anchor and anchor not in anchors(target):
            yield f"{link}: no such heading"


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken(page, ROOT)) == []


@pytest.mark.parametrize("page", pages(ROOT), ids=lambda page: page.name)
def test_paths_exist(page: Path) -> None:
    paths = [path for path in PATH.findall(prose(page)) if "NAME" not in path]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_page_is_in_the_navigation_and_in_the_index() -> None:
    named = re.findall(r'"(\S+\.md)"', (ROOT / "zensical.toml").read_text())
    assert sorted(named) == sorted(str(page.relative_to(ROOT)) for page in pages(ROOT))
    index = ROOT / "docs" / "index.md"
    linked = {link.partition("#")[0] for link in LINK.findall(index.read_text())}
    docs = {page.name for page in pages(ROOT) if page.parent == index.parent}
    assert docs - linked == {index.name}


@pytest.mark.parametrize(
    ("link", "problem"),
    [
        ("docs/pool.md", None),
        ("docs/pool.md#what-is-held", None),
        ("docs/pool.md#vllms-pool_size-1", None),
        ("#start", None),
        ("docs/images/pool.png", None),
        ("https://nowhere.invalid/pool.md", None),
        ("docs/cache.md", "no such page"),
        ("pool.md", "no such page"),
        ("docs/pool.md#held", "no such heading"),
        ("docs/pool.md#in-code", "no such heading"),
        ("#end", "no such heading"),
        ("module.py", "not on the site"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(tmp_path: Path, link: str, problem: str | None) -> None:
    images = tmp_path / "docs" / "images"
    images.mkdir(parents=True)
    (images / "pool.png").touch()
    (tmp_path / "module.py").touch()
    (tmp_path / "docs" / "pool.md").write_text(
        "# Pool\n## What is *held*?\n## vLLM's `pool_size`\n## vLLM's `pool_size`\n"
        "```\n# In code\n```\n"
    )
    for name in ON_TOP:
        (tmp_path / name).write_text("# Start\n")
    page = tmp_path / "README.md"
    page.write_text(f"# Start\n`[code](no.md)` and\n```\n[code](no.md)\n```\n[a link]({link})\n")
    assert list(broken(page, tmp_path)) == ([] if problem is None else [f"{link}: {problem}"])
