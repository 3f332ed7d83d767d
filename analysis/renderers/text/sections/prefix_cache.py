# SPDX-License-Identifier: Apache-2.0
"""What the prefix cache saved."""

from __future__ import annotations

from collections.abc import Iterator

from analysis.prefix.conversations import Conversations
from analysis.prefix.prefix_cache import Lookups, PrefixCache, TrueRate
from analysis.renderers.text.layout import Line, note, row
from analysis.tables.facts import Facts
from analysis.whatif.external import External
from analysis.wording.formats import seconds, share


def lines(
    cache: PrefixCache, external: External | None, talk: Conversations, facts: Facts
) -> Iterator[Line]:
    if facts.prefix_caching is False:
        yield from note("Prefix caching was off.")
        return
    true = cache.true
    if not true.requests:
        yield from note("No request was looked up and admitted.")
    else:
        yield from _true_rate(true)
        yield from _saved(external)
        yield from _conversations(talk)
    yield from _vllm_rate(cache)
    if cache.skipped.lookups:
        yield from row("Skip the cache", f"{cache.skipped.lookups:,} lookups, in neither rate")


def _true_rate(true: TrueRate) -> Iterator[Line]:
    tokens = f"{true.hit_tokens:,} of {true.query_tokens:,} came from the cache"
    yield from row("True hit rate", f"{share(true.token_rate)} of tokens", tokens)
    requests = f"{true.requests_hit:,} of {true.requests:,} found some of their prompt"
    yield from row("", f"{share(true.request_rate)} of requests", requests)
    if true.external_hit_tokens:
        requests = f"{true.external_requests_hit:,} requests"
        external = f"{true.external_hit_tokens:,} tokens for {requests}"
        yield from row("From a connector", external, "in neither rate")


def _saved(external: External | None) -> Iterator[Line]:
    """What a connector's hits saved, and what requests waited for them."""
    if external is None:
        return
    waited = f"requests waited {seconds(external.wait_request_sec)} for the connector (inferred)"
    if external.compute_sec is None:
        yield from row("", "time saved unknown", f"no time of a prompt token is known; {waited}")
        return
    sure = f"{external.confidence} confidence, by the step times"
    yield from row("", f"{seconds(external.compute_sec)} not computed", f"{sure}; {waited}")


def _conversations(talk: Conversations) -> Iterator[Line]:
    """Where the found tokens come from; nothing where that is not known of any."""
    if not talk.within_tokens + talk.across_tokens:
        return
    turns = f"{talk.turns:,} of {talk.requests:,} requests continue one"
    within = f"was found in the same conversation; {turns}"
    yield from row("Going on", f"{_of(talk.within_tokens, talk)} of it", within)
    across = "was found across conversations"
    yield from row("Shared", f"{_of(talk.across_tokens, talk)} of it", across)
    if talk.unknown_tokens:
        unknown = "came from requests that are not known: they have not ended"
        yield from row("", f"{_of(talk.unknown_tokens, talk)} of it", unknown)


def _of(tokens: int, talk: Conversations) -> str:
    return share(tokens / talk.hit_tokens)


def _vllm_rate(cache: PrefixCache) -> Iterator[Line]:
    vllm = cache.vllm
    name = f"vLLM {vllm.version}" if vllm.version else "vLLM"
    if vllm.counted is None or vllm.repeated is None or vllm.resumed is None:
        yield from row("vLLM's own rate", f"unknown: {name} is of no known release")
        return
    counted = f"{vllm.counted.hit_tokens:,} of {vllm.counted.query_tokens:,} as it counts them"
    yield from row("vLLM's own rate", f"{share(vllm.token_rate)} of tokens", counted)
    differences = [
        _difference("of waiting requests looked up again", vllm.repeated),
        _difference("of preempted requests that find their own blocks", vllm.resumed),
    ]
    causes = " and ".join(filter(None, differences))
    if causes:
        yield from row("Why they differ", f"{name} also counts {causes}.")
    else:
        yield from row("Why they agree", _left_out(name, cache))


def _difference(what: str, lookups: Lookups) -> str:
    if not lookups.lookups:
        return ""
    return (
        f"{lookups.lookups:,} lookups {what} "
        f"({lookups.hit_tokens:,} of {lookups.query_tokens:,} tokens found)"
    )


def _left_out(name: str, cache: PrefixCache) -> str:
    left_out = (cache.repeated + cache.resumed).lookups
    if not left_out:
        return "each request was looked up once"
    return (
        f"{name} leaves out what the true rate does: {left_out:,} lookups of requests that went "
        "on waiting or had been preempted"
    )
