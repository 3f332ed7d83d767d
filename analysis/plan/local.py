# SPDX-License-Identifier: Apache-2.0
"""Where on this machine is the model that a user names?"""

from __future__ import annotations

import os
import re
from pathlib import Path

from analysis.errors import RuleError
from analysis.plan.entries import FILE


def find(name: str) -> Path:
    """The folder or the config.json of the model with this name. The name is a path, or that of
    a model that was downloaded from the Hugging Face Hub. Nothing is downloaded.

    Raises:
        RuleError: this machine has no such model.

    """
    path = Path(name)
    # Unlike Path.exists, this does not raise on a name that no system call takes.
    if os.path.exists(path):
        return path
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
        raise RuleError(f"there is no {name}; name a model's folder or its {FILE}")
    folder = _hub() / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text().strip()
        found = folder / "snapshots" / revision
        if (found / FILE).is_file():
            return found
    except (OSError, ValueError):
        pass
    raise RuleError(
        f"{name} is no path, and not among the models that were downloaded from the Hub; "
        f"name a model's folder or its {FILE}"
    )


def _hub() -> Path:
    """The folder into which Hugging Face's libraries download models."""
    named = os.environ.get("HF_HUB_CACHE")
    if named:
        return Path(named)
    home = os.environ.get("HF_HOME")
    return Path(home or Path.home() / ".cache" / "huggingface") / "hub"
