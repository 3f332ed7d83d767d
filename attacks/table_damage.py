# SPDX-License-Identifier: Apache-2.0
"""Ways to damage a session's folder: its tables, its metadata, and what kind of files they are."""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

from tests.analysis.impossible import IMPOSSIBLE

NUMBERS = (
    *("2147483647", "2147483648", "-1", "0", "1", "100000000", "9223372036854775807", "1e308"),
    *("1e400", "nan", "inf", "-inf", "0.5", "", " ", "0x10", "१२", "1_000", "+1", "9" * 400),
)
TEXTS = (
    '"',
    '""',
    "'",
    "\x00",
    "\x1b[31m",
    "\u2028",
    "\ufeff",
    "x" * 5000,
    "=1+1",
    "a,b",
    "\r",
    "é",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 16, 2**31 - 1, 2**31, 10**9, 10**12, 2**63, 10**400),
    *(0.5, -0.0, 1e308, "", "text", "\x1b[31m", "\u202e", "x" * 100_000, [], {}, [[]], [1, "a"]),
    *({"a": 1}, [{}] * 1000, "/dev/zero", "/dev/null", "9999-12-31T23:59:59Z", list(range(1000))),
)
"""Values that an entry of metadata.json may be given."""


def tables(folder: Path) -> list[Path]:
    """The session's tables that have a row."""
    found = [path for path in folder.iterdir() if path.name in IMPOSSIBLE and path.is_file()]
    return sorted(path for path in found if path.read_bytes().count(b"\n") > 1)


def plant(folder: Path, draw: Random) -> str:
    """Make a row impossible; returns the table's name."""
    path = draw.choice(tables(folder))
    lines = path.read_text().splitlines()
    at = draw.randrange(path.suffix == ".csv", len(lines))
    change = draw.choice(IMPOSSIBLE[path.name])
    if path.suffix != ".csv":
        row = json.loads(lines[at])
        lines[at] = json.dumps({**row, **change(row)})
    elif path.name == "scheduler_steps.csv" and draw.random() < 0.2:
        # A step twice.
        lines.insert(at, lines[at])
    else:
        columns = lines[0].split(",")
        row = dict(zip(columns, lines[at].split(","), strict=True))
        lines[at] = ",".join(str({**row, **change(row)}[name]) for name in columns)
    path.write_text("\n".join(lines) + "\n")
    return path.name


def damage(folder: Path, draw: Random, times: int) -> None:
    """Damage files of the session so many times, somehow."""
    for _ in range(times):
        kind = draw.choices((_bytes, _lines, _field, _metadata), (4, 4, 6, 6))[0]
        # A file may be damaged too much already to be damaged in this way.
        with suppress(OSError, ValueError, KeyError, IndexError, RecursionError):
            kind(folder, draw)
    if draw.random() < 0.05:
        # Last, as the attack itself could not read on.
        _file(folder, draw)


def _bytes(folder: Path, draw: Random) -> None:
    path = draw.choice([*tables(folder), folder / "metadata.json"])
    content = path.read_bytes()
    at = draw.randrange(len(content) + 1)
    made = draw.choice(
        (
            lambda: content[:at],
            lambda: content[at:],
            lambda: content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
            lambda: content[:at] + bytes(draw.randrange(1, 9)) + content[at:],
            lambda: b"\xef\xbb\xbf" + content,
            lambda: content.replace(b"\n", b"\r\n"),
            lambda: content[:at] + b'"' + content[at:],
            lambda: content[:at] + b"\xff\xfe" + content[at:],
            lambda: content[:at] + content,
            lambda: b"",
            lambda: b"\n" * 9 + content,
            lambda: content.decode().encode("utf-16"),
            lambda: content[:at] + content[at:].replace(b",", b";"),
            lambda: content[:at] + b"x" * 2_000_000 + content[at:],
        )
    )()
    path.write_bytes(made)


