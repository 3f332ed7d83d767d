# SPDX-License-Identifier: Apache-2.0
"""A session in plain files made one in packed segments, as the collector closes them."""

from __future__ import annotations

import json
import mmap
import re
import shutil
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from profilemate.collector.rotation import SEGMENT_BYTES
from profilemate.collector.segments import LEVEL
from profilemate.format.segments import INDEX_FILE, folder_name, packed_name
from profilemate.format.session import METADATA_FILE, SEGMENTS_FOLDER
from tests.analysis.builder import COLUMNS

_PART = 1 << 20
_TIME = re.compile(rb'(?:\{"timestamp":)?([0-9.e+-]+)')
_MS = 1e-3
"""The times of requests.jsonl are milliseconds."""


def write(plain: Path, folder: Path, seconds: float) -> None:
    """Write the same session, which lasts so long, in segments of equal times. Its rows have to be
    in the order of time."""
    folder.mkdir(parents=True)
    shutil.copy(plain / METADATA_FILE, folder)
    files = sorted(path for path in plain.iterdir() if path.name != METADATA_FILE)
    size = sum(path.stat().st_size for path in files)
    count = -(-size // SEGMENT_BYTES)
    ends = [seconds * (number + 1) / count for number in range(count)]
    indexes: list[dict[str, Any]] = [
        {"format_version": 1, "segment": number, "begin_sec": end - seconds / count, "end_sec": end}
        for number, end in enumerate(ends, 1)
    ]
    for index in indexes:
        index["tables"] = {}
        (folder / SEGMENTS_FOLDER / folder_name(index["segment"])).mkdir(parents=True)
    for path in files:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            header = text[: text.find(b"\n") + 1] if path.name in COLUMNS else b""
            for index, (begin, end) in zip(indexes, _cuts(text, len(header), ends), strict=True):
                if begin < end:
                    number = index["segment"]
                    name = packed_name(path.name, number)
                    target = folder / SEGMENTS_FOLDER / folder_name(number) / name
                    index["tables"][name] = _pack(target, header, text, begin, end)
    for index in indexes:
        target = folder / SEGMENTS_FOLDER / folder_name(index["segment"]) / INDEX_FILE
        target.write_text(json.dumps(index))


def _cuts(text: mmap.mmap, header: int, ends: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Between which bytes the rows up to each time lie."""
    begin = header
    for end_sec in ends[:-1]:
        low, high = begin, len(text)
        while low < high:
            middle = text.rfind(b"\n", 0, (low + high) // 2) + 1
            middle = max(middle, low)
            if _time(text, middle, is_csv=bool(header)) < end_sec:
                low = text.find(b"\n", middle) + 1
            else:
                high = middle
        yield begin, low
        begin = low
    yield begin, len(text)


def _time(text: mmap.mmap, at: int, *, is_csv: bool) -> float:
    match = _TIME.match(text, at)
    if match is None:
        raise ValueError(f"no row begins at byte {at}")
    return float(match[1]) * (1 if is_csv else _MS)


def _pack(target: Path, header: bytes, text: mmap.mmap, begin: int, end: int) -> dict[str, Any]:
    """Write a packed file; its entry of the index."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, 31)
    packed, checksum = [packer.compress(header)], zlib.crc32(header)
    for at in range(begin, end, _PART):
        part = text[at : min(at + _PART, end)]
        checksum = zlib.crc32(part, checksum)
        packed.append(packer.compress(part))
    packed.append(packer.flush())
    target.write_bytes(b"".join(packed))
    span: dict[str, float | None] = {"first_sec": None, "last_sec": None}
    if header.startswith(b"timestamp_sec,"):
        last = text.rfind(b"\n", begin, end - 1) + 1
        span = {
            "first_sec": _time(text, begin, is_csv=True),
            "last_sec": _time(text, max(last, begin), is_csv=True),
        }
    return {
        "bytes": target.stat().st_size,
        "plain_bytes": len(header) + end - begin,
        "crc32": f"{checksum:08x}",
        **span,
    }
