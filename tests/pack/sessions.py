# SPDX-License-Identifier: Apache-2.0
"""Compare a session with what came back, and forge what a Parquet session says."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.analysis.invoke import invoke


def texts(folder: Path) -> dict[str, bytes]:
    """The text of each file of a session, by its path in the folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            name = path.relative_to(folder).as_posix()
            found[name] = gzip.decompress(content) if path.suffix == ".gz" else content
    return found


def pack(session: Path, target: Path) -> dict[str, Any]:
    """Pack the session; the index."""
    result = invoke("pack", session, "-o", target)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.splitlines()[-1] == str(target)
    index: dict[str, Any] = json.loads((target / "parquet.json").read_text())
    return index


def unpack(target: Path, back: Path) -> dict[str, bytes]:
    """Unpack it; the text of each file."""
    result = invoke("unpack", target, "-o", back)
    assert (result.returncode, result.stderr) == (0, "")
    return texts(back)


def forge(folder: Path, how: Callable[[dict[str, Any]], object]) -> None:
    """Change the index, which then fits the files again."""
    path = folder / "parquet.json"
    index = json.loads(path.read_text())
    how(index)
    for name, entry in index["tables"].items():
        file = folder / f"{name}.parquet"
        if file.exists():
            content = file.read_bytes()
            entry |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path.write_text(json.dumps(index))
