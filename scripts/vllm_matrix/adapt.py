# SPDX-License-Identifier: Apache-2.0
"""What is the same for all cases: the scheduler, and what a request and an answer consist of."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy

from profilemate.simulation import parts

ANSWER = 7
BLOCK_SIZE = 16


def build_scheduler(model: Path, blocks: int, **arguments: Any) -> Any:
    """A Scheduler over a pool of so many blocks; one group of full attention by default."""
    settings = {
        "block_size": BLOCK_SIZE,
        "max_model_len": 1024,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
    }
    return parts.build_scheduler(model, blocks, **settings | arguments)


def full_attention() -> Any:
    """The spec of a group of full attention."""
    return parts.full_attention(BLOCK_SIZE)


def sliding_window(window: int) -> Any:
    """The spec of a group of sliding-window attention; ``window`` in tokens."""
    return parts.sliding_window(BLOCK_SIZE, window)


def hashes_parts_of_blocks() -> bool:
    """Whether a block may be longer than what is hashed (from 0.24)."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return "hash_block_size" in parts.known(Scheduler, {"hash_block_size": BLOCK_SIZE})


def mamba(block_size: int, mode: str, **more: Any) -> Any:
    """The spec of a group of Mamba states: one a request ("none"), or those at the ends of blocks,
    too, for prefix caching ("align")."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    arguments = {
        "block_size": block_size,
        "shapes": ((4, 4),),
        "dtypes": (torch.float32,),
        # Up to 0.10.1.1.
        "dtype": torch.float32,
        "mamba_cache_mode": mode,
        **more,
    }
    return MambaSpec(**parts.known(MambaSpec, arguments))


def with_connector() -> dict[str, Any]:
    """Arguments of a scheduler that asks the connector ``Elsewhere``."""
    import vllm.distributed.kv_transfer.kv_connector.factory as module
    from vllm.config import KVTransferConfig

    if hasattr(module, "envs"):
        # 0.8.5 to 0.10 ask which engine was chosen: on CPUs 0.8.5 and 0.9.0 choose that before V1.
        module.envs = SimpleNamespace(VLLM_USE_V1=True)
    name, factory = "Elsewhere", module.KVConnectorFactory
    if name not in factory._registry:
        factory.register_connector(name, "scripts.vllm_matrix.connector", name)
    return {"kv_transfer_config": KVTransferConfig(kv_connector=name, kv_role="kv_both")}


def answer(scheduler: Any, output: Any) -> Any:
    """What a model would return for this step, its drafts and its connector included."""
    results = parts.answer(scheduler, output, lambda request: ANSWER)
    for name, drafts in output.scheduled_spec_decode_tokens.items():
        _accept(results, name, _accepted(scheduler.requests[name], len(drafts)))
    if scheduler.connector is not None:
        _report_transfers(results, *scheduler.connector.take_finished())
    return results


def _accepted(request: Any, drafts: int) -> int:
    """How many of its drafts are right: none, some, or all of them."""
    return int(request.num_output_tokens) % (drafts + 1)


def _accept(results: Any, name: str, drafts: int) -> None:
    at = results.req_id_to_index[name]
    one = results.sampled_token_ids[at]
    more = [ANSWER] * drafts
    # 0.11.1 and 0.11.2 have arrays.
    results.sampled_token_ids[at] = (
        one + more if isinstance(one, list) else numpy.append(one, more).astype(int)
    )


def _report_transfers(results: Any, sent: set[str], received: set[str]) -> None:
    import vllm.v1.outputs as outputs

    transfers = {"finished_sending": sent or None, "finished_recving": received or None}
    if hasattr(outputs, "KVConnectorOutput"):
        results.kv_connector_output = outputs.KVConnectorOutput(**transfers)
    else:
        # Up to 0.10.1.1.
        vars(results).update(transfers)


def draft(scheduler: Any, count: int) -> None:
    """Give every request that has its prompt computed so many drafts, as a drafter would."""
    for request in scheduler.running:
        if request.num_computed_tokens >= request.num_prompt_tokens:
            request.spec_token_ids = [ANSWER] * count
