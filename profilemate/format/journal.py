# SPDX-License-Identifier: Apache-2.0
"""The journal: append-only files of checksummed frames, one after the other for each producer.

A file begins with ``MAGIC`` and a header. Each frame is a head (its payload's length, the Adler-32
of its kind and payload, its kind) and the payload. A frame goes out in one ``os.write``, so a
process that is killed loses at most the frame it was writing. A file of ``FILE_BYTES`` is full: its
last frame, a status, names the ``next`` one.
"""

from __future__ import annotations

import re
import struct
import zlib
from enum import IntEnum

MAGIC = b"profilemate journal 1\n"
HEAD = struct.Struct("<III")
MAX_PAYLOAD = 1 << 30

FILE_BYTES = 2 << 20
"""The collector removes a file once all that it told is in closed segments of tables."""

_NAME = re.compile(r"(.+?)(?:\.(\d{4,9}))?\.journal")


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


def file_name(producer: str, number: int) -> str:
    """The name of a producer's journal file, counted from 1.

    >>> file_name("engine0", 1), file_name("engine0", 2)
    ('engine0.journal', 'engine0.0002.journal')
    """
    return f"{producer}.journal" if number == 1 else f"{producer}.{number:04}.journal"


def parse_name(name: str) -> tuple[str, int] | None:
    """The producer and the number of a journal file; None where it is none.

    >>> parse_name("engine0.0002.journal"), parse_name("engine0.journal"), parse_name("x.json")
    (('engine0', 2), ('engine0', 1), None)
    """
    match = _NAME.fullmatch(name)
    return None if match is None else (match[1], int(match[2] or 1))
