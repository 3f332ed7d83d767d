# SPDX-License-Identifier: Apache-2.0
"""Write a tiny Llama: its configuration and its tokenizer, no weights.

vLLM fills the weights with random numbers (`--load-format dummy`). The pool, the scheduler and the
prefix cache work as with a large model. Only the text is noise.
"""

import json
from pathlib import Path

BOS, EOS = "<s>", "</s>"
MAX_TOKENS = 512

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": MAX_TOKENS,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def write_model(folder: Path) -> None:
    """Write the model's files into `folder`, and make it if it is missing."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # Each byte is a token, so every text can be encoded without training.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([BOS, EOS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in {
        "config.json": CONFIG,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "model_max_length": MAX_TOKENS,
        },
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
