# SPDX-License-Identifier: Apache-2.0
"""The text of a packed file, unpacked as it is read: it may be far larger than memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, Protocol

from analysis.errors import SessionError

_GZIP = 31
"""zlib's number for data in gzip's format, whose checksum it compares at the end."""
_INPUT = 1 << 18
_OUTPUT = 1 << 20
"""Memory of this size is used again; zlib takes longer to fill larger parts."""


def _fastest() -> Any:
    """isal, which does the same as zlib in a third of the time, where it is installed."""
    with suppress(ImportError):
        return import_module("isal.isal_zlib")
    return zlib


_ZLIB = _fastest()


@dataclass(frozen=True)
class Packed:
    """What a segment's index says of a packed file.

    ``plain_bytes`` and ``crc``: of its text. ``last_sec``: the time of its last row; None where
    rows do not begin with it.
    """

    plain_bytes: int
    crc: int
    last_sec: float | None


class Unpacker:
    """The text of a packed file, from its beginning.

    Reading raises a SessionError where the file is damaged: it is cut short, its bytes are not
    those that were packed, or its text is not the one that the index describes.
    """

    def __init__(self, file: BufferedReader, path: Path, packed: Packed) -> None:
        self._file = file
        self._path = path
        self._packed = packed
        self._zlib = _ZLIB.decompressobj(_GZIP)
        self._bytes = 0
        self._has_ended = False

    def read(self, most: int) -> bytes:
        """The next bytes; none at the end."""
        text = b""
        while not text and not self._has_ended:
            packed = self._zlib.unconsumed_tail or self._file.read(_INPUT)
            try:
                text = self._zlib.decompress(packed, most)
            except (zlib.error, _ZLIB.error) as error:
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

    def parts(self) -> Iterator[bytes]:
        """All of it, in parts of a megabyte at most."""
        while text := self.read(_OUTPUT):
            yield text

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Unpacker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_end(self) -> None:
        if self._bytes != self._packed.plain_bytes:
            raise self._damaged(f"it unpacks to {self._bytes:,} bytes, not to {self._expected()}")
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


class Source(Protocol):
    """What gives a text from its beginning: the next bytes, at most so many; none at the end."""

    def read(self, most: int, /) -> bytes: ...
    def close(self) -> None: ...


class AsFile(RawIOBase):
    """What a source gives, as a file, which closes it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        text = self._source.read(len(view))
        view[: len(text)] = text
        return len(text)

    def close(self) -> None:
        self._source.close()
        super().close()
