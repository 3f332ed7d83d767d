# SPDX-License-Identifier: Apache-2.0
"""How fast does Hugging Face's ``generate()`` answer the prompts of ``vllm bench throughput``?

    python -m profilemate.sweep.hf_generate RESULT BATCH GPUS OPTIONS...

The options are the benchmark's. vLLM's own code draws the prompts, from the same dataset, seed and
tokenizer. They are answered in their order, a batch at a time: padded on the left, sampled at
temperature 1, with as many new tokens as the benchmark asks for, whether or not an end token comes.
The time is that of what the benchmark times: tokenizing, generating, and turning the answers into
text. A batch goes on until its longest answer is complete; the other answers' extra tokens do not
count.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str]) -> None:
    """Generate, then write the result."""
    path, batch_size, gpus, *options = arguments
    args = _options(options)
    tokenizer, requests = _drawn(args)
    model = _model(args, int(gpus))
    tokenizer.padding_side = "left"
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    batches = [
        requests[at : at + int(batch_size)] for at in range(0, len(requests), int(batch_size))
    ]
    # Not timed: what happens once, such as the loading of kernels. vLLM does that before, too.
    _answered(model, tokenizer, batches[0], longest=1)
    lengths: list[int] = []
    digest = hashlib.sha256()
    start = time.perf_counter()
    for number, batch in enumerate(batches, start=1):
        for ids in _answered(model, tokenizer, batch):
            lengths.append(len(ids))
            digest.update(json.dumps(ids).encode())
        print(f"batch {number} of {len(batches)}", flush=True)
    seconds = time.perf_counter() - start
    output = sum(request.expected_output_len for request in requests)
    result = {
        "requests": len(requests),
        "input_tokens": sum(lengths),
        "output_tokens": output,
        "seconds": seconds,
        "input_lengths": sorted(lengths),
        "prompts_digest": digest.hexdigest(),
        "device": str(model.device),
        "gpu_memory_bytes": _peak_on_gpu(),
        "weights": "random" if args.load_format == "dummy" else "loaded",
    }
    Path(path).write_text(json.dumps(result))


def _options(options: Sequence[str]) -> Namespace:
    from vllm.benchmarks import throughput

    try:
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError:  # before 0.11.1
        from vllm.utils import FlexibleArgumentParser
    parser = FlexibleArgumentParser()
    throughput.add_cli_args(parser)
    args: Namespace = parser.parse_args(list(options))
    throughput.validate_args(args)
    return args


def _drawn(args: Namespace) -> tuple[Any, list[Any]]:
    """The tokenizer and the requests, as ``vllm.benchmarks.throughput.main`` draws them."""
    from transformers import AutoTokenizer
    from vllm.benchmarks import throughput

    args.seed = args.seed or 0
    random.seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(
        args.tokenizer, trust_remote_code=args.trust_remote_code
    )
    warm_ups = getattr(args, "num_warmups", 0)
    if warm_ups:
        # The benchmark draws these first, which may advance a random generator.
        throughput.get_requests(
            Namespace(**{**vars(args), "num_prompts": warm_ups, "seed": args.seed + 1}), tokenizer
        )
    return tokenizer, list(throughput.get_requests(args, tokenizer))


def _model(args: Namespace, gpus: int) -> Any:
    import torch
    import transformers

    release = tuple(map(int, transformers.__version__.split(".")[:2]))
    dtype_name = "dtype" if release >= (4, 56) else "torch_dtype"
    dtype: Any = {"half": "float16", "float": "float32"}.get(args.dtype, args.dtype)
    options: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    kind: Any = transformers.AutoModelForCausalLM
    if args.load_format == "dummy":
        config = transformers.AutoConfig.from_pretrained(args.model, **options)
        own = getattr(config, dtype_name, None) or torch.float32
        options[dtype_name] = own if dtype == "auto" else getattr(torch, dtype)
        model = kind.from_config(config, **options)
    elif gpus > 1:
        return kind.from_pretrained(
            args.model, device_map="auto", **options, **{dtype_name: dtype}
        ).eval()
    else:
        model = kind.from_pretrained(args.model, **options, **{dtype_name: dtype})
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _answered(
    model: Any, tokenizer: Any, batch: Sequence[Any], longest: int | None = None
) -> list[list[int]]:
    """Answer a batch of prompts; their token ids."""
    import torch

    prompts = [_token_ids(tokenizer, request.prompt) for request in batch]
    padded = tokenizer.pad({"input_ids": prompts}, padding=True, return_tensors="pt")
    tokens = longest or max(request.expected_output_len for request in batch)
    with torch.inference_mode():
        answers = model.generate(
            **padded.to(model.device),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=tokenizer.pad_token_id,
        )
    tokenizer.batch_decode(answers[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
    return prompts


def _token_ids(tokenizer: Any, prompt: Any) -> list[int]:
    if isinstance(prompt, dict):
        return list(prompt["prompt_token_ids"])
    return list(tokenizer(prompt).input_ids)


def _peak_on_gpu() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    peaks = map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))
    return int(sum(peaks))


if __name__ == "__main__":
    main(sys.argv[1:])
