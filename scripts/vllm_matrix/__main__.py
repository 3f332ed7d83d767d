# SPDX-License-Identifier: Apache-2.0
"""Check on many vLLM releases that the tables say what their schedulers and pools really did.

    python -m scripts.vllm_matrix [RELEASE ...] [--quick] [--pausing] [--update-docs]
                                  [--cache FOLDER]

For each release the Python files of its wheel are fetched, once, and put before the vLLM of this
environment. A process of its own then drives the release's real Scheduler, KV cache manager and
block pool, with profilemate attached as users attach it; the tables are compared with counts
taken at the blocks themselves. Then it is seen what the release does where releases differ. Exit
status: 0 all are exact, 1 some are not, 2 wrong use.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from scripts.vllm_matrix import page
from scripts.vllm_matrix.cases import CASES
from scripts.vllm_matrix.check import Result, Verdict, check
from scripts.vllm_matrix.releases import QUICK, RELEASES, Release, named
from scripts.vllm_matrix.wheels import FetchError, default_cache, python_files


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.vllm_matrix", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="all of them by default")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument(
        "--pausing", action="store_true", help="pause the recording, and check what comes after it"
    )
    parser.add_argument(
        "--update-docs", action="store_true", help=f"put what came of it into {page.NAME}"
    )
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="keep wheels' files here (%(default)s)"
    )
    parser.add_argument(
        "--jobs", type=int, default=2, help="releases that run at the same time (%(default)s)"
    )
    options = parser.parse_args()
    everything = [release.version for release in RELEASES]
    if options.pausing and options.update_docs:
        parser.error("--update-docs is for whole recordings, and not for --pausing")
    try:
        releases = named(options.releases or (QUICK if options.quick else everything))
    except KeyError as error:
        parser.error(f"no release {error} among those that are checked: {', '.join(everything)}")
    print(f"Python {platform.python_version()}, {len(CASES)} cases", flush=True)
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        work = partial(_check, options.cache.absolute(), options.pausing)
        for result, seconds in pool.map(work, releases):
            results.append(result)
            print(f"{page.line(result)} ({seconds:.0f} s)", flush=True)
            for reason in result.reasons:
                print(f"    {reason}", flush=True)
            if options.update_docs:
                page.update(result)
    for name, before, was, after, now in page.changes(results):
        print(f"{name}: {was} ({before}), {now} ({after})")
    if options.update_docs and len(results) == len(RELEASES):
        page.update_facts(results)
    return int(any(result.verdict is not Verdict.EXACT for result in results))


def _check(cache: Path, pausing: bool, release: Release) -> tuple[Result, float]:
    """What came of it, and how long it took."""
    began = time.monotonic()
    try:
        files = python_files(release, cache)
    except FetchError as error:
        result = Result(release.version, Verdict.UNTRIED, reasons=(str(error),))
    else:
        with tempfile.TemporaryDirectory(prefix="vllm-matrix-") as scratch:
            cases = [*CASES, *(["--pausing"] if pausing else [])]
            result = check(release.version, files, cases, Path(scratch))
    return result, time.monotonic() - began


if __name__ == "__main__":
    sys.exit(main())
