# SPDX-License-Identifier: Apache-2.0
"""Which entries does a config.json have, and which figure comes from which entry?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.errors import RuleError

FILE = "config.json"


class Config:
    """The entries of a config.json. ``sources``: for each figure, the entry that it came from."""

    def __init__(self, entries: Mapping[str, Any], name: str) -> None:
        text = entries.get("text_config")
        inner = text if isinstance(text, Mapping) else {}
        self._entries = {**entries, **{key: value for key, value in inner.items() if value != []}}
        self.name = name
        self.sources: dict[str, str] = {}

    def get(self, *keys: str) -> Any:
        """The value of the first of these keys that has an entry; None where none has."""
        values = map(self._entries.get, keys)
        return next((value for value in values if value is not None), None)

    def whole(self, figure: str, *keys: str, default: int | None = None) -> int:
        """The whole number, 1 or more, of the first of these keys that has an entry. The entry
        becomes the source of ``figure``.

        Raises:
            RuleError: the entry is no such number, or there is neither an entry nor a default.

        """
        for key in keys:
            value = self._entries.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 10**9:
                raise RuleError(f"{self.name}: {key} is {value!r}, not a whole number from 1 on")
            self.sources[figure] = f"{FILE}: {key}"
            return value
        if default is None:
            raise RuleError(
                f"{self.name} has no {' or '.join(keys)}; give --layers, --kv-heads and "
                "--head-size in its place"
            )
        return default

    def count(self, *keys: str, default: int = 0) -> int:
        """The whole number, 0 or more, of the first of these keys that has an entry.

        Raises:
            RuleError: the entry is no such number.

        """
        value = self.get(*keys)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 10**9:
            raise RuleError(f"{self.name}: {keys[0]} is {value!r}, not a whole number")
        return value

    def words(self, *keys: str) -> list[Any]:
        """The list of the first of these keys that has an entry; empty where it is no list."""
        value = self.get(*keys)
        return value if isinstance(value, list) else []

    @property
    def family(self) -> str:
        """The model's family, as ``model_type`` names it."""
        return str(self.get("model_type") or "")
