# SPDX-License-Identifier: Apache-2.0
"""``profilemate summary``: what a session's tables say, as text or as JSON."""

from __future__ import annotations

import sys

from profilemate.commands.options import After, AsJson, RequestsAfter, SessionArgument, opened
from profilemate.commands.reporting import one_line
from profilemate.commands.waiting import waiting


def summary(
    session: SessionArgument = None,
    after: After = 0.0,
    requests_after: RequestsAfter = 0,
    as_json: AsJson = False,
) -> None:
    """Sum up a session.

    KV cache usage, block lifetimes, evictions, prefix-cache hit rates, preemptions.

    It works while vLLM still runs and after a crash, too, and says how far the data goes.

    \b
    Examples:
      profilemate summary             the newest session
      profilemate summary ~/runs      the newest session in this folder
      profilemate summary ~/runs/session_20260131_120000_4711_c0ffee
      profilemate summary --after 30s
                                      without the first half minute
      profilemate summary --json | jq .prefix_cache.true.token_rate

    \b
    Exit codes:
      0   done
      2   no such session, one that cannot be read, or a wrong option
    """
    with one_line():
        from analysis import summarize
        from analysis.renderers import json
        from analysis.renderers.text import summary as text

        with waiting("reading the session"):
            found = summarize(opened(session, after, requests_after))
        # A name that the terminal's encoding cannot show must not end it.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        if as_json:
            print(json.render(found))
        else:
            text.write(found, sys.stdout)
