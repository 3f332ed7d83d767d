# SPDX-License-Identifier: Apache-2.0
"""The journal: an append-only file of checksummed frames, one file a producer.

A file begins with ``MAGIC``. Each frame is a head (its payload's length, the Adler-32 of its kind
and payload, its kind) and the payload. A frame goes out in one ``os.write``, so a process that is
killed loses at most the frame it was writing.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum

MAGIC = b"profilemate journal 1\n"
HEAD = struct.Struct("<III")
MAX_PAYLOAD = 1 << 30


class Kind(IntEnum):
    """What a frame's payload is."""

    HEADER = 1
    """JSON: who writes this journal, and the configuration of its engine. Always the first."""
    EVENTS = 2
    """Events, laid out as profilemate.format.events says."""
    STATUS = 3
    """JSON: what changed about the producer: hooks lost, events dropped, its cost."""
    END = 4
    """JSON: as STATUS, and nothing follows: the producer ended in good order."""


def frame(kind: Kind, payload: bytes) -> bytes:
    """A frame, ready to be written."""
    return HEAD.pack(len(payload), checksum_of(kind, payload), kind) + payload


def checksum_of(kind: int, payload: bytes) -> int:
    """The Adler-32 of a frame's kind and payload."""
    # A CRC's tables are not in the processor's caches when a step ends; this needs none.
    return zlib.adler32(payload, kind)
