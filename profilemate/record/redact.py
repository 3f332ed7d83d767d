# SPDX-License-Identifier: Apache-2.0
"""A command line without its secrets.

A secret has no shape of its own, so this does not look for secrets. It keeps what is known to be
none: vLLM's own options with the numbers, words and names of models that they take. Everything else
becomes ``***``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from profilemate.record import known_options as known

REDACTED = "***"

LONGEST_VALUE = 20_000
"""Characters of a value that is looked at."""
LONGEST_NAME = 1_000
LONGEST_OPTION = 100
"""Characters of an option's name, with the keys behind its dots."""
LONGEST_NUMBER = 20
"""Digits of a number that is no key."""

Shown = Callable[[str], str]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?([kmgt]?i?b?)", re.ASCII | re.IGNORECASE)
_NAME = re.compile(
    r"(?!-)((s3|gs|az|hf)://)?"
    r"[\w.~/, ()\[\]-]+"
    r"(:\w{1,16})?"
)
"""A model's name with a tag, a path, or a URL that vLLM loads models from. What parts a password,
a query or a variable's value from the rest is not in it."""
_OPTION = re.compile(r"--[a-z]+([-_][a-z]+)*|-[a-zA-Z]")
"""How an option is called that is not known here."""
_KEY = re.compile(
    r"""(?x) (?<![A-Za-z0-9]) (
      (hf_|gh[a-z]_) (?= [A-Za-z0-9]* [A-Z0-9] ) [A-Za-z0-9]{10,}
      | ([spr]k[-_]|github_pat_|glpat-|xox[a-z]-|nvapi-|npm_|pypi-|gsk_|r8_|whsec_)
        (?= [\w-]* [A-Z0-9] ) [\w-]{10,}
      | (AKIA|ASIA|AIza|eyJ|ya29) [\w.-]{10,}
      | (?i: bearer | basic ) \s
    )"""
)
"""How the keys of well-known services begin."""
_RANDOM = re.compile(
    r"(?=[A-Za-z]*\d)(?=\d*[A-Za-z])[A-Za-z0-9]{20,}|[A-Za-z0-9]{40,}"
    r"|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
)
_WORD = re.compile(r"[a-z]{3,}")
SHORTEST_RANDOM = 24
LEAST_WORDS = 1 / 3
"""The share of a long name's letters that are in words; in random ones it is half of that."""
_SNAPSHOT = re.compile(r"/snapshots/[0-9a-f]{40}(?=/|$)")
"""The folder of a model that was downloaded from the Hugging Face Hub."""
_VLLM = re.compile(r"(.*/)?vllm|vllm\..*")
_PYTHON = re.compile(r"(.*/)?(python|pypy)[\d.]*")
_PYTHON_OPTION = re.compile(r"-(?=.)[bBdEiIOPqsSuvx]*([cmWX]?)")


def redact(argv: Sequence[str]) -> list[str]:
    """The command line without its secrets. Never raises, whatever the command line is.

    >>> redact(["vllm", "serve", "m", "--api-key", "a", "b", "--hf-token=c", "--max-tokens", "5"])
    ['vllm', 'serve', 'm', '--api-key', '***', '***', '--hf-token=***', '--max-tokens', '5']
    """
    try:
        return list(_command(argv))
    except Exception:
        # vLLM goes on whatever it was started with, and nothing is kept that was not understood.
        return [REDACTED] * len(argv)


def public_name(name: str) -> str:
    """A model's name as its users see it, or its path, without what lets one get at the model.

    >>> public_name("org/model"), public_name("s3://key:secret@bucket/model")
    ('org/model', '***')
    """
    if "://" in name or "@" in name:
        return _name(name)
    return REDACTED if _KEY.search(name[:LONGEST_NAME]) else name[:LONGEST_NAME]


def _command(argv: Sequence[str]) -> Iterator[str]:
    words = iter(argv)
    shown = []
    for program in words:
        shown.append(_name(program))
        if _PYTHON.fullmatch(program):
            shown += _interpreted(words)
        break
    yield from shown
    yield from _arguments(words, "".join(shown[-1:]))


def _interpreted(words: Iterator[str]) -> Iterator[str]:
    """Python's own options, and what it runs."""
    for word in words:
        if not word.startswith("-"):
            yield _name(word)
            return
        known_option = _PYTHON_OPTION.fullmatch(word)
        yield word if known_option else REDACTED
        takes = known_option[1] if known_option else ""
        if takes:
            for value in words:
                yield _name(value) if takes == "m" else REDACTED
                break
        if takes in ("c", "m") or not (known_option or word.startswith(("-W", "-X"))):
            return


