# SPDX-License-Identifier: Apache-2.0
"""Fill a folder with all that recording needs."""

from __future__ import annotations

import compileall
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path, PurePath

from analysis.errors import RuleError
from profilemate import ROOT, __version__, door

MARK = "profilemate.json"
"""What the folder is made of. It comes first and stays, so a folder that is not whole has it."""
PACKAGES = ("wrapt", "orjson")


def fill(folder: Path) -> str:
    """Fill the folder; ``sitecustomize.py`` comes last, so until then it changes nothing.

    What is there is replaced, a package at a time. The files can be read by everybody, as another
    user may run vLLM.

    Returns:
        What the folder is made for, as "CPython 3.12, Linux x86_64".

    Raises:
        RuleError: the folder has something else in it, or cannot be written; or a package is not
            installed.

    """
    made_for = (
        f"{platform.python_implementation()} {sys.version_info[0]}.{sys.version_info[1]}, "
        f"{platform.system()} {platform.machine()}"
    )
    packages = [_installed(name) for name in PACKAGES]
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            folder.chmod(0o755)
        _refuse_another(folder)
        _write_mark(folder, made_for, packages)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as scratch:
            new = Path(scratch, "new")
            new.mkdir()
            _copy_all(new, packages)
            compileall.compile_dir(new, quiet=2)
            _let_everybody_read(new)
            (folder / door.FILE).unlink(missing_ok=True)
            for entry in sorted(new.iterdir(), key=lambda entry: entry.name == door.FILE):
                _replace(entry, folder / entry.name, Path(scratch, f"old-{entry.name}"))
    except OSError as error:
        raise RuleError(f"cannot fill {folder}: {error.strerror or error}") from None
    return made_for


def _installed(name: str) -> Distribution:
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise RuleError(
            f"{name} is not installed: {sys.executable} -m pip install {name}"
        ) from None
    if not found.files:
        raise RuleError(f"{name} does not say which files it has: install it with pip")
    return found


def _refuse_another(folder: Path) -> None:
    names = os.listdir(folder)
    if names and MARK not in names:
        raise RuleError(f"{folder} has other files in it; name a new folder")


def _write_mark(folder: Path, made_for: str, packages: list[Distribution]) -> None:
    known = {
        "profilemate": __version__,
        "made_for": made_for,
        **{name: found.version for name, found in zip(PACKAGES, packages, strict=True)},
    }
    scratch = folder / f".{MARK}"
    scratch.write_text(json.dumps(known, indent=2) + "\n")
    scratch.chmod(0o644)
    scratch.replace(folder / MARK)


def _copy_all(new: Path, packages: list[Distribution]) -> None:
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    shutil.copytree(Path(ROOT, "profilemate"), new / "profilemate", ignore=ignored)
    for found in packages:
        for path in _files(found):
            target = new / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found.locate_file(path), target)  # type: ignore[arg-type]
    shutil.copyfile(Path(door.folder(), door.FILE), new / door.FILE)


def _files(found: Distribution) -> Iterator[PurePath]:
    """The package's own files, its name, version and license; nothing of its installation."""
    for path in found.files or ():
        top = path.parts[0]
        is_kept = not top.endswith(".dist-info") or (
            path.name == "METADATA" or "licen" in str(path).lower()
        )
        if is_kept and top != ".." and "__pycache__" not in path.parts:
            yield PurePath(path)


def _let_everybody_read(new: Path) -> None:
    for path in [new, *new.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)


def _replace(new: Path, at: Path, old: Path) -> None:
    if at.exists():
        at.rename(old)
    new.rename(at)
