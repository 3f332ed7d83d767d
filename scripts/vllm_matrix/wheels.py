# SPDX-License-Identifier: Apache-2.0
"""Where are the Python files of a vLLM release?

A wheel is hundreds of megabytes, its Python files a tenth of that, and a zip file's parts can be
read one by one over HTTP. pip says where the wheel is, by the user's own settings.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import requests
from remotezip import RemoteFetcher, RemoteZip, RemoteZipError

from scripts.vllm_matrix.releases import Release

PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (17, 28, 31, 34, 35, 39)),
    "manylinux1_x86_64",
    "manylinux2014_x86_64",
)
PYTHON = "3.12"
"""Every release has a wheel for it."""
GAP_BYTES = 1 << 18


class FetchError(Exception):
    """A release's files cannot be had; the text says why."""


def default_cache() -> Path:
    """The folder for files that are fetched once, under the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "profilemate" / "vllm-releases"


def python_files(release: Release, cache: Path) -> Path:
    """A folder that holds the release's package, fetched unless it is in the cache.

    Raises:
        FetchError: it cannot be had.

    """
    folder = cache / f"{release.package}-{release.version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
        try:
            _extract(_wheel(release), partial)
            # Whole or not at all: a run that is cut off leaves nothing under the final name.
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _wheel(release: Release) -> str:
    """The address of the release's wheel, as pip finds it."""
    # Isolated (-I), so that nothing on the user's PYTHONPATH counts as installed.
    command = [sys.executable, "-I", "-m", "pip", "install", "--dry-run", "--quiet", "--report=-"]
    command += ["--no-deps", "--ignore-installed", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--target=unused", f"--python-version={PYTHON}"]
    command += [f"--platform={platform}" for platform in PLATFORMS]
    command.append(f"{release.package}=={release.version}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it said nothing"]
        raise FetchError(f"pip finds no wheel of it: {lines[-1]}")
    address: str = json.loads(done.stdout)["install"][0]["download_info"]["url"]
    return address


def _extract(address: str, folder: Path) -> None:
    parts = urlsplit(address)
    try:
        if parts.scheme == "file":
            _extract_from(Path(url2pathname(parts.path)), folder)
        else:
            copy = folder / "wheel"
            _copy_parts(address, copy)
            _extract_from(copy, folder)
            copy.unlink()
    except (OSError, ValueError, RemoteZipError, zipfile.BadZipFile) as error:
        raise FetchError(f"its wheel cannot be read: {error}") from None


def _extract_from(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if _is_wanted(name)])


def _is_wanted(name: str) -> bool:
    return name.startswith("vllm/") and name.endswith(".py")


def _copy_parts(address: str, copy: Path) -> None:
    """Write what is wanted of a remote wheel into a sparse file, each byte where it was.

    Neighbours are fetched in one request: thousands of them would take minutes.
    """
    with requests.Session() as session:
        with RemoteZip(address, session=session) as remote:
            members = sorted(remote.infolist(), key=lambda member: member.header_offset)
            ends = [*(member.header_offset for member in members[1:]), remote.start_dir]
            wanted = [
                (member.header_offset, end)
                for member, end in zip(members, ends, strict=True)
                if _is_wanted(member.filename)
            ]
            wanted.append((remote.start_dir, remote.size()))
        fetcher = RemoteFetcher(address, session)
        with copy.open("wb") as file:
            for begin, end in _joined(wanted):
                file.seek(begin)
                file.write(fetcher.fetch((begin, end - 1)).read())


def _joined(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans, those in one that lie so close that a request of its own would cost more."""
    joined = spans[:1]
    for begin, end in spans[1:]:
        if begin - joined[-1][1] <= GAP_BYTES:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
