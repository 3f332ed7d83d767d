# SPDX-License-Identifier: Apache-2.0
"""Size the next deployment by a session, for ``profilemate plan --from``."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, get_type_hints

import typer

from analysis.errors import RuleError

if TYPE_CHECKING:
    from analysis.headroom.deployment import Deployment

_TAKEN = ("sized_by", "rate", "max_num_seqs", "blocks", "as_json", "without_vllm")
"""Fields of the options that go with ``--from``."""
_ONLY = ("rate", "max_num_seqs")
"""Those that go with nothing else."""
_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "h": 3600.0}


class Options(Protocol):
    """The options of ``profilemate plan`` that are read here."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def sized_by(self) -> Path | None: ...
    @property
    def rate(self) -> float | None: ...
    @property
    def max_num_seqs(self) -> int | None: ...
    @property
    def blocks(self) -> int | None: ...


def rate(text: str) -> float:
    """Requests a second.

    >>> rate("20"), rate("20/s"), rate("90/min")
    (20.0, 20.0, 1.5)
    """
    match = re.fullmatch(r"(\d+\.?\d*|\.\d+) ?(?:/ ?(s|min|h))?", str(text).strip(), re.ASCII)
    value = float(match[1]) / _UNITS[match[2] or ""] if match else 0.0
    if not 0 < value < math.inf:
        raise typer.BadParameter(f"{text!r} is not a rate; write 20, 20/s, 1200/min or 72000/h")
    return value


def check(options: Options) -> None:
    """See that the options go together.

    Raises:
        RuleError: one belongs to another kind of plan.

    """
    given = [name for name in _names(options) if not _is_default(options, name)]
    if options.sized_by is None:
        wrong = [name for name in given if name in _ONLY]
        if wrong:
            raise RuleError(f"{_flag(options, wrong[0])} needs --from SESSION")
        return
    wrong = [name for name in given if name not in _TAKEN]
    if wrong:
        raise RuleError(
            f"--from sizes a deployment of the session's own model, and takes --rate, "
            f"--max-num-seqs and --num-gpu-blocks-override; leave out {_flag(options, wrong[0])}"
        )
    for name, least in (("max_num_seqs", 1), ("blocks", 2)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise RuleError(f"{_flag(options, name)} is {value}; name {least} or more")


def sized(options: Options, session: Path) -> Deployment:
    """The deployment.

    Raises:
        RuleError: the session does not show what a request needs.
        SessionError: the session cannot be read.

    """
    from analysis import open_session
    from analysis.headroom import deployment

    return deployment.measure(
        open_session(session),
        per_sec=options.rate,
        pool_blocks=options.blocks,
        max_num_seqs=options.max_num_seqs,
    )


def _names(options: Options) -> list[str]:
    return [field.name for field in fields(options)]


def _is_default(options: Options, name: str) -> bool:
    field = next(field for field in fields(options) if field.name == name)
    return field.default is not MISSING and bool(getattr(options, name) == field.default)


def _flag(options: Options, name: str) -> str:
    """The option as the user writes it."""
    declared = get_type_hints(type(options), include_extras=True)[name].__metadata__[0]
    # In an annotation, typer's first name of an option lies where its default would.
    words = (declared.default, *(declared.param_decls or ()))
    flags = [word for word in words if isinstance(word, str) and word.startswith("--")]
    return flags[0] if flags else "MODEL"
