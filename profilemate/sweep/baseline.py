# SPDX-License-Identifier: Apache-2.0
"""How to run the Hugging Face baseline on the prompts of ``vllm bench throughput``?

It runs in a process of its own, under the Python that runs vLLM. Its command is the sweep's, with
``profilemate.sweep.hf_generate`` in place of ``bench throughput``. That draws the prompts as the
benchmark does, with vLLM's own code and the command's own options.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from analysis.errors import RuleError
from profilemate import ROOT
from profilemate.sweep import settings
from profilemate.sweep.benchmarks import option
from profilemate.sweep.settings import Settings

KINDS = ("hf",)
PROBE_SEC = 120
RESULT = "generated.json"

_BENCHMARK = ["bench", "throughput"]
_RUN = (
    "import sys, runpy; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module('profilemate.sweep.hf_generate', run_name='__main__', alter_sys=True)"
)
_MISSING = (
    "import importlib.util, sys; "
    "print(' '.join(n for n in sys.argv[1:] if importlib.util.find_spec(n) is None))"
)
_WORKLOAD = re.compile(
    r"(model|tokenizer|tokenizer-mode|seed|n|num-prompts|num-warmups|input-len|output-len"
    r"|(dataset|random|prefix|sharegpt|hf|custom)-.*)"
)
"""Flags that decide which prompts are drawn, or who answers them."""


def check(command: Sequence[str], combination: Settings) -> None:
    """Check, before anything runs, that there can be a baseline for this command.

    Raises:
        RuleError: it is another benchmark, prompts differ between runs, or a package is missing.

    """
    at = _place(command)
    if option(command, "n") not in (None, "1"):
        raise RuleError("--baseline hf answers each prompt once; leave --n out of the command")
    for name in combination:
        if _WORKLOAD.fullmatch(name.replace("_", "-")):
            raise RuleError(
                f"--baseline hf needs the same model and prompts in all runs, and {name} changes "
                "them; sweep each of its values into a folder of its own"
            )
    python = _python(command[:at])
    needed = ["torch", "transformers", "vllm"]
    if _gpus(command) > 1:
        needed.append("accelerate")
    try:
        done = subprocess.run(
            [*python, "-c", _MISSING, *needed],
            capture_output=True,
            text=True,
            timeout=PROBE_SEC,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RuleError(f"--baseline hf cannot run {' '.join(python)}: {error}") from None
    missing = done.stdout.split()
    if missing:
        raise RuleError(
            f"--baseline hf needs {' and '.join(missing)}, which {python[-1]} does not have: "
            f"{python[-1]} -m pip install {' '.join(missing)}; or leave --baseline away"
        )


def command(
    template: Sequence[str], combination: Settings, folder: Path, batch_size: int
) -> list[str]:
    """The baseline's command, which writes its measurements to ``RESULT`` in the folder."""
    at = _place(template)
    # An engine's flag with a placeholder needs some value, whichever it is.
    words = settings.command(template, combination, folder)
    options = words[at + len(_BENCHMARK) : len(template)]
    own = [ROOT, str(folder / RESULT), str(batch_size), str(_gpus(words))]
    return [*_python(words[:at]), "-c", _RUN, *own, *options]


def result(folder: Path) -> dict[str, Any] | None:
    """The baseline's measurements; None where it wrote none."""
    try:
        measured = json.loads((folder / RESULT).read_bytes())
    except (OSError, ValueError):
        return None
    return measured if isinstance(measured, dict) else None


def _place(command: Sequence[str]) -> int:
    """Where ``bench throughput`` stands in the command."""
    for at in range(1, len(command) - 1):
        if list(command[at : at + 2]) == _BENCHMARK:
            return at
    raise RuleError(
        "--baseline hf works for 'vllm bench throughput' alone: it draws the same prompts as "
        "that does; leave --baseline away, or sweep 'vllm bench throughput ...'"
    )


def _python(launcher: Sequence[str]) -> list[str]:
    """The Python that the words before ``bench`` start, with the words before it (``env``,
    ``nice``, ``numactl``)."""
    if len(launcher) > 2 and launcher[-2] == "-m":
        return list(launcher[:-2])
    found = shutil.which(launcher[-1])
    if found is not None:
        with open(found, "rb") as file:
            head = file.read(1000).decode(errors="replace")
        # Installers write the second form where the path is too long for the first.
        match = re.match(
            r"#!\s*(\S*python\S*)|#!\s*/bin/sh\s+'''exec' \"?(\S*python[^\s\"]*)", head
        )
        if match is not None:
            return [*launcher[:-1], match[1] or match[2]]
    return [*launcher[:-1], sys.executable]


def _gpus(command: Sequence[str]) -> int:
    """How many GPUs the model is spread over."""
    sizes = [option(command, f"{kind}-parallel-size") for kind in ("tensor", "pipeline")] + [
        command[at + 1] for at, word in enumerate(command[:-1]) if word in ("-tp", "-pp")
    ]
    product = 1
    for size in sizes:
        if size and size.isascii() and size.isdigit():
            product *= max(1, int(size))
    return product
