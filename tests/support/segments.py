# SPDX-License-Identifier: Apache-2.0
"""Cut a session into segments, as the collector does it, and remove the oldest ones."""

from __future__ import annotations

import csv
import gzip
import io
import json
import shutil
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.analysis.builder import COLUMNS

WHOLE = "cuda_graph_usage.csv"
"""The table that is never cut."""
FILES = [*(name for name in COLUMNS if name != WHOLE), "requests.jsonl"]

Cut = Mapping[str, int]
"""How many rows of each table come before a moment."""


def split(
    folder: Path, *cuts: Cut, times: Sequence[float] | None = None, closing: bool = False
) -> None:
    """Put the rows before each cut into a segment; those after the last one stay where they are.

    Args:
        folder: the session.
        cuts: later ones have at least as many rows of each table as earlier ones.
        times: of the cuts, in seconds.
        closing: the last segment is still being closed.

    """
    moments = list(times or range(1, len(cuts) + 1))
    tables = {file: _lines(folder / file) for file in FILES if (folder / file).exists()}
    begin, begin_sec = dict.fromkeys(tables, 0), 0.0
    (folder / "segments").mkdir(exist_ok=True)
    for number, (cut, end_sec) in enumerate(zip(cuts, moments, strict=True), 1):
        rows = {
            file: lines[begin[file] : cut.get(file, begin[file])]
            for file, (_, lines) in tables.items()
        }
        headers = {file: header for file, (header, _) in tables.items()}
        if closing and number == len(cuts):
            target = folder / "segments" / f".closing-{number:04d}"
            target.mkdir()
            for file, lines in rows.items():
                if lines:
                    (target / file).write_bytes(headers[file] + b"".join(lines))
        else:
            target = write(folder, number, begin_sec, end_sec, rows, headers)
            before = {file: lines[: begin[file]] for file, (_, lines) in tables.items()}
            for file, lines in before.items():
                if opening := _opening(file, lines, before.get("requests.jsonl", [])):
                    add(target, f"opening.{file}.gz", file, opening, headers[file])
        begin = {file: begin[file] + len(lines) for file, lines in rows.items()}
        begin_sec = end_sec
    for file, (header, lines) in tables.items():
        left = lines[begin[file] :]
        if left:
            (folder / file).write_bytes(header + b"".join(left))
        else:
            (folder / file).unlink()


def write(
    folder: Path,
    number: int,
    begin_sec: float,
    end_sec: float,
    rows: Mapping[str, Sequence[bytes]],
    headers: Mapping[str, bytes],
) -> Path:
    """Write a closed segment with these lines of each table."""
    target = folder / "segments" / f"{number:04d}"
    target.mkdir(parents=True)
    index = {
        "format_version": 1,
        "segment": number,
        "begin_sec": begin_sec,
        "end_sec": end_sec,
        "tables": {},
    }
    (target / "segment.json").write_text(json.dumps(index))
    for file, lines in rows.items():
        if lines:
            stem, _, kind = file.rpartition(".")
            add(target, f"{stem}.{number:04d}.{kind}.gz", file, lines, headers[file])
    return target


def add(target: Path, name: str, file: str, lines: Sequence[bytes], header: bytes) -> None:
    """Add a packed file to a segment, and to its index."""
    plain = header + b"".join(lines)
    packed = gzip.compress(plain, 1)
    (target / name).write_bytes(packed)
    times = [_time(file, line) for line in lines] if _begins_with_time(file) else [None]

    def entry(index: dict[str, Any]) -> None:
        index["tables"][name] = {
            "rows": len(lines),
            "bytes": len(packed),
            "plain_bytes": len(plain),
            "first_sec": times[0],
            "last_sec": times[-1],
            "crc32": f"{zlib.crc32(plain):08x}",
        }

    change(target, entry)


def change(target: Path, how: Callable[[dict[str, Any]], object]) -> None:
    """Change a segment's index."""
    path = target / "segment.json"
    index = json.loads(path.read_text())
    how(index)
    path.write_text(json.dumps(index))


def by_share(folder: Path, share: float) -> Cut:
    """The cut after so large a share of each table's rows."""
    return {
        file: int(share * len(_lines(folder / file)[1]))
        for file in FILES
        if (folder / file).exists()
    }


