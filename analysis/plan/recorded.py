# SPDX-License-Identifier: Apache-2.0
"""Which model did a session serve, and with which settings?"""

from __future__ import annotations

from pathlib import Path

from analysis.errors import RuleError, SessionError
from analysis.gpu.memory import measure
from analysis.plan import config, local, platforms
from analysis.plan.model import MOST_LAYERS, Attention, Model
from analysis.plan.settings import Settings
from analysis.tables import facts as session_facts
from analysis.tables.facts import FULL_ATTENTION, Facts
from analysis.tables.metadata import flag, part, text
from analysis.tables.session import Session

_SOURCE = "metadata.json: model"


def settings_of(session: Session) -> Settings:
    """The settings of the session's engine, as far as the session records them.

    Raises:
        SessionError: the session does not record its block sizes or its longest sequence.

    """
    metadata = session.metadata
    facts = session_facts.read(session)
    start_up = measure(session, facts).start_up
    sizes = [one.block_size for one in facts.groups if one.block_size]
    if not sizes or facts.max_model_len is None:
        raise SessionError(
            f"{session.directory}: metadata.json does not describe the KV cache's groups; plan "
            "from a model and a GPU instead"
        )
    asynchronous = flag(part(metadata, "scheduler").get("async_scheduling"))
    stages = facts.pipeline_parallel or 1
    # With several stages, model runner V1 has no batch more in flight.
    one_more = text(part(metadata, "cuda_graphs").get("runner")) == "V2" or stages == 1
    state_dtype = text(part(metadata, "cache").get("mamba_ssm_cache_dtype"))
    latent = {one.block_size or 0 for one in facts.groups if one.kind == "MLAAttentionSpec"}
    return Settings(
        platform=platforms.recorded(facts.device, state_dtype, latent),
        gpu_bytes=None if start_up is None else start_up.total_bytes,
        gpu_source="the session's start-up",
        gpu_memory_utilization=facts.gpu_memory_utilization or 1.0,
        max_model_len=facts.max_model_len,
        block_size=min(sizes),
        kv_cache_dtype=facts.cache_dtype or "auto",
        state_dtype=state_dtype,
        tensor_parallel=facts.tensor_parallel or 1,
        pipeline_parallel=stages,
        prefix_caching=facts.prefix_caching is not False,
        max_num_batched_tokens=facts.scheduler.max_num_batched_tokens,
        in_flight_batches=stages + 1 if asynchronous and one_more else stages,
    )


def model_of(session: Session) -> tuple[Model, Path | None]:
    """The model that the session served, and the folder with its files.

    Where the model's configuration is not on this machine, the model is the one that the session
    describes: its layers are all alike, and its weights are not known.

    Raises:
        SessionError: the session does not describe the model.
        RuleError: the model's layers are not all alike, so the session's numbers are not enough.

    """
    facts = session_facts.read(session)
    if facts.model:
        try:
            path = local.find(facts.model)
            return config.read(path, name=facts.model), path if path.is_dir() else None
        except RuleError:
            # The name is another one, the model is on another machine, or plan does not know it.
            pass
    return _described(session, facts), None


def _described(session: Session, facts: Facts) -> Model:
    """The model of the numbers in metadata.json."""
    layers = facts.layers
    heads = session_facts.count(session.metadata, "model.kv_heads")
    size, dtype = session_facts.count(session.metadata, "model.head_size"), facts.dtype
    if not layers or not heads or not size or dtype is None:
        raise SessionError(
            f"{session.directory}: metadata.json does not describe the model's layers; name the "
            "model's folder or its config.json"
        )
    kinds = {one.kind for one in facts.groups}
    if kinds - {*FULL_ATTENTION}:
        raise RuleError(
            f"the session's model keeps {', '.join(sorted(filter(None, kinds)))}, which the "
            "session alone does not describe; name the model's folder or its config.json"
        )
    latent = kinds == {"MLAAttentionSpec"}
    gpus, stages = facts.tensor_parallel or 1, facts.pipeline_parallel or 1
    if layers * stages > MOST_LAYERS:
        raise SessionError(
            f"{session.directory}: metadata.json has {layers:,} layers in each of {stages:,} "
            f"pipeline stages, and a model has at most {MOST_LAYERS:,}; name the model's folder or "
            "its config.json"
        )
    kept = Attention(heads * (1 if latent else gpus), size, 0 if latent else size, latent=latent)
    return Model(
        name=facts.model or "the session's model",
        dtype=dtype,
        layers=((kept,),) * (layers * stages),
        max_model_len=facts.max_model_len,
        parameters=None,
        quantization=None,
        quantized_bytes=None,
        sources=dict.fromkeys(("layers", "kv_heads", "head_size", "dtype"), _SOURCE),
    )