def _lines(folder: Path, draw: Random) -> None:
    path = draw.choice(tables(folder))
    lines = path.read_bytes().splitlines(keepends=True)
    at, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    kind = draw.randrange(8)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(other, lines[at])
    elif kind == 2:
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == 3:
        draw.shuffle(lines)
    elif kind == 4:
        another = draw.choice(tables(folder)).read_bytes().splitlines(keepends=True)
        lines[at] = draw.choice(another)
    elif kind == 5:
        del lines[min(at, other) : max(at, other)]
    elif kind == 6:
        cells = [line.rstrip(b"\n").split(b",") for line in lines]
        first, second = draw.randrange(len(cells[0])), draw.randrange(len(cells[0]))
        for row in cells:
            if len(row) > max(first, second):
                row[first], row[second] = row[second], row[first]
        lines = [b",".join(row) + b"\n" for row in cells]
    else:
        lines.insert(at, b"\n")
    path.write_bytes(b"".join(lines))


def _field(folder: Path, draw: Random) -> None:
    path = draw.choice(tables(folder))
    value = draw.choice(NUMBERS if draw.random() < 0.8 else TEXTS)
    lines = path.read_text().split("\n")
    at = draw.randrange(len(lines) - 1)
    if path.suffix == ".csv":
        cells = lines[at].split(",")
        cells[draw.randrange(len(cells))] = value
        lines[at] = ",".join(cells)
    else:
        row = json.loads(lines[at])
        column = draw.choice(list(row))
        made = draw.choice((value, draw.choice(VALUES)))
        row[column] = "MARK"
        raw = value if isinstance(made, str) and draw.random() < 0.5 else _dumped(made)
        lines[at] = json.dumps(row).replace('"MARK"', raw)
    path.write_text("\n".join(lines), errors="surrogatepass")


def _dumped(value: Any) -> str:
    return str(value) if isinstance(value, int) and abs(value) > 10**100 else json.dumps(value)


def _metadata(folder: Path, draw: Random) -> None:
    path = folder / "metadata.json"
    kind = draw.randrange(12)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        text = path.read_text()
        path.write_text(text[: draw.randrange(len(text))])
    elif kind == 2:
        path.write_text('{"format_version": 1, "a": ' + draw.choice("[{") * draw.choice((5, 10**5)))
    elif kind == 3:
        path.write_text(path.read_text().replace("{", '{"format_version": 2, "cache": 5, ', 1))
    else:
        content = json.loads(path.read_text())
        place, key = _place(content, draw)
        if kind == 4:
            del place[key]
        else:
            place[key] = "MARK"
        value = draw.choice(VALUES)
        raw = draw.choice(("NaN", "Infinity", "1e400")) if kind == 5 else _dumped(value)
        path.write_text(json.dumps(content).replace('"MARK"', raw))


def _place(content: dict[str, Any], draw: Random) -> tuple[Any, Any]:
    """A container somewhere in the content, and a key of it."""
    place: Any = content
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = draw.choice(keys)
        inner = place[key]
        if not isinstance(inner, (dict, list)) or not inner or draw.random() < 0.3:
            return place, key
        place = inner


def _file(folder: Path, draw: Random) -> None:
    """Another kind of file, or one that cannot be read."""
    path = draw.choice([*tables(folder), folder / "metadata.json"])
    path.touch()
    kind = draw.randrange(8)
    if kind == 0:
        path.chmod(0)
        return
    path.unlink()
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.symlink_to("/dev/zero")
    elif kind == 4:
        path.symlink_to(path.name)
    elif kind == 5:
        with socket.socket(socket.AF_UNIX) as made:
            here = os.open(folder, os.O_RDONLY)
            made.bind(f"/proc/self/fd/{here}/{path.name}")
            os.close(here)
    elif kind == 6:
        with open(path, "wb") as file:
            file.truncate(draw.choice((1, 10**6, 10**10)))
