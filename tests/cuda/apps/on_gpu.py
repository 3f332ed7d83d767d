# SPDX-License-Identifier: Apache-2.0
"""A user's application on a GPU: an offline ``LLM`` that knows nothing of profilemate.

    python on_gpu.py MODEL RESULT OPTIONS

OPTIONS are LLM's, as JSON. Writes what was generated, and what ``independent`` counted before and
after it, to RESULT, as JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

from offline import generate, identical_prompts, mixed_prompts


def main(model: str, result: Path, options: dict[str, Any]) -> None:
    import vllm

    llm = vllm.LLM(
        model,
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        worker_extension_cls="independent.Extension",
        **options,
    )
    (before,) = llm.collective_rpc("independent_counts")
    identical = generate(llm, *identical_prompts())
    mixed = generate(llm, *mixed_prompts())
    llm.reset_prefix_cache()
    (after,) = llm.collective_rpc("independent_counts")
    found = {
        "vllm": vllm.__version__,
        "identical": identical,
        "mixed": mixed,
        "before": before,
        "after": after,
    }
    scratch = result.with_suffix(".part")
    scratch.write_text(json.dumps(found))
    scratch.rename(result)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
