# SPDX-License-Identifier: Apache-2.0
"""What pages with charts have around them.

Such a page needs nothing but itself: plotly.js, the style sheet and the script are in it, and its
content security policy lets it load nothing and run no other script.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from plotly.offline import get_plotlyjs

from analysis.renderers.html import elements
from analysis.renderers.html.chart import Section


def framed(title: str, skip: str, links: str, sections: Sequence[Section], main: str) -> str:
    """The page of these sections, whose content is ``main``.

    ``title`` is plain text; ``skip`` says where the first link goes, past the ``links``.
    """
    plotly, script = get_plotlyjs(), asset("page.js")
    return Template(asset("frame.html")).substitute(
        policy=policy(plotly, script),
        style=asset("page.css"),
        title=elements.text(title),
        skip=skip,
        links=links,
        main=main,
        data=elements.data(sections),
        plotly=plotly,
        script=script,
    )


def asset(name: str) -> str:
    """A file that lies beside this module."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def policy(*scripts: str) -> str:
    """Only these scripts run, and nothing is fetched. (plotly.js writes styles as it draws.)"""
    digests = (hashlib.sha256(script.encode()).digest() for script in scripts)
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed or _NO_SCRIPT}; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


_NO_SCRIPT = "'none'"
