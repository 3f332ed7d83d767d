# SPDX-License-Identifier: Apache-2.0
"""The same requests to engines of many kinds, with profilemate and without: the same answers?

Token ids, texts, log probabilities, finish reasons and cached tokens are compared to the last
digit. The profiled engines' tables must have each request.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from attacks.apps.answers import KINDS
from attacks.figure import Figure
from tests.support.engine import Lab, metadata, requests, sessions, wait_until_settled

APP = Path(__file__).parent / "apps" / "answers.py"
RUNS = ("bare", "profiled")
HOURS = 2


def run(count: int, seed: int, folder: Path) -> list[Figure]:
    lab = Lab(folder)
    adapter = write_adapter(lab.model, folder / "adapter")
    running = [start(lab, adapter, name, count, seed) for name in RUNS]
    for process in running:
        process.wait(HOURS * 3600)
    wait_until_settled(lab.sessions("profiled"))
    figures = [
        figure
        for kind in KINDS
        for figure in compared(kind, *(answers(folder / name, kind) for name in RUNS))
    ]
    return [*figures, *recorded(lab.sessions("profiled"))]


def start(lab: Any, adapter: Path, name: str, count: int, seed: int) -> subprocess.Popen[bytes]:
    """Run all kinds of engines, the first one with all requests, the others with a quarter."""
    folder = lab.folder / name
    folder.mkdir()
    command = [sys.executable, str(APP), str(lab.model), str(adapter), str(folder)]
    environment = lab.environment(
        name, profiled=name == "profiled", VLLM_ENABLE_V1_MULTIPROCESSING="0"
    )
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [*command, str(count), str(seed), *KINDS],
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )


def answers(folder: Path, kind: str) -> dict[str, Any]:
    """What one engine answered, or its error."""
    found: dict[str, Any] = json.loads((folder / f"{kind}.json").read_text())
    return found


def compared(kind: str, bare: dict[str, Any], profiled: dict[str, Any]) -> list[Figure]:
    """What one kind of engine answered."""
    if "error" in bare:
        print(f"  {kind} does not run on this vLLM: {' '.join(bare['error'].split())[:300]}")
        return [Figure(f"{kind}: other errors", int(bare != profiled), most=0)]
    different = sum(bare.get(name) != profiled.get(name) for name in bare.keys() | profiled.keys())
    return [
        Figure(f"{kind}: answers", len(bare)),
        Figure(f"{kind}: answers that differ", different, most=0),
    ]


def recorded(base: Path) -> list[Figure]:
    """What the sessions say of themselves."""
    known = [metadata(session) for session in sessions(base)]
    processes = [process for one in known for process in one["processes"]]
    return [
        Figure("sessions", len(known)),
        Figure("requests in their tables", sum(len(requests(one)) for one in sessions(base))),
        Figure("sessions not complete", sum(not one["complete"] for one in known), most=0),
        Figure("mismatches", sum(process["mismatches"] for process in processes), most=0),
        Figure("hooks that failed", sum(len(one["hooks_failed"]) for one in processes), most=0),
    ]


def write_adapter(model: Path, folder: Path) -> Path:
    """A LoRA adapter of the model, with random weights."""
    import numpy as np
    from safetensors.numpy import save_file

    config = json.loads((model / "config.json").read_text())
    hidden, rank = config["hidden_size"], 8
    heads = {
        "q_proj": config["num_attention_heads"] * config["head_dim"],
        "v_proj": config["num_key_value_heads"] * config["head_dim"],
    }
    random = np.random.default_rng(1)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in heads.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (rank, hidden)), ("B", (width, rank))):
                values = random.standard_normal(shape).astype(np.float32)
                weights[f"{prefix}.lora_{part}.weight"] = values
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*heads]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder
