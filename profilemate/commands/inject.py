# SPDX-License-Identifier: Apache-2.0
"""``profilemate inject``: a folder for PYTHONPATH that needs no installation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from profilemate.commands.inject_folder import fill
from profilemate.commands.shared.stdout import show_line


@dataclass(frozen=True)
class InjectOptions:
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            help="The folder to fill: a new one, an empty one, or one that this command made.",
            show_default=False,
        ),
    ]


def inject(options: InjectOptions) -> int:
    """Make a folder for PYTHONPATH that needs no installation.

    It gets sitecustomize.py, profilemate, wrapt and orjson, as they are installed here. So run it
    with a Python of the same version, and on the same kind of machine, as the one that runs vLLM.
    Nothing is downloaded. vLLM's own packages come before those in the folder.

    \b
    Examples:
      profilemate inject /opt/profilemate
      PYTHONPATH=/opt/profilemate vllm serve MODEL

    \b
    Exit codes:
      0   done
      2   the folder has other files in it, it cannot be written, or a package
          is missing
    """
    made_for = fill(options.folder)
    show_line(f"{options.folder} is made for {made_for}. Put it on vLLM's PYTHONPATH:")
    show_line(f"  export PYTHONPATH={options.folder.absolute()}:$PYTHONPATH")
    return 0
