# SPDX-License-Identifier: Apache-2.0
"""Which entries does a config.json have, and which figure comes from which entry?

A config.json is somebody else's file. Each value is checked where it is read, by what it has to be,
so that nothing behind this computes with another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from analysis.errors import RuleError

FILE = "config.json"

MOST = 10**9
"""No figure of a model's configuration is as large."""

LONGEST_LIST = 10_000
"""Entries of a list, or letters of a text."""

SHOWN = 60
"""Characters of a value in a message."""

_OF_THE_CACHE = frozenset(("kv", "cache", "window", "latent"))
"""Words of a key whose entry may bear on the cache."""
_WITHOUT_BEARING = frozenset(("use_cache", "cache_implementation", "max_window_layers"))
"""Keys that have these words, and are read elsewhere or by nobody in vLLM."""


class Config:
    """The entries of a config.json. ``sources``: for each figure, the entry that it came from.

    Each method takes keys, and reads the first of them that has an entry. Where the entry is none
    of the kind that the method names, it raises RuleError.
    """

    def __init__(self, entries: Mapping[str, Any], name: str) -> None:
        self.name = name
        self.sources: dict[str, str] = {}
        self._entries: dict[str, Any] = dict(entries)
        self._numbers: dict[tuple[str, ...], frozenset[int]] = {}
        self._read: set[str] = set()
        inner = self.part("text_config")
        self._entries |= {key: value for key, value in inner.items() if value != []}

    def take_defaults(self, defaults: Mapping[str, Any]) -> None:
        """Take these values where there is no entry."""
        missing = {key: value for key, value in defaults.items() if self.get(key) is None}
        self._entries |= missing

    def get(self, *keys: str) -> Any:
        """Any value; None where there is no entry."""
        return self._found(keys)[1]

    def whole(self, figure: str, *keys: str, default: int | None = None) -> int:
        """A whole number, 1 or more. The entry becomes the source of ``figure``.

        Raises:
            RuleError: also where there is neither an entry nor a default.

        """
        key, value = self._found(keys)
        if value is None:
            if default is not None:
                return default
            raise RuleError(
                f"{self.name} has no {' or '.join(keys)}; give --layers, --kv-heads and "
                "--head-size in its place"
            )
        if not _is_whole(value) or not 0 < value < MOST:
            self._refuse(key, value, "a whole number from 1 on, below a billion")
        self.sources[figure] = f"{FILE}: {key}"
        return int(value)

    def count(self, *keys: str, default: int = 0) -> int:
        """A whole number, 0 or more."""
        key, value = self._found(keys)
        if value is None:
            return default
        if not _is_whole(value) or not 0 <= value < MOST:
            self._refuse(key, value, "a whole number, 0 or more, below a billion")
        return int(value)

    def flag(self, *keys: str) -> bool | None:
        """True or false; None where there is no entry."""
        key, value = self._found(keys)
        if value is not None and not isinstance(value, bool):
            self._refuse(key, value, "true or false")
        return value

    def text(self, *keys: str) -> str:
        """A text; empty where there is no entry."""
        key, value = self._found(keys)
        if value is not None and not (isinstance(value, str) and len(value) <= LONGEST_LIST):
            self._refuse(key, value, "a text")
        return value or ""

    def part(self, *keys: str) -> Mapping[str, Any]:
        """The entries of an entry; none where there is none."""
        key, value = self._found(keys)
        if value is not None and not isinstance(value, Mapping):
            self._refuse(key, value, "an object")
        return value or {}

    def words(self, *keys: str, entries: int | None = None) -> list[Any]:
        """A list; empty where there is none. It has so many ``entries`` at least."""
        key, value = self._found(keys)
        if value is None or value == []:
            return []
        if not isinstance(value, list) or len(value) > LONGEST_LIST:
            self._refuse(key, value, "a list")
        self._check_length(key, len(value), entries)
        return value

    def letters(self, key: str, alphabet: str, entries: int) -> str:
        """A text with a letter for each of so many ``entries``; empty where there is none."""
        value = self.text(key)
        if value:
            if not set(value) <= set(alphabet):
                self._refuse(key, value, f"a text of the letters {alphabet}")
            self._check_length(key, len(value), entries)
        return value

    def numbers(self, *keys: str) -> frozenset[int]:
        """A list of whole numbers, as a set."""
        if keys not in self._numbers:
            found = self.words(*keys)
            if not all(_is_whole(value) for value in found):
                self._refuse(*self._found(keys), "a list of whole numbers")
            self._numbers[keys] = frozenset(found)
        return self._numbers[keys]

    def unread(self) -> list[str]:
        """Keys, not yet read, of entries that may bear on the cache."""
        return sorted(
            key
            for key in self._entries.keys() - self._read - _WITHOUT_BEARING
            if _OF_THE_CACHE & set(key.lower().split("_")) and self._entries[key]
        )

    @property
    def family(self) -> str:
        """The model's family, as ``model_type`` names it."""
        return self.text("model_type")

    @property
    def shown_family(self) -> str:
        """The family as a message shows it."""
        return self.family if self.family.isidentifier() else said(self.family)

    def _found(self, keys: tuple[str, ...]) -> tuple[str, Any]:
        """The first of the keys that has an entry, and the entry."""
        entries = self._entries
        self._read.update(keys)
        return next(
            ((key, entries[key]) for key in keys if entries.get(key) is not None), ("", None)
        )

    def _check_length(self, key: str, length: int, entries: int | None) -> None:
        if entries is not None and length < entries:
            raise RuleError(
                f"{self.name}: {key} has {length:,} entries; it needs one for each of the "
                f"{entries:,} layers"
            )

    def _refuse(self, key: str, value: Any, needed: str) -> NoReturn:
        raise RuleError(f"{self.name}: {key} is {said(value)}, not {needed}")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def said(value: Any) -> str:
    """The value as a message shows it: short, and without anything that drives a terminal."""
    if isinstance(value, (list, Mapping)):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} with {len(value):,} entries"
    if _is_whole(value) and abs(value) >= 10**SHOWN:
        return f"a number of more than {SHOWN} digits"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