def _arguments(words: Iterator[str], program: str) -> Iterator[str]:
    """The words behind what runs, ``program``."""
    shown: Shown = _hidden
    left = 0.0
    model_is_next = False
    for word in words:
        if _is_option(word):
            text, shown, left = _option(word)
            yield text
        elif left:
            left -= 1
            yield shown(word)
        elif word in known.COMMANDS:
            model_is_next = word == "serve" and _VLLM.fullmatch(program) is not None
            program = word
            yield word
        elif model_is_next and word.lower() not in ("true", "false"):
            model_is_next = False
            yield _name(word)
        else:
            # Some releases take a value behind a flag.
            yield _boolean(word)


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word[:LONGEST_NAME])


def _option(word: str) -> tuple[str, Shown, float]:
    """An option as it is shown, how its values are, and how many there can be."""
    if re.fullmatch(r"--|-O[0-3]", word):
        return word, _hidden, 0
    flag, equals, value = word.partition("=")
    name, *keys = flag.split(".")
    long = name[2:].replace("_", "-") if name.startswith("--") else known.SHORT.get(name, "")
    shown = _values(long, keys) if len(flag) <= LONGEST_OPTION else None
    if shown is None:
        flag = flag if len(flag) < LONGEST_OPTION and _OPTION.fullmatch(flag) else REDACTED
        shown, left = _hidden, float("inf")
    elif shown is _boolean:
        left = 0
    else:
        left = float("inf") if long in known.SEVERAL else 1
    if equals:
        return f"{flag}={shown(value)}", _hidden, 0
    return flag, shown, left


def _values(option: str, keys: Sequence[str]) -> Shown | None:
    """How the values of this option are shown; None where it is not known.

    ``keys`` are those of ``--speculative-config.model``, which names one entry of the JSON.
    """
    if keys:
        names = [key.rstrip("+").replace("-", "_") for key in keys]
        is_known = option in known.OBJECTS and all(name in known.KEYS for name in names)
        return partial(_object, key=names[-1]) if is_known else None
    if option in known.FLAGS or option.removeprefix("no-") in known.FLAGS:
        return _boolean
    for options, shown in (
        (known.NUMBERS, _number),
        (known.CHOICES, _choice),
        (known.NAMES, _name),
        (known.OBJECTS, _object),
    ):
        if option in options:
            return shown
    return None


def _hidden(_: str) -> str:
    return REDACTED


def _boolean(text: str) -> str:
    return text if text.lower() in ("true", "false") else REDACTED


def _number(text: str) -> str:
    fits = len(text) <= LONGEST_NUMBER and _NUMBER.fullmatch(text)
    return text if fits or text == "auto" else REDACTED


def _choice(text: str) -> str:
    is_known = text.isascii() and text.lower() in known.WORDS
    return text if is_known else _number(text)


def _name(text: str) -> str:
    if len(text) > LONGEST_NAME or not _NAME.fullmatch(text) or _KEY.search(text):
        return REDACTED
    return REDACTED if _is_random(_SNAPSHOT.sub("", text)) else text


def _is_random(text: str) -> bool:
    """Whether a part of this path has digits and letters as nobody names a model."""
    if _RANDOM.search(text):
        return True
    # Random characters may have slashes among them, and nothing else as names of folders have it.
    parts = [text] if re.sub("[/ ]", "", text).isalnum() else text.split("/")
    parts = [re.sub(r"[^A-Za-z0-9]", "", part) for part in parts]
    return any(
        len(part) >= SHORTEST_RANDOM
        and sum(map(len, _WORD.findall(part))) < LEAST_WORDS * len(part)
        for part in parts
    )


def _object(text: str, key: str | None = None) -> str:
    """JSON with what is known to be harmless, or one such value.

    ``key`` is the key that it stands under.
    """
    if len(text) > LONGEST_VALUE:
        return REDACTED
    if text[:1] not in "{[":
        return _name(text) if key in known.NAME_KEYS else _choice(text)
    try:
        return json.dumps(_entry(json.loads(text), key))
    except (ValueError, RecursionError):
        return REDACTED


def _entry(value: Any, key: str | None) -> Any:
    if isinstance(value, dict):
        entries = ((_key(name), entry) for name, entry in value.items())
        return {
            name: REDACTED if name == REDACTED else _entry(entry, name) for name, entry in entries
        }
    if isinstance(value, list):
        return [_entry(entry, key) for entry in value]
    if isinstance(value, str):
        if key in known.NAME_KEYS:
            return _name(value)
        # An operation of the model's is switched on by a plus, off by a minus.
        return value if _choice(value.lstrip("+-")) != REDACTED else REDACTED
    return value if len(str(value)) <= LONGEST_NUMBER else REDACTED


def _key(name: str) -> str:
    return name if name in known.KEYS or re.fullmatch(r"[0-9]{1,6}", name) else REDACTED
