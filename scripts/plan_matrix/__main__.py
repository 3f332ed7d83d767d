# SPDX-License-Identifier: Apache-2.0
"""Check plans against every model class of the installed vLLM: python -m scripts.plan_matrix

With ``--update-docs`` it writes docs/plan-models.md. A class takes some seconds, all of them half
an hour. Names of architectures check these alone.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from scripts.plan_matrix import configs, page
from scripts.plan_matrix.check import check


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.plan_matrix", description=__doc__)
    parser.add_argument("names", nargs="*", help="architectures; all of them by default")
    parser.add_argument("--update-docs", action="store_true", help="write docs/plan-models.md")
    options = parser.parse_args()
    from profilemate.simulation.worker import ENVIRONMENT

    os.environ.update(ENVIRONMENT)
    # Once, and not in each process.
    import vllm.engine.arg_utils
    import vllm.v1.worker.gpu.attn_utils

    results = []
    for name in options.names or sorted(configs.architectures()):
        found = check(name)
        print(page.line(found), flush=True)
        results.append(found)
    if options.update_docs:
        page.write(results, vllm.__version__, Path(page.NAME))


if __name__ == "__main__":
    main()
