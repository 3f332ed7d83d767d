# SPDX-License-Identifier: Apache-2.0
"""``profilemate pack`` and ``profilemate unpack``: a session as Parquet files, and back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from profilemate.commands.shared.options import SessionArgument
from profilemate.commands.shared.progress import bytes_bar
from profilemate.commands.shared.stdout import show_line
from profilemate.commands.shared.values import folder


@dataclass(frozen=True)
class PackOptions:
    session: SessionArgument = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER|URL",
            parser=folder,
            help="The Parquet session's folder, which must not exist yet, or its place in object "
            "storage: s3://, gs://, az://. Default: beside the session, with its name and "
            "_parquet.",
            show_default=False,
        ),
    ] = None


@dataclass(frozen=True)
class UnpackOptions:
    session: SessionArgument = None
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            parser=folder,
            help="The session's folder, which must not exist yet. Default: beside the Parquet "
            "session, with the name that the session had.",
            show_default=False,
        ),
    ] = None


def pack(options: PackOptions) -> int:
    """Write a session as Parquet files, a tenth of its size.

    Every command reads a Parquet session as it reads a session. Each row is compared with the text
    that it was; 'profilemate unpack' gives the same files back, byte for byte. The session stays
    where it is.

    \b
    Examples:
      profilemate pack                    the newest session
      profilemate pack ~/runs/monday -o ~/kept/monday
      profilemate pack -o s3://bucket/runs/monday

    \b
    Exit codes:
      0   done; the last line is the Parquet session's path
      2   no such session, it still runs, it cannot be read, the folder is
          there already or cannot be written, or a wrong option
    """
    from profilemate.commands.pack_folder import pack as work

    with bytes_bar("packing") as progress:
        packed = work(options.session, options.output, progress)
    share = 100 * packed.bytes / packed.text_bytes if packed.text_bytes else 0
    show_line(
        f"{_size(packed.text_bytes)} of tables are {_size(packed.bytes)} as Parquet, {share:.1f} %"
    )
    if packed.as_text:
        show_line(
            f"kept as text, as a hand or another release wrote it: {', '.join(packed.as_text)}"
        )
    show_line(packed.place)
    return 0


def _size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"


def unpack(options: UnpackOptions) -> int:
    """Make a Parquet session what it was: CSV files, byte for byte.

    A digest of each file's text is compared. Segments come back as segments.

    \b
    Examples:
      profilemate unpack ~/kept/monday
      profilemate unpack ~/kept/monday -o /tmp/monday

    \b
    Exit codes:
      0   done; the last line is the session's path
      2   no such Parquet session, it is damaged, the folder is there already
          or cannot be written, or a wrong option
    """
    from profilemate.commands.unpack_folder import unpack as work

    with bytes_bar("unpacking") as progress:
        place = work(options.session, options.output, progress)
    show_line(str(place))
    return 0
