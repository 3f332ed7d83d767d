# SPDX-License-Identifier: Apache-2.0
"""``profilemate metrics``: the totals of a session as metrics for Prometheus."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.errors import SessionError
from profilemate.commands.shared.options import SessionArgument
from profilemate.commands.shared.stdout import show_line
from profilemate.installing import pip_install


@dataclass(frozen=True)
class MetricsOptions:
    session: SessionArgument = None


def metrics(options: MetricsOptions) -> int:
    """Print the totals of a session as metrics for Prometheus.

    The text is what the session's collector offers at VLLM_PROFILING_METRICS while vLLM runs. The
    figures are those of the whole run, from totals.json in the session's folder, which is at most a
    second old.

    \b
    Examples:
      profilemate metrics
      profilemate metrics ~/runs > /var/lib/node_exporter/profilemate.prom

    \b
    Exit codes:
      0   printed
      2   no such session, or it has no totals
    """
    from analysis.tables.find import find_session
    from profilemate.format import errors, totals
    from profilemate.format.folder import Folder

    session = find_session(options.session)
    try:
        with Folder.anyones(session) as folder:
            found = totals.read(folder)
    except errors.SessionError as error:
        raise SessionError(str(error)) from None
    try:
        from profilemate.metrics import exposition
    except ImportError:
        raise SessionError(f"metrics need prometheus-client: {pip_install('analysis')}") from None
    show_line(exposition.render(found).decode().rstrip("\n"))
    return 0
