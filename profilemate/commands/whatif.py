# SPDX-License-Identifier: Apache-2.0
"""``profilemate whatif``: what requests would have done under other configurations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from analysis.errors import RuleError, SessionError
from profilemate.commands import whatif_exact, whatif_fast
from profilemate.commands.shared import traces
from profilemate.commands.shared.options import (
    FROM_THE_BEGINNING,
    After,
    AsJson,
    LastHalf,
    Period,
    RequestsAfter,
    TimeUnit,
    TokensPerId,
    opened,
)
from profilemate.commands.shared.progress import status
from profilemate.commands.shared.stdout import show
from profilemate.commands.shared.values import folder

if TYPE_CHECKING:
    from analysis.tables.session import Session
    from analysis.whatif.curve import Curve
    from analysis.whatif.simulated import Simulated
    from analysis.whatif.workload import Workload


def _values(name: str, metavar: str, text: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(
        name, metavar=metavar, help=text, show_default=False
    )
    return option


@dataclass(frozen=True)
class WhatifOptions:
    source: Annotated[
        Path | None,
        typer.Argument(
            metavar="SESSION|TRACE",
            parser=folder,
            help="A session's folder, or a folder of sessions: the newest one is taken. Or a "
            "trace: a line of JSON for each request, as Mooncake's, or BurstGPT's or Azure's CSV.",
            show_default=False,
        ),
    ] = None
    blocks: Annotated[
        str | None,
        _values(
            "--blocks",
            "SIZES",
            "Pools: blocks as vLLM counts them (4000), or a factor of the recorded memory (0.5x).",
        ),
    ] = None
    block_size: Annotated[
        str | None,
        _values("--block-size", "TOKENS", "Tokens of a block. Without --blocks, same memory."),
    ] = None
    max_num_seqs: Annotated[
        str | None, _values("--max-num-seqs", "COUNTS", "Most requests that run at once.")
    ] = None
    max_num_batched_tokens: Annotated[
        str | None, _values("--max-num-batched-tokens", "TOKENS", "Most tokens of a step.")
    ] = None
    prefix_caching: Annotated[
        str | None, _values("--prefix-caching", "on,off", "Whether to use the prefix cache.")
    ] = None
    scheduling_policy: Annotated[
        str | None,
        _values("--scheduling-policy", "NAMES", "Order of requests: fcfs, priority."),
    ] = None
    chunked_prefill: Annotated[
        str | None, _values("--chunked-prefill", "on,off", "Long prompts over several steps.")
    ] = None
    retention_interval: Annotated[
        str | None,
        _values(
            "--prefix-cache-retention-interval",
            "TOKENS",
            "Which blocks of sliding windows and Mamba states stay cached: every so many tokens, 0 "
            "(where prompts end), dense (all).",
        ),
    ] = None
    users: Annotated[
        str | None,
        _values(
            "--users",
            "COUNTS",
            "Users that wait for answers, and take up one conversation after the other (8); or "
            "each: one for each conversation.",
        ),
    ] = None
    host_gib: Annotated[
        str | None,
        _values(
            "--host-gib",
            "SIZES",
            "GiB of host memory of each engine that keep blocks beside the pool, by vLLM's "
            "offloading connector; 0: none.",
        ),
    ] = None
    host_bandwidth: Annotated[
        str | None,
        _values(
            "--host-bandwidth",
            "GB/s",
            "What each GPU copies to or from host memory. Default: 25.",
        ),
    ] = None
    host_chunk: Annotated[
        str | None,
        _values(
            "--host-chunk",
            "TOKENS",
            "Host memory keeps and finds so many tokens together, as LMCache does with 256. "
            "Default: a block.",
        ),
    ] = None
    token_bytes: Annotated[
        str | None,
        _values(
            "--kv-bytes-per-token",
            "BYTES",
            "With --host-gib, for a trace: what a token takes in the KV cache of each GPU.",
        ),
    ] = None
    fast: Annotated[
        bool,
        typer.Option(
            "--fast",
            help="Model the cache alone, in seconds and without vLLM: hit rates by pool size and "
            "eviction rule, and what holds the hit rate back.",
        ),
    ] = False
    eviction: Annotated[
        str | None,
        _values(
            "--eviction",
            "RULES",
            "With --fast, the eviction rules: lru (vLLM's), fifo, lfu, arc, s3-fifo, sieve, belady "
            "(the bound).",
        ),
    ] = None
    step_ms: Annotated[
        float | None,
        typer.Option(
            "--step-ms",
            metavar="MS",
            help="How long every step takes. Default: as in the session; 30 ms for a trace.",
            show_default=False,
        ),
    ] = None
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs",
            metavar="N",
            help="Configurations to simulate at once, about 1 GB each. Default: one for each "
            "processor.",
            show_default=False,
        ),
    ] = None
    ray: Annotated[
        str | None,
        typer.Option(
            "--ray",
            metavar="ADDRESS",
            help="Simulate on the machines of this Ray cluster, each configuration as a task: "
            "host:port, or auto. vLLM is needed there, and not here.",
            show_default=False,
        ),
    ] = None
    tokens_per_id: TokensPerId = None
    time_unit: TimeUnit = None
    after: After = FROM_THE_BEGINNING
    requests_after: RequestsAfter = 0
    last_half: LastHalf = False
    period: Period = None
    as_json: AsJson = False


def whatif(options: WhatifOptions) -> int:
    """Try other configurations on recorded requests.

    The requests go through vLLM's own scheduler, KV cache manager and block pool again, with
    other settings, on a simulated clock: no model, no GPU, no network. It runs wherever vLLM can
    be imported, with the installed release. Put commas between the values of a setting. Every
    combination of the settings is simulated. A setting that you do not name stays as recorded.

    The first two lines are the recorded configuration, as measured and as simulated. The closer
    these two are, the more you can trust the other lines.

    \b
    Examples:
      profilemate whatif              half, twice and four times the pool, of
                                      the newest session
      profilemate whatif SESSION --blocks 0.5x,2x --block-size 16,32
      profilemate whatif SESSION --max-num-seqs 64,128 --prefix-caching off
      profilemate whatif SESSION --max-num-batched-tokens 2048,8192
      profilemate whatif SESSION --host-gib 8,32 --host-bandwidth 50
      profilemate whatif SESSION --users 8,each
                                      users that wait for their answers
      profilemate whatif SESSION --fast
                                      from a quarter to 16 times the pool
      profilemate whatif trace.jsonl --blocks 4000,16000 --step-ms 25
      profilemate whatif SESSION --blocks 1000,2000,4000 --ray auto
      profilemate whatif SESSION --json | jq '.outcomes[] | {label, hit_rate}'

    \b
    Exit codes:
      0   done; the output names each configuration that vLLM refused
      2   no configuration could be simulated, no such session, or a wrong
          option
    """
    from analysis.renderers.text import miss_ratio_curve
    from analysis.renderers.text import whatif as text

    if options.fast:
        show(_modelled(options), miss_ratio_curve.write, as_json=options.as_json)
    else:
        show(_simulated(options), text.write, as_json=options.as_json)
    return 0


def _modelled(options: WhatifOptions) -> Curve:
    with status("reading the requests"):
        _, workload = _requests(options)
    given = {
        **_settings(options),
        "step-ms": None if options.step_ms is None else f"{options.step_ms}",
        "jobs": None if options.jobs is None else f"{options.jobs}",
        "ray": options.ray,
    }
    with status("modelling the cache"):
        return whatif_fast.curve(workload, given, options.eviction)


def _simulated(options: WhatifOptions) -> Simulated:
    if options.eviction is not None:
        raise RuleError("--eviction: vLLM's own code has one eviction rule; add --fast for others")
    where = whatif_exact.where(options.jobs, options.ray)
    settings = _settings(options)
    chosen = whatif_exact.choices(settings)
    with status("reading the requests"):
        session, workload = _requests(options)
    if session is not None and not any(settings.values()):
        chosen = whatif_exact.choices({"blocks": whatif_exact.DEFAULT_BLOCKS})
    return whatif_exact.simulated(session, workload, chosen, step_ms=options.step_ms, where=where)


def _settings(options: WhatifOptions) -> dict[str, str | None]:
    """The settings to try, by the names of their options."""
    return {
        "blocks": options.blocks,
        "block-size": options.block_size,
        "max-num-seqs": options.max_num_seqs,
        "max-num-batched-tokens": options.max_num_batched_tokens,
        "prefix-caching": options.prefix_caching,
        "scheduling-policy": options.scheduling_policy,
        "chunked-prefill": options.chunked_prefill,
        "users": options.users,
        "prefix-cache-retention-interval": options.retention_interval,
        "host-gib": options.host_gib,
        "host-bandwidth": options.host_bandwidth,
        "host-chunk": options.host_chunk,
        "kv-bytes-per-token": options.token_bytes,
    }


def _requests(options: WhatifOptions) -> tuple[Session | None, Workload]:
    """The requests, and the session that they are from; None for a trace."""
    from analysis.whatif import workload

    source = options.source
    if source is not None and source.is_file():
        if options.after.mark is not None or options.period is not None:
            raise RuleError("a mark and --period: a trace has none; leave a time out, --after 30s")
        found = workload.read_workload(
            source,
            tokens_per_id=traces.tokens_per_id(options.tokens_per_id),
            time_unit=traces.time_unit(options.time_unit),
        )
        return None, found.after(
            options.after.sec, options.requests_after, last_half=options.last_half
        )
    traces.for_sessions_no_option(tokens_per_id=options.tokens_per_id, time_unit=options.time_unit)
    # Other places than folders have a scheme.
    if source is not None and ":/" not in str(source) and not source.exists():
        raise SessionError(
            f"there is no folder or file {source}; name a session's folder, one of sessions, or a "
            "trace's"
        )
    session = opened(source, options)
    return session, workload.of_session(session)
