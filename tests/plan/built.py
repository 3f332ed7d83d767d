# SPDX-License-Identifier: Apache-2.0
"""What ``profilemate.simulation.classes`` lets vLLM make of models, in one process, as pickles."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from analysis.plan.built import Built
from profilemate.simulation.classes import Asked, NotKnownError, RefusedError, build

Answers = Mapping[str, Built | NotKnownError | RefusedError]


def main(questions: Path, out: Path) -> None:
    """Answer each question. A GPU is the last platform: its answers stay."""
    asked: dict[str, Asked] = pickle.loads(questions.read_bytes())
    in_order = sorted(asked.items(), key=lambda item: item[1].platform == "gpu")
    found = {name: answer(one) for name, one in in_order}
    out.write_bytes(pickle.dumps(found))


def answer(asked: Asked) -> Built | NotKnownError | RefusedError:
    try:
        return build(asked)
    except (NotKnownError, RefusedError) as error:
        return error


if __name__ == "__main__":
    paths: Sequence[Path] = [Path(one) for one in sys.argv[1:]]
    main(*paths)
