# SPDX-License-Identifier: Apache-2.0
"""What each reason of ``analysis.prefix.misses`` means, in three words."""

from __future__ import annotations

MEANINGS = {
    "compulsory": "new content",
    "capacity": "evicted before",
    "reset": "lost to a reset",
    "explicit": "evicted on request",
    "not yet cached": "being computed",
    "held back": "another group lacked it",
    "behind": "behind a missing one",
    "other rank": "on another rank",
    "last token": "ends the prompt",
    "speculation": "dropped for drafting",
    "unknown": "request not ended",
}

LOST = {"reset": "Lost to resets", "explicit": "Evicted on request"}
"""Contents that were asked for again, by the reason of their loss."""
