# SPDX-License-Identifier: Apache-2.0
"""What a combination of a sweep's settings is called."""

from __future__ import annotations

from collections.abc import Mapping


def combination(settings: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items()) or "no settings"