def at(folder: Path, sec: float) -> Cut:
    """The cut at this time."""
    return {
        file: sum(_written(file, line) < sec for line in _lines(folder / file)[1])
        for file in FILES
        if (folder / file).exists()
    }


def cut_at(folder: Path, *times: float, closing: bool = False) -> None:
    """Cut the session at these times."""
    split(folder, *(at(folder, sec) for sec in times), times=times, closing=closing)


def remove_before(folder: Path, number: int) -> float:
    """Remove the segments before this one; when it begins."""
    segments = folder / "segments"
    removed = 0
    for old in range(1, number):
        index = json.loads((segments / f"{old:04d}" / "segment.json").read_text())
        removed += sum(entry["plain_bytes"] for entry in index["tables"].values())
        shutil.rmtree(segments / f"{old:04d}")
    index = json.loads((segments / f"{number:04d}" / "segment.json").read_text())
    begin_sec = float(index["begin_sec"])
    path = folder / "metadata.json"
    metadata = json.loads(path.read_text())
    metadata["window"] = {
        "begin_sec": begin_sec,
        "removed_segments": number - 1,
        "removed_bytes": removed,
    }
    path.write_text(json.dumps(metadata))
    return begin_sec


def _opening(file: str, lines: list[bytes], requests: list[bytes]) -> list[bytes]:
    """What explains how things stood after these rows."""
    if file not in COLUMNS:
        return []
    rows = [_cells(file, line) for line in lines]
    if file == "cuda_graph_captures.csv":
        return lines
    if file in ("kv_cache_usage.csv", "scheduler_steps.csv"):
        last = {
            (row["engine"], row.get("pool")): line for row, line in zip(rows, lines, strict=True)
        }
        return list(last.values())
    ended = {(str(row["engine"]), row["request_id"]) for row in map(json.loads, requests)}
    living = [
        (row, line)
        for row, line in zip(rows, lines, strict=True)
        if row.get("request_id") and (row["engine"], row["request_id"]) not in ended
    ]
    if file == "prefix_cache_lookups.csv":
        return [line for row, line in living if row["admitted"] == "1"]
    if file == "kv_cache_allocations.csv":
        return _held(living)
    return []


def _held(living: list[tuple[dict[str, str], bytes]]) -> list[bytes]:
    """A row for what each request has allocated, and one for what it has reused."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row, _ in living:
        name = (row["engine"], row["request_id"])
        if row["event"] == "free":
            found = {key: one for key, one in found.items() if key[:2] != name}
        elif row["event"] in ("allocate", "reuse"):
            one = found.setdefault((*name, row["event"]), {**row, "num_blocks": "0"})
            one["num_blocks"] = str(int(one["num_blocks"]) + int(row["num_blocks"]))
            one["evicted_blocks"] = "0"
    text = io.StringIO()
    writer = csv.DictWriter(
        text, COLUMNS["kv_cache_allocations.csv"].split(","), lineterminator="\n"
    )
    writer.writerows(found.values())
    return text.getvalue().encode().splitlines(keepends=True)


def _lines(path: Path) -> tuple[bytes, list[bytes]]:
    return _parted(path.name, path.read_bytes())


def _parted(file: str, plain: bytes) -> tuple[bytes, list[bytes]]:
    lines = plain.splitlines(keepends=True)
    return (lines[0], lines[1:]) if file in COLUMNS else (b"", lines)


def _cells(file: str, line: bytes) -> dict[str, str]:
    (cells,) = csv.reader([line.decode()])
    return dict(zip(COLUMNS[file].split(","), cells, strict=True))


def _time(file: str, line: bytes) -> float:
    row = _cells(file, line)
    return float(row["timestamp_sec" if "timestamp_sec" in row else "capture_time_sec"])


def _begins_with_time(file: str) -> bool:
    return COLUMNS.get(file, "").startswith("timestamp_sec,")


def _written(file: str, line: bytes) -> float:
    """When the row was written, which is later for a request than its time."""
    if file == "requests.jsonl":
        return float(json.loads(line).get("finish_sec") or 0)
    return _time(file, line)
