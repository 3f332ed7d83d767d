# SPDX-License-Identifier: Apache-2.0
"""Eight releases of vLLM, from the oldest to the newest: all of them exact, in every case.

Their Python files are fetched once, into the user's cache folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from scripts.vllm_matrix import page
from scripts.vllm_matrix.cases import CASES
from scripts.vllm_matrix.check import Result, Verdict, check
from scripts.vllm_matrix.releases import QUICK, Release, named
from scripts.vllm_matrix.wheels import FetchError, default_cache, python_files

pytestmark = pytest.mark.network

AT_A_TIME = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Result]]]:
    """What comes of each release, some at a time."""
    folder = tmp_path_factory.mktemp("spread")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {
            release.version: pool.submit(checked, release, folder / release.version)
            for release in named(QUICK)
        }


def checked(release: Release, scratch: Path) -> Result:
    """What comes of one release."""
    files = python_files(release, default_cache())
    return check(release.version, files, list(CASES), scratch)


@pytest.mark.parametrize("version", QUICK)
def test_the_release_is_exact(results: dict[str, Future[Result]], version: str) -> None:
    try:
        result = results[version].result()
    except FetchError as error:
        pytest.fail(f"vLLM {version} cannot be fetched ({error}); this test needs a network")
    assert result.reasons == ()
    assert result.verdict is Verdict.EXACT
    # Otherwise this would show nothing.
    assert min(result.evictions, result.preemptions, result.reused) > 0
    # The release does what the page says.
    assert page.facts_of(version).items() <= result.facts.items()


def test_every_case_runs_on_some_of_them(results: dict[str, Future[Result]]) -> None:
    assert {case for done in results.values() for case in done.result().cases} == set(CASES)
