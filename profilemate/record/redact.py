# SPDX-License-Identifier: Apache-2.0
"""A command line without its secrets."""

from __future__ import annotations

import re

_SECRET_WORDS = frozenset(
    (
        "apikey",
        "auth",
        "credential",
        "credentials",
        "key",
        "keys",
        "passphrase",
        "passwd",
        "password",
        "secret",
        "token",
    )
)
_SECRET_VALUE = re.compile(
    r"""(?ix) ( ["']? [\w-]* (?: api_?key | secret | password | passwd | token ) ["']? \s* [:=] \s*
    ["'] ) [^"']* """
)
_URL_PASSWORD = re.compile(r"(://[^/@\s:]*):[^/@\s]+@")
REDACTED = "***"


def redact(argv: list[str]) -> list[str]:
    """The command line without its secrets.

    >>> redact(["vllm", "serve", "m", "--api-key", "a", "b", "--hf-token=c", "--max-tokens", "5"])
    ['vllm', 'serve', 'm', '--api-key', '***', '***', '--hf-token=***', '--max-tokens', '5']
    """
    redacted = []
    secret = False
    for argument in argv:
        if argument.startswith("-"):
            flag, equals, _ = argument.partition("=")
            secret = not _SECRET_WORDS.isdisjoint(re.split(r"[-_.]+", flag.lower()))
            if secret and equals:
                secret = False
                redacted.append(f"{flag}={REDACTED}")
                continue
        elif secret:
            redacted.append(REDACTED)
            continue
        redacted.append(_redact_within(argument))
    return redacted


def _redact_within(argument: str) -> str:
    """An argument without the secrets in its JSON or its URL."""
    argument = _SECRET_VALUE.sub(rf"\g<1>{REDACTED}", argument)
    return _URL_PASSWORD.sub(rf"\1:{REDACTED}@", argument)
