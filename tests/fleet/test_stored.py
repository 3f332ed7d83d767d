# SPDX-License-Identifier: Apache-2.0
"""Sessions of a fleet in object storage, and packed ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.tables.storage import Store
from tests.analysis.invoke import invoke
from tests.fleet.made import made
from tests.storage import s3


def whole(*paths: object) -> Any:
    done = invoke("fleet", *paths, "--json", "--jobs", 1)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["whole"]


def test_urls_patterns_and_packed_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        made(tmp_path / "runs", f"s{number}").usage((0, 10 * number), (5, 50))
    plain = whole(tmp_path / "runs")
    for number in range(3):
        packed = tmp_path / "packed" / f"session_s{number}"
        packed.parent.mkdir(exist_ok=True)
        done = invoke("pack", tmp_path / "runs" / packed.name, "-o", packed)
        assert done.returncode == 0, done.stderr
    assert whole(tmp_path / "packed") == plain
    place = f"s3://{s3.BUCKET}/{tmp_path.name}"
    with s3.server() as port, s3.front(port) as front:
        s3.environment(monkeypatch, front.port)
        for file in (tmp_path / "packed").rglob("*"):
            if file.is_file():
                Store(place).send(file, file.relative_to(tmp_path).as_posix())
        assert whole(f"{place}/packed") == plain
        assert whole(f"{place}/*/session_s[12]")["counts"]["sessions"] == 2
        nothing = invoke("fleet", f"{place}/nothing")
        assert (nothing.returncode, nothing.stderr.count("\n")) == (2, 1)
