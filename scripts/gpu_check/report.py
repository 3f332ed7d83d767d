# SPDX-License-Identifier: Apache-2.0
"""What is printed: checks that hold or do not, and figures."""

from __future__ import annotations

from statistics import median, quantiles

WIDTH = 34


class Report:
    """Prints each line at once; ``failed`` says whether any check did."""

    def __init__(self) -> None:
        self.failed = False

    def title(self, text: str) -> None:
        print(f"\n{text}", flush=True)

    def note(self, what: str, text: str) -> None:
        """A fact or a figure."""
        print(f"        {what:<{WIDTH}} {text}", flush=True)

    def check(self, what: str, found: object, wanted: object) -> None:
        """Whether what was found is what it had to be."""
        self.hold(
            what, found == wanted, f"{found}" if found == wanted else f"{found}, not {wanted}"
        )

    def hold(self, what: str, holds: bool, text: str) -> None:
        """A check whose outcome is known."""
        self.failed |= not holds
        print(f"{'ok' if holds else 'FAILED':<7} {what:<{WIDTH}} {text}", flush=True)


def spread(values: list[float], unit: str) -> str:
    """The median, and where the middle half of the values lies."""
    low, _, high = quantiles(values, n=4)
    return f"{median(values):.2f} {unit} (middle half {low:.2f} to {high:.2f}, n {len(values)})"
