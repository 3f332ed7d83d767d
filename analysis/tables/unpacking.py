# SPDX-License-Identifier: Apache-2.0
"""The text of a packed file, unpacked as it is read: it may be far larger than memory."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.errors import SessionError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_GZIP = 31
"""zlib's number for data in gzip's format, whose checksum it compares at the end."""
_INPUT = 1 << 20
_BUFFER = 1 << 16


@dataclass(frozen=True)
class Packed:
    """What a segment's index says of a packed file.

    ``plain_bytes`` and ``crc``: of its text. ``last_sec``: the time of its last row.
    """

    plain_bytes: int
    crc: int
    last_sec: float


def unpacked(file: BufferedReader, path: Path, packed: Packed) -> BufferedReader:
    """The text of the file, which is closed with it.

    Reading raises a SessionError where the file is damaged: it is cut short, its bytes are not
    those that were packed, or its text is not the one that the index describes.
    """
    return BufferedReader(_Unpacker(file, path, packed), _BUFFER)


class _Unpacker(RawIOBase):
    def __init__(self, file: BufferedReader, path: Path, packed: Packed) -> None:
        self._file = file
        self._path = path
        self._packed = packed
        self._zlib = zlib.decompressobj(_GZIP)
        self._bytes = 0
        self._has_ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        while not self._has_ended:
            if text := self._text(len(view)):
                view[: len(text)] = text
                return len(text)
        return 0

    def close(self) -> None:
        self._file.close()
        super().close()

    def _text(self, most: int) -> bytes:
        """The next bytes; perhaps none, though more follow."""
        packed = self._zlib.unconsumed_tail or self._file.read(_INPUT)
        try:
            text = self._zlib.decompress(packed, most)
        except zlib.error as error:
            raise self._damaged(f"it cannot be unpacked ({error})") from None
        self._bytes += len(text)
        if self._bytes > self._packed.plain_bytes:
            raise self._damaged(f"it unpacks to more than {self._expected()}")
        if self._zlib.eof:
            self._has_ended = True
            self._check_end()
        elif not packed and not text:
            raise self._damaged("it is cut short")
        return text

    def _check_end(self) -> None:
        if self._bytes != self._packed.plain_bytes:
            raise self._damaged(
                f"it unpacks to {self._bytes:,} bytes instead of {self._expected()}"
            )
        if self._zlib.unused_data or self._file.read(1):
            raise self._damaged("something follows its end")
        # zlib has compared the text with the checksum at the end of the file.
        self._file.seek(-8, os.SEEK_END)
        if int.from_bytes(self._file.read(4), "little") != self._packed.crc:
            raise self._damaged("its checksum is not the one in the index")

    def _expected(self) -> str:
        return f"the {self._packed.plain_bytes:,} of the index"

    def _damaged(self, what: str) -> SessionError:
        return SessionError(f"{self._path} is damaged: {what}; restore the recorded file")
